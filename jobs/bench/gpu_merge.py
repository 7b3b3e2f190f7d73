"""Merges of several ranks' partial attention results, in one launch where the device has that, against fp64."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rayfcp.bench.results import TOLERANCE
from rayfcp.bench.serial import Stopwatch
from rayfcp.execute.attention.slots import MergedAttention, merge_by_operators
from rayfcp.execute.devices.backend import backend_of
from rayfcp.program.instructions import Range


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeCase:
    """Results of `num_parts` ranks for the same queries. Tokens are cut into `num_cuts` ranges, of which the first rank
    knows all, and each later one every other: all rows, rows in order, or rows by number."""

    num_parts: int
    num_tokens: int
    num_cuts: int
    heads: int = 16
    head_dim: int = 128

    def ranges(self, part: int) -> list[Range]:
        cuts = [self.num_tokens * number // self.num_cuts for number in range(self.num_cuts + 1)]
        return [each for number, each in enumerate(pairwise(cuts)) if self.num_cuts == 1 or (number + part) % 2 == 0]


CASES = (
    MergeCase(num_parts=2, num_tokens=1024, num_cuts=1),
    MergeCase(num_parts=8, num_tokens=4096, num_cuts=1, heads=64),
    MergeCase(num_parts=16, num_tokens=4099, num_cuts=2, heads=32),
    MergeCase(num_parts=8, num_tokens=5003, num_cuts=40),
    MergeCase(num_parts=4, num_tokens=777, num_cuts=9, heads=32, head_dim=64),
    MergeCase(num_parts=4, num_tokens=777, num_cuts=1, heads=8, head_dim=80),
    MergeCase(num_parts=3, num_tokens=301, num_cuts=7, heads=12, head_dim=20),
    MergeCase(num_parts=5, num_tokens=1, num_cuts=1, heads=1, head_dim=8),
)
TIMED = MergeCase(num_parts=2, num_tokens=16384, num_cuts=1, heads=64)

TINY = (MergeCase(num_parts=3, num_tokens=9, num_cuts=5, heads=2, head_dim=8), CASES[-1])
TINY_TIMED = TINY[-1]

Part = tuple[list[Range], Tensor, Tensor]


def merges(cases: Sequence[MergeCase], *, device: torch.device, dtype: str) -> list[dict[str, Any]]:
    """Largest differences from fp64, as shares of the largest number, at least of 1: of merges on the device, and of
    torch's operators on the CPU."""
    fused = backend_of(device).merge_kernel() is not None
    found = []
    for case in cases:
        parts = _drawn(case, device=device, dtype=dtype)
        true = _merged([(ranges, out.double(), lse.double()) for ranges, out, lse in parts])
        own = _merged(parts)
        by_operators = _merged([(ranges, out.cpu(), lse.cpu()) for ranges, out, lse in parts])
        errors = {"found": _difference(own, true), "by_operators": _difference(by_operators, true)}
        bound = TOLERANCE["float32"]
        found.append({**asdict(case), "dtype": dtype, "fused": fused, **errors, "bound": bound})
    return found


def merge_seconds(case: MergeCase, *, device: torch.device, dtype: str, rounds: int) -> dict[str, Any]:
    """Medians, after an untimed round, of one rank's results merged with the first's, by torch's operators and in one
    launch, None where the device has no such kernel."""
    (_, out, lse), (_, part, part_lse), *_ = _drawn(case, device=device, dtype=dtype)
    out = out.float()
    ways: dict[str, Callable[[], object]] = {
        "by_operators": lambda: merge_by_operators(out, lse, out=part.float(), lse=part_lse)
    }
    if fused := backend_of(device).merge_kernel():
        ways["fused"] = partial(fused, out, lse, rows=0, out=part, lse=part_lse)
    seconds: dict[str, float | None] = {"fused": None}
    for name, work in ways.items():
        watch, timed = Stopwatch(device), []
        for _ in range(rounds + 1):
            watch.start()
            work()
            watch.stop()
            timed.append(watch.seconds())
        seconds[name] = statistics.median(timed[1:])
    num_bytes = out.numel() * (2 * out.itemsize + part.itemsize)  # what is known is read and written
    return {**asdict(case), "dtype": dtype, "num_bytes": num_bytes, "seconds": seconds}


def _drawn(case: MergeCase, *, device: torch.device, dtype: str) -> list[Part]:
    """Results `[tokens, heads, head_dim]` in `dtype` and logsumexps far from each other, as long and short ranges of
    keys have; these lie by heads, as kernels return them."""
    generator = torch.Generator(device).manual_seed(0)
    drawn = []
    for number in range(case.num_parts):
        ranges = [(0, case.num_tokens)] if number == 0 else case.ranges(number)
        rows = sum(stop - start for start, stop in ranges)
        out = torch.randn(rows, case.heads, case.head_dim, generator=generator, device=device)
        lse = 4 * torch.randn(case.heads, rows, generator=generator, device=device).t()
        drawn.append((ranges, out.to(getattr(torch, dtype)), lse))
    return drawn


def _merged(parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
    _, first, _ = parts[0]
    merged = MergedAttention(first, value_dim=first.shape[2])
    for ranges, out, lse in parts:
        merged.add(ranges, out.clone(), lse=lse.clone())  # the first is merged into in place
    return merged.result(torch.float64)


def _difference(own: Sequence[Tensor], true: Sequence[Tensor]) -> float:
    """NaN if there is one."""
    pairs = zip(own, true, strict=True)
    worst = [(a.to(b.device).double() - b).abs().max() / b.abs().max().clamp_min(1.0) for a, b in pairs]
    return float(torch.stack(worst).max())
