"""A network that delays messages, or loses one and with it, as a broken connection does, all that would follow."""

import time
from typing import Any

from rayfcp.execute.parallel.transport import DistributedTransport, Envelope, Pending
from tests.chaos.orders import Order, Orders


def faulty_transport(orders: Orders, *, delay_s: float) -> Any:
    """The class to use instead of `DistributedTransport`; an object lives as long as a generation."""

    class FaultyTransport(DistributedTransport):
        _is_cut = False

        def post(self, sends: list[Envelope], receives: list[Envelope]) -> Pending:
            if sends and orders.take(Order.DELAY):
                time.sleep(delay_s)
            if sends and not self._is_cut and orders.take(Order.DROP):
                self._is_cut = True
            return super().post([] if self._is_cut else sends, receives)

    return FaultyTransport
