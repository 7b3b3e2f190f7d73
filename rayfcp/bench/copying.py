"""A copy kernel on a chosen number of multiprocessors, in Triton: what a transport's kernels look like to others."""

from typing import Any

import torch

from rayfcp.config import ConfigError

try:
    import triton
    from triton import language as tl
except ImportError:  # torch brings it where it was built for such devices
    triton = None

BLOCK = 8192
WARPS = 16
"""Threads of a program / 32: about as many as NCCL's channels have."""

if triton is not None:

    @triton.jit
    def _copy(source, target, num_blocks, rounds, size: tl.constexpr):  # type: ignore[no-untyped-def]
        first = tl.program_id(0)
        step = tl.num_programs(0)
        for _ in range(rounds):
            for block in range(first, num_blocks, step):
                at = block * size + tl.arange(0, size)
                tl.store(target + at, tl.load(source + at))


class DeviceCopier:
    """See `Copier`; one program on each of so many multiprocessors, in a stream of its own.

    Raises:
        ConfigError: there is no Triton.
    """

    def __init__(self, num_bytes: int, *, device: torch.device) -> None:
        if triton is None:
            raise ConfigError("copies on multiprocessors need Triton, which is not here; pip install triton")
        self._num_blocks = num_bytes // 4 // BLOCK
        self.num_bytes = 4 * BLOCK * self._num_blocks
        shape = (BLOCK * self._num_blocks,)
        self._source, self._target = (torch.zeros(shape, dtype=torch.int32, device=device) for _ in range(2))
        self._stream = torch.cuda.Stream(device)
        self._start: Any = None
        self._stop: Any = None

    def start(self, num_units: int, *, rounds: int) -> None:
        self._start, self._stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._start.record()
            _copy[(num_units,)](self._source, self._target, self._num_blocks, rounds, size=BLOCK, num_warps=WARPS)
            self._stop.record()

    def is_running(self) -> bool:
        return not self._stop.query()

    def seconds(self) -> float:
        self._stop.synchronize()
        return float(self._start.elapsed_time(self._stop)) / 1e3
