"""Transport between ranks that are threads of this process."""

from rayfcp.execute.parallel.transport import Envelope, Fabric, Pending, Transport


class _Arrivals:
    def __init__(self, fabric: Fabric, rank: int, *, receives: list[Envelope]) -> None:
        self._fabric, self._rank, self._receives = fabric, rank, receives

    def wait(self) -> None:
        for peer, tensor in self._receives:
            tensor.copy_(self._fabric.take(peer, self._rank))

    def done(self) -> bool:
        return not self._receives


class InProcessTransport(Transport):
    """One rank's end of a `Fabric`; sends are copied, so they never wait."""

    def __init__(self, fabric: Fabric, rank: int) -> None:
        self._fabric, self.rank = fabric, rank

    def post(self, sends: list[Envelope], receives: list[Envelope]) -> Pending:
        for peer, tensor in sends:
            self._fabric.put(self.rank, peer, tensor=tensor.detach().clone())
        return _Arrivals(self._fabric, self.rank, receives=receives)
