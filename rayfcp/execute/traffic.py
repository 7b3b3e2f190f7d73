"""What attention moves, computes and waits for."""

import time
from dataclasses import dataclass, field

from rayfcp.execute.buffers import Buffers
from rayfcp.execute.clocks import Clock, HostClock, Mark
from rayfcp.execute.transport import Pending


@dataclass(slots=True)
class Traffic:
    """What attention did in one global batch: bytes sent to other ranks, (query, key) cells computed (both
    directions, all layers, in cells of all heads), time spent waiting for messages. `buffers`: their memory."""

    bytes_sent: int = 0
    cells: float = 0.0
    buffers: Buffers = field(default_factory=Buffers)
    clock: Clock = field(default_factory=lambda: HostClock(time.perf_counter))
    _waits: list[tuple[Mark, Mark]] = field(default_factory=list)

    def wait(self, pending: Pending) -> None:
        """Wait for messages, or let the device wait, and note how long."""
        start = self.clock.mark()
        pending.wait()
        self._waits.append((start, self.clock.mark()))

    @property
    def wait_s(self) -> float:
        """Seconds without computation because of messages; to be read when all is done."""
        return sum(self.clock.between(start, stop) for start, stop in self._waits)
