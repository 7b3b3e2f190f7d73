"""A copy kernel on a chosen number of multiprocessors, in Triton: what a transport's kernels look like to others.

Cost of communication to computation: a copy on some multiprocessors, as a transport's kernels are, next to work.

What it costs that a plan drives attention, where there is nothing to plan: one rank, against the kernel called
once. And whether the host ever waits for the device meanwhile.
"""

import itertools
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rayfcp.bench.attention import AttentionBatch, dense, random_batch, rows_of, run_ranks
from rayfcp.bench.request import BenchRequest, Parts, attention_only, lengths_of, planned
from rayfcp.bench.serial import Stopwatch
from rayfcp.config import ConfigError
from rayfcp.execute.attention.function import AttentionContext, attention
from rayfcp.execute.attention.schedule import make_schedule
from rayfcp.execute.kernels import AttentionKernel, pick_kernel
from rayfcp.execute.parallel.transport import LoneTransport
from rayfcp.plan import model_profile

try:
    import triton
    from triton import language as tl
except ImportError:  # torch brings it where it was built for such devices
    triton = None

BLOCK = 8192
WARPS = 16
"""Threads of a program / 32: about as many as NCCL's channels have."""

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
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


LONGER = 3.0
"""Times the work alone that a copy takes which runs beside it."""


class Copier(Protocol):
    """Copies a buffer again and again with so many multiprocessors, or threads, beside what else the device does."""

    num_bytes: int

    def start(self, num_units: int, *, rounds: int) -> None:
        """Begin; nobody waits."""
        ...

    def is_running(self) -> bool:
        """True while the copy that was started last has not ended."""
        ...

    def seconds(self) -> float:
        """Seconds of that copy; waits for its end."""
        ...


class HostCopier:
    """Threads that copy in memory, where there are no multiprocessors."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._source, self._target = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))
        self._threads: list[threading.Thread] = []
        self._ends: list[float] = []

    def start(self, num_units: int, *, rounds: int) -> None:
        parts = list(zip(self._source.chunk(num_units), self._target.chunk(num_units), strict=True))
        self._ends, self._start_s = [], time.perf_counter()

        def copy(source: torch.Tensor, target: torch.Tensor) -> None:
            for _ in range(rounds):
                target.copy_(source)
            self._ends.append(time.perf_counter())

        self._threads = [threading.Thread(target=copy, args=part) for part in parts]
        for thread in self._threads:
            thread.start()

    def is_running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def seconds(self) -> float:
        for thread in self._threads:
            thread.join()
        return max(self._ends) - self._start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Work that leaves `num_spared` multiprocessors alone, beside a copy on `num_units`. `covered`: the copy outlasted
    the work, so that all of it was slowed."""

    work: str
    num_units: int
    num_spared: int
    alone_s: float
    beside_s: float
    copied_bytes_per_s: float
    covered: bool

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "slowed": self.beside_s / self.alone_s - 1.0}


def copier_of(device: torch.device, *, num_bytes: int) -> Copier:
    """Copier whose units are multiprocessors on CUDA, threads elsewhere."""
    if device.type != "cuda":
        return HostCopier(num_bytes)

    return DeviceCopier(num_bytes, device=device)


def time_beside(
    name: str,
    work: Callable[[], object],
    *,
    copier: Copier,
    num_units: int,
    num_spared: int,
    device: torch.device,
    rounds: int,
) -> Beside:
    """Medians over rounds, after one that does not count, of the work alone and beside the copy."""
    watch = Stopwatch(device)

    def timed() -> float:
        watch.start()
        work()
        watch.stop()
        return watch.seconds()

    alone_s = statistics.median([timed() for _ in range(rounds + 1)][1:])
    copier.start(num_units, rounds=1)
    copier.seconds()
    copier.start(num_units, rounds=1)
    once_s = copier.seconds()
    times = max(1, round(LONGER * alone_s / once_s) + 1)
    found, covered, copied_s = [], True, 0.0
    for _ in range(rounds):
        copier.start(num_units, rounds=times)
        found.append(timed())
        covered &= copier.is_running()
        copied_s += copier.seconds()
    return Beside(
        work=name,
        num_units=num_units,
        num_spared=num_spared,
        alone_s=alone_s,
        beside_s=statistics.median(found),
        copied_bytes_per_s=rounds * times * copier.num_bytes / copied_s,
        covered=covered,
    )


WAITING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::unique_dim", "aten::_unique2")
"""Operations after which the host knows what the device computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Medians over rounds, forward and backward. `waits`: what made the host wait in one such pass of the program."""

    kernel: str
    num_sequences: int
    kernel_s: float
    program_s: float
    waits: tuple[str, ...]

    @property
    def share(self) -> float:
        """Added time as a share of the kernel's."""
        return self.program_s / self.kernel_s - 1.0

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "overhead": self.share}


def overhead(request: BenchRequest) -> Overhead:
    """Overhead on one rank; the kernel and the program alternate, so that a drift touches both."""
    lengths, device = lengths_of(request), torch.device(request.device)
    model, kernel = attention_only(model_profile(request.model)), pick_kernel(request.device)
    dtype = getattr(torch, request.dtype)
    batch = random_batch(lengths, model=model, device=device, dtype=dtype, seed=request.seed)
    parts, _ = planned("ring", lengths, request=request)  # on one rank the plan of any strategy, without a search
    seconds = [_round(parts, batch, kernel=kernel) for _ in range(request.rounds + 1)]
    kernel_s, program_s = (statistics.median(column) for column in zip(*seconds[1:], strict=True))
    return Overhead(
        kernel=kernel.name,
        num_sequences=len(lengths),
        kernel_s=kernel_s,
        program_s=program_s,
        waits=_waits(parts, batch, kernel=kernel),
    )


def _round(parts: Parts, batch: AttentionBatch, *, kernel: AttentionKernel) -> tuple[float, float]:
    _, *seconds = dense(batch, kernel, watch=Stopwatch(batch.query.device))
    return sum(seconds), run_ranks(parts, batch, kernel=kernel)[1].total_s


def _waits(parts: Parts, batch: AttentionBatch, *, kernel: AttentionKernel) -> tuple[str, ...]:
    """Operations that made the host wait in the first microbatch's attention, forward and backward, each kind once."""
    (part, *_), *_ = parts
    starts = list(itertools.accumulate(batch.lengths, initial=0))
    rows = rows_of(part, starts, device=batch.query.device)
    query, key, value = (each[rows].requires_grad_() for each in (batch.query, batch.key, batch.value))
    gradient = batch.gradient[rows]
    transport = LoneTransport()
    context = AttentionContext(schedule=make_schedule(part.attention), transport=transport, kernel=kernel)
    with host_waits(batch.query.device) as waits:
        out = attention(query, key, value, context, scale=batch.scale)
        torch.autograd.grad(out, (query, key, value), gradient)
    return tuple(sorted(set(waits)))


@contextmanager
def host_waits(device: torch.device) -> Iterator[list[str]]:
    """Fills the list with what makes the host wait for the device inside: on CUDA as torch warns of it, elsewhere by
    the names of operations, in this thread."""
    found: list[str] = []
    if device.type != "cuda":
        with _Waiting(found):
            yield found
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
    texts = [str(each.message).splitlines()[0] for each in told]
    found += [text for text in texts if "called a synchronizing" in text]  # and not that the mode is a prototype


class _Waiting(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in WAITING:
            self._found.append(func._schema.name)
        return func(*args, **(kwargs or {}))
