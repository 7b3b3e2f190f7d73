"""What a simulation says of a global batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from rayfcp.values import Imbalance, Span

PerRank = tuple[float, ...]
Sample = tuple[float, int]
"""(seconds, bytes); between two samples memory goes straight from one to the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Seconds of a rank; their sum is the iteration's. `compute`: attention, linear layers, fixed cost.
    `sharding`, `all_to_all`, `ring`: traffic that nothing hid. `bubble`: waiting for other ranks."""

    compute: float
    sharding: float
    all_to_all: float
    ring: float
    bubble: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """One resource, `[microbatch][rank]`."""

    compute_s: tuple[PerRank, ...]
    attention_flops: tuple[PerRank, ...]
    num_tokens: tuple[tuple[int, ...], ...]
    sent_bytes: tuple[PerRank, ...]
    received_bytes: tuple[PerRank, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A simulated step, from the first load to the last gradient reduction, optimizer excluded.

    `spans` are sorted by rank and start, from 0 to `iteration_s`. `model_flops` and `attention_flops`: forward and
    backward of all ranks, recomputation and padding not counted. `peak_flops`: of one rank. `loads` count what each
    rank did in each microbatch; bytes are those of keys, values, heads and their gradients, all layers.
    """

    iteration_s: float
    spans: tuple[Span, ...]
    by_rank: tuple[Breakdown, ...]
    loads: Loads
    memory: tuple[tuple[Sample, ...], ...]
    num_ranks: int
    num_tokens: int
    model_flops: float
    attention_flops: float
    peak_flops: float

    @property
    def tokens_per_s_per_rank(self) -> float:
        return self.num_tokens / self.iteration_s / self.num_ranks

    @property
    def breakdown(self) -> Breakdown:
        """The means over ranks."""
        names = Breakdown.__slots__
        return Breakdown(**{name: fmean(getattr(each, name) for each in self.by_rank) for name in names})

    @property
    def mfu(self) -> float:
        """Model FLOPs / (time x peak)."""
        return self.model_flops / (self.iteration_s * self.peak_flops * self.num_ranks)

    @property
    def attention_mfu(self) -> float:
        """FLOPs of attention / (time x peak)."""
        return self.attention_flops / (self.iteration_s * self.peak_flops * self.num_ranks)

    @property
    def bubble(self) -> float:
        """Idle / makespan."""
        return self.breakdown.bubble / self.iteration_s

    @property
    def imbalance(self) -> Imbalance:
        """(sum over microbatches of the maximum over ranks - sum of the means) / sum of the maxima."""
        moved = np.maximum(self.loads.sent_bytes, self.loads.received_bytes)
        return Imbalance(
            compute=_imbalance(self.loads.compute_s),
            attention=_imbalance(self.loads.attention_flops),
            memory=_imbalance(self.loads.num_tokens),
            communication=_imbalance(moved.tolist()),
        )

    @property
    def compute_s(self) -> PerRank:
        """Seconds of attention and linear layers, by rank."""
        return tuple(float(each) for each in np.sum(self.loads.compute_s, axis=0))

    @property
    def sent_bytes(self) -> PerRank:
        return tuple(float(each) for each in np.sum(self.loads.sent_bytes, axis=0))

    @property
    def received_bytes(self) -> PerRank:
        return tuple(float(each) for each in np.sum(self.loads.received_bytes, axis=0))

    @property
    def peak_tokens(self) -> tuple[int, ...]:
        """Most tokens that a rank holds in one microbatch."""
        return tuple(int(each) for each in np.max(self.loads.num_tokens, axis=0))

    @property
    def peak_memory_bytes(self) -> tuple[int, ...]:
        """Most bytes in use, by rank."""
        return tuple(max(size for _, size in samples) for samples in self.memory)


def _imbalance(loads: Sequence[Sequence[float]]) -> float:
    rows = np.array(loads, np.float64)
    maxima, means = float(rows.max(axis=1).sum()), float(rows.mean(axis=1).sum())
    return max(maxima - means, 0.0) / maxima if maxima > 0 else 0.0
