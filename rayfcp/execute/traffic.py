"""What attention moves, computes and waits for."""

import time
from dataclasses import dataclass, field

from rayfcp.execute.buffers import Buffers
from rayfcp.execute.transport import Pending


@dataclass(slots=True)
class Traffic:
    """What attention did in one global batch: bytes sent to other ranks, (query, key) cells computed (both
    directions, all layers, in cells of all heads), seconds spent waiting for messages. `buffers`: their memory."""

    bytes_sent: int = 0
    cells: float = 0.0
    wait_s: float = 0.0
    buffers: Buffers = field(default_factory=Buffers)

    def wait(self, pending: Pending) -> None:
        """Wait for messages, and count how long."""
        start_s = time.perf_counter()
        pending.wait()
        self.wait_s += time.perf_counter() - start_s
