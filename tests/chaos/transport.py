"""A network that delays messages, or loses one and with it, as a broken connection does, all that would follow."""

import time
from typing import Any

from rayfcp.execute.parallel.transport import DistributedTransport, Envelope, Pending
from tests.chaos.commands import Command, Commands


def faulty_transport(commands: Commands, *, delay_s: float) -> Any:
    """The class to use instead of `DistributedTransport`; an object lives as long as a generation."""

    class FaultyTransport(DistributedTransport):
        _is_cut = False

        def post(self, sends: list[Envelope], receives: list[Envelope]) -> Pending:
            if sends and commands.take(Command.DELAY):
                time.sleep(delay_s)
            if sends and not self._is_cut and commands.take(Command.DROP):
                self._is_cut = True
            return super().post([] if self._is_cut else sends, receives)

    return FaultyTransport
