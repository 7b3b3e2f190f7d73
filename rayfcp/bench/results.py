"""Figures of attention on one device, as JSON and as tables."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rayfcp.bench.request import BenchRequest
from rayfcp.compare.table import aligned

Grid = tuple[tuple[float, ...], ...]
"""`[microbatch][rank]`."""

TOLERANCE = {"bfloat16": 0.03, "float16": 0.005, "float32": 1e-4, "float64": 1e-10}
"""Largest difference between two ways to compute attention, as a share of the largest number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeconds:
    """Seconds of every rank's own work, messages apart."""

    forward_s: Grid
    backward_s: Grid

    @property
    def rank_s(self) -> tuple[float, ...]:
        """Seconds of each rank over all passes."""
        return tuple(sum(column) for column in zip(*self.forward_s, *self.backward_s, strict=True))

    @property
    def total_s(self) -> float:
        return sum(self.rank_s)

    @property
    def slowest_s(self) -> float:
        """Seconds of the slowest rank of each pass: ranks synchronize after it."""
        return sum(max(row) for row in (*self.forward_s, *self.backward_s))

    @property
    def imbalance(self) -> float:
        """Idle share of the mean rank, which waits for the slowest."""
        return 1.0 - self.total_s / len(self.rank_s) / self.slowest_s


def median_of(rounds: Sequence[RankSeconds]) -> RankSeconds:
    """Median over rounds of each pass of each rank in each microbatch."""
    forward_s, backward_s = (
        tuple(map(tuple, np.median([getattr(each, name) for each in rounds], axis=0).tolist()))
        for name in ("forward_s", "backward_s")
    )
    return RankSeconds(forward_s=forward_s, backward_s=backward_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel over whole sequences. `flops`: of the model, forward and backward, without recomputation."""

    forward_s: float
    backward_s: float
    flops: float

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyTiming:
    """One strategy. `error`: against the single kernel; `planned_imbalance`: as predicted. Without `seconds` there is
    no plan, for `reason`."""

    strategy: str
    seconds: RankSeconds | None = None
    error: float = 0.0
    planned_imbalance: float = 0.0
    reason: str = ""

    def efficiency(self, kernel: Kernel) -> float:
        """Seconds of the single kernel over those of all ranks together: the cost of cutting."""
        assert self.seconds is not None
        return kernel.seconds / self.seconds.total_s

    def mfu_share(self, kernel: Kernel) -> float:
        """MFU of attention on all ranks, those that wait included, over the single kernel's; messages are free."""
        assert self.seconds is not None
        return kernel.seconds / (len(self.seconds.rank_s) * self.seconds.slowest_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRow:
    """The kernel over `context_tokens` tokens in blocks of `block_tokens`, each on itself."""

    context_tokens: int
    block_tokens: int
    causal: bool
    seconds: float
    flops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """All figures. `peak_flops`: of the device in this dtype, None if unknown."""

    request: BenchRequest
    device_name: str
    kernel_name: str
    peak_flops: float | None
    num_sequences: int
    kernel: Kernel
    blocks: tuple[BlockRow, ...]
    entries: tuple[StrategyTiming, ...]

    @property
    def wrong(self) -> tuple[StrategyTiming, ...]:
        """Entries whose error is larger than their dtype explains."""
        bound = TOLERANCE[self.request.dtype]
        return tuple(each for each in self.entries if each.seconds is not None and not each.error <= bound)

    def mfu(self, flops: float, *, seconds: float) -> float | None:
        return None if self.peak_flops is None else flops / seconds / self.peak_flops

    def as_json(self) -> dict[str, Any]:
        """Inputs, device, and a row for each block length and strategy; seconds and shares."""
        kernel = self.kernel
        return {
            "inputs": asdict(self.request),
            "device": self.device_name,
            "kernel": self.kernel_name,
            "peak_flops": self.peak_flops,
            "num_sequences": self.num_sequences,
            "single_kernel": {**asdict(kernel), "mfu": self.mfu(kernel.flops, seconds=kernel.seconds)},
            "blocks": [{**asdict(row), "mfu": self.mfu(row.flops, seconds=row.seconds)} for row in self.blocks],
            "results": [self._entry(each) for each in self.entries],
        }

    def _entry(self, entry: StrategyTiming) -> dict[str, Any]:
        if entry.seconds is None:
            return {"strategy": entry.strategy, "feasible": False, "reason": entry.reason}
        seconds = entry.seconds
        return {
            "strategy": entry.strategy,
            "feasible": True,
            "microbatches": len(seconds.forward_s),
            **asdict(seconds),
            "rank_s": seconds.rank_s,
            "slowest_s": seconds.slowest_s,
            "imbalance": seconds.imbalance,
            "planned_imbalance": entry.planned_imbalance,
            "efficiency": entry.efficiency(self.kernel),
            "mfu_share": entry.mfu_share(self.kernel),
            "mfu": self.mfu(self.kernel.flops / len(seconds.rank_s), seconds=seconds.slowest_s),
            "error": entry.error,
        }


def format_found(report: BenchReport) -> str:
    """Header and two tables, without a newline at the end."""
    request, kernel = report.request, report.kernel
    head = (
        f"{request.num_ranks} ranks of {request.tokens_per_rank} tokens, {report.num_sequences} sequences of "
        f"{request.lengths}, heads of {request.model} in {request.dtype}, on {report.device_name}: {report.kernel_name}"
    )
    single = f"single kernel: {_ms(kernel.forward_s)} forward, {_ms(kernel.backward_s)} backward, MFU " + _percent(
        report.mfu(kernel.flops, seconds=kernel.seconds)
    )
    return "\n\n".join([f"{head}\n{single}", _block_table(report), _entry_table(report)])


def _block_table(report: BenchReport) -> str:
    columns: list[tuple[str, Callable[[BlockRow], str]]] = [
        ("context", lambda row: f"{row.context_tokens}"),
        ("block", lambda row: f"{row.block_tokens}"),
        ("mask", lambda row: "causal" if row.causal else "full"),
        ("ms", lambda row: f"{1e3 * row.seconds:.3f}"),
        ("TFLOP/s", lambda row: f"{row.flops / row.seconds / 1e12:.3g}"),
        ("MFU", lambda row: _percent(report.mfu(row.flops, seconds=row.seconds))),
    ]
    rows = [[text(row) for _, text in columns] for row in report.blocks]
    return "\n".join(aligned([[name for name, _ in columns], *rows], left=(0,)))


def _entry_table(report: BenchReport) -> str:
    rows = [["strategy", "microbatches", "slowest", "imbalance", "planned", "efficiency", "MFU/single", "error"]]
    refused = []
    for each in report.entries:
        if each.seconds is None:
            refused.append(f"{each.strategy}: not run, {each.reason}")
            continue
        shares = [each.seconds.imbalance, each.planned_imbalance]
        shares += [each.efficiency(report.kernel), each.mfu_share(report.kernel)]
        first = [each.strategy, f"{len(each.seconds.forward_s)}", _ms(each.seconds.slowest_s)]
        rows.append([*first, *(_percent(share) for share in shares), f"{each.error:.1e}"])
    return "\n".join([*aligned(rows, left=(0,)), *refused])


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
