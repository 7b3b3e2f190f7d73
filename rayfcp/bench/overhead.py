"""What it costs that a plan drives attention, where there is nothing to plan: one rank, against the kernel called
once. And whether the host ever waits for the device meanwhile."""

import itertools
import statistics
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rayfcp.bench.asked import Asked
from rayfcp.bench.planned import Planned, attention_only, lengths_of, planned
from rayfcp.bench.ranks import run_ranks
from rayfcp.bench.tensors import Batch, dense, random_batch, rows_of
from rayfcp.bench.turns import Stopwatch
from rayfcp.execute.attention import AttentionContext, attention
from rayfcp.execute.kernels import AttentionKernel, pick_kernel
from rayfcp.execute.schedule import make_ready
from rayfcp.execute.transport import Fabric, InProcessTransport
from rayfcp.plan import model_profile

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
        """Of the kernel's time that is added."""
        return self.program_s / self.kernel_s - 1.0

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "overhead": self.share}


def overhead(asked: Asked) -> Overhead:
    """On one rank; the kernel and the program take turns, so that a drift touches both."""
    lengths, device = lengths_of(asked), torch.device(asked.device)
    model, kernel = attention_only(model_profile(asked.model)), pick_kernel(asked.device)
    dtype = getattr(torch, asked.dtype)
    batch = random_batch(lengths, model=model, device=device, dtype=dtype, seed=asked.seed)
    found = planned("flex-ring", lengths, asked=asked)
    seconds = [_round(found, batch, kernel=kernel) for _ in range(asked.rounds + 1)]
    kernel_s, program_s = (statistics.median(column) for column in zip(*seconds[1:], strict=True))
    return Overhead(
        kernel=kernel.name,
        num_sequences=len(lengths),
        kernel_s=kernel_s,
        program_s=program_s,
        waits=_waits(found, batch, kernel=kernel),
    )


def _round(found: Planned, batch: Batch, *, kernel: AttentionKernel) -> tuple[float, float]:
    _, *seconds = dense(batch, kernel, watch=Stopwatch(batch.query.device))
    return sum(seconds), run_ranks(found.parts, batch, kernel=kernel).seconds.total_s


def _waits(found: Planned, batch: Batch, *, kernel: AttentionKernel) -> tuple[str, ...]:
    """What made the host wait in the first microbatch's attention, forward and backward, each kind once."""
    (part, *_), *_ = found.parts
    starts = list(itertools.accumulate(batch.lengths, initial=0))
    rows = rows_of(part, starts, device=batch.query.device)
    query, key, value = (each[rows].requires_grad_() for each in (batch.query, batch.key, batch.value))
    gradient = batch.gradient[rows]
    transport = InProcessTransport(Fabric(1), 0)
    context = AttentionContext(program=make_ready(part.attention), transport=transport, kernel=kernel)
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
    found += [text for text in texts if "synchroniz" in text]


class _Waiting(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in WAITING:
            self._found.append(func._schema.name)
        return func(*args, **(kwargs or {}))
