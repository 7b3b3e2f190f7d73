"""Page locks on memory that others allocated, such as maps of files, so that a CUDA device copies there by itself."""

import logging
import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

PIECE_BYTES = 2**30
"""Registered by one call, which takes 0.1 s a GB and holds up other calls of the driver; calls for hundreds fail."""

PORTABLE = 1
"""`cudaHostRegisterPortable`: for all contexts of the process."""

Buffer = np.ndarray[Any, Any]


@dataclass(slots=True)
class _Memory:
    """Memory up to the address `stop`. `pieces`: addresses of those that are registered."""

    stop: int
    pieces: list[int] = field(default_factory=list)
    is_wanted: bool = True


class PageLocks:
    """Registers memory with the CUDA runtime, piece by piece in a thread, in which nothing else calls the runtime: it
    reports an error again to the next caller of the same thread. After the first error nothing more is registered.

    Args:
        runtime: returns `torch.cuda.cudart()`.
    """

    def __init__(self, runtime: Callable[[], Any]) -> None:
        self._runtime = runtime
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="page locks")
        self._memories: dict[int, _Memory] = {}
        self._is_refused = False

    def add(self, memory: Buffer) -> None:
        """Begin to register memory (uint8), from the start of a page. It must stay until `remove`."""
        start = memory.ctypes.data
        added = self._memories[start] = _Memory(stop=start + memory.nbytes)
        for at in range(start, added.stop, PIECE_BYTES):
            self._thread.submit(self._register, added, at)

    def remove(self, memory: Buffer) -> None:
        """Return once nothing of the memory is registered, so that it may be freed."""
        removed = self._memories.pop(memory.ctypes.data, None)
        if removed is not None:
            removed.is_wanted = False
            self._thread.submit(self._unregister, removed).result()

    def cuts(self, buffer: Buffer) -> list[int] | None:
        """Return where copies to a part of memory have to be cut, in bytes from its start: none may go to several
        pieces. None unless all of its memory is registered."""
        start = buffer.ctypes.data
        for first, memory in list(self._memories.items()):
            if first <= start < memory.stop:
                is_whole = len(memory.pieces) == -(-(memory.stop - first) // PIECE_BYTES)
                return [at - start for at in memory.pieces if at > start] if is_whole else None
        return None

    def _register(self, memory: _Memory, at: int) -> None:
        if not memory.is_wanted or self._is_refused:
            return
        pages = -(-min(memory.stop - at, PIECE_BYTES) // mmap.PAGESIZE)
        error = int(self._runtime().cudaHostRegister(at, pages * mmap.PAGESIZE, PORTABLE))
        if error:
            self._is_refused = True
            logger.warning(
                "shared memory cannot be registered with the device (CUDA error %d); copies of the state go through a "
                "buffer, which takes time of CPUs",
                error,
            )
        else:
            memory.pieces.append(at)

    def _unregister(self, memory: _Memory) -> None:
        while memory.pieces:
            error = int(self._runtime().cudaHostUnregister(memory.pieces.pop()))
            if error:
                logger.warning("shared memory stays registered with the device (CUDA error %d)", error)
