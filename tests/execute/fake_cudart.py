"""Registration of host memory in the CUDA runtime, with what its documentation asks of callers."""

import mmap
import threading
from pathlib import Path

from torch import Tensor

PAGE = mmap.PAGESIZE
OUT_OF_MEMORY, ALREADY_REGISTERED, NOT_REGISTERED = 2, 712, 713


class Cudart:
    """As much as `limit_bytes` may be registered. Registrations wait for `may_register`."""

    def __init__(self, limit_bytes: int = 1 << 40) -> None:
        self.ranges: dict[int, int] = {}
        self.limit_bytes, self.num_calls = limit_bytes, 0
        self.may_register = threading.Event()
        self.may_register.set()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802  CUDA's name
        assert self.may_register.wait(60)
        self._called()
        assert flags == 1 and size > 0 and address % PAGE == size % PAGE == 0
        assert is_mapped(address, address + size)
        if any(start < address + size and address < stop for start, stop in self.ranges.items()):
            return ALREADY_REGISTERED
        if sum(stop - start for start, stop in self.ranges.items()) + size > self.limit_bytes:
            return OUT_OF_MEMORY
        self.ranges[address] = address + size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802  CUDA's name
        self._called()
        if address not in self.ranges:
            return NOT_REGISTERED
        assert is_mapped(address, self.ranges.pop(address)), "it is unregistered before it is freed"
        return 0

    def check_copy(self, target: Tensor) -> None:
        """Check that a copy to the host waits for nobody: its memory is within one registration."""
        start = target.data_ptr()
        assert any(a <= start and start + target.nbytes <= b for a, b in self.ranges.items()), "not of one registration"

    def _called(self) -> None:
        self.num_calls += 1
        assert threading.current_thread().name.startswith("page locks"), "errors are reported again in the same thread"


def is_mapped(start: int, stop: int) -> bool:
    """Whether all of this memory exists."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(each, 16) for each in line.split()[0].split("-"))
        if first <= start < last:
            start = last
    return start >= stop
