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
    """Seconds of a device; their sum is the iteration's. `compute`: attention, linear layers, pictures, fixed cost.
    `sharding`, `all_to_all`, `ring`, `hop` (between stages): traffic that nothing hid. `bubble`: waiting for other
    ranks and stages."""

    compute: float
    sharding: float
    all_to_all: float
    ring: float
    hop: float
    bubble: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """One resource, `[microbatch][device]`; `encoder_s`, seconds of pictures, is empty where none are encoded."""

    compute_s: tuple[PerRank, ...]
    attention_flops: tuple[PerRank, ...]
    num_tokens: tuple[tuple[int, ...], ...]
    sent_bytes: tuple[PerRank, ...]
    received_bytes: tuple[PerRank, ...]
    encoder_s: tuple[PerRank, ...] = ()

    @property
    def work_s(self) -> tuple[PerRank, ...]:
        """Seconds of attention, linear layers and pictures."""
        work = np.sum([rows for rows in (self.compute_s, self.encoder_s) if rows], axis=0)
        return tuple(tuple(row) for row in work.tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A simulated step, from the first load to the last gradient reduction, optimizer excluded.

    `spans` are sorted by stage, rank and start, from 0 to `iteration_s`. Device p x `num_ranks` + r is that of rank r
    on stage p; with one stage devices are ranks. `by_rank`, `loads` and `memory` are by device. `model_flops` and
    `attention_flops`: forward and backward of all devices, recomputation and padding not counted. `peak_flops`: of one
    device. `loads` count what each device did in each microbatch; bytes are those of keys, values, heads, features and
    their gradients, all layers.
    """

    iteration_s: float
    spans: tuple[Span, ...]
    by_rank: tuple[Breakdown, ...]
    loads: Loads
    memory: tuple[tuple[Sample, ...], ...]
    num_ranks: int
    num_stages: int
    num_tokens: int
    model_flops: float
    attention_flops: float
    peak_flops: float

    @property
    def num_devices(self) -> int:
        return self.num_ranks * self.num_stages

    @property
    def tokens_per_s_per_rank(self) -> float:
        return self.num_tokens / self.iteration_s / self.num_ranks

    @property
    def breakdown(self) -> Breakdown:
        """The means over devices."""
        names = Breakdown.__slots__
        return Breakdown(**{name: fmean(getattr(each, name) for each in self.by_rank) for name in names})

    @property
    def mfu(self) -> float:
        """Model FLOPs / (time x peak)."""
        return self.model_flops / (self.iteration_s * self.peak_flops * self.num_devices)

    @property
    def attention_mfu(self) -> float:
        """FLOPs of attention / (time x peak)."""
        return self.attention_flops / (self.iteration_s * self.peak_flops * self.num_devices)

    @property
    def bubble(self) -> float:
        """Idle / makespan."""
        return self.breakdown.bubble / self.iteration_s

    @property
    def imbalance(self) -> Imbalance:
        """(sum over microbatches and stages of the maximum over ranks - sum of the means) / sum of the maxima."""
        moved = np.maximum(self.loads.sent_bytes, self.loads.received_bytes)
        return Imbalance(
            compute=_imbalance(self.loads.compute_s, num_ranks=self.num_ranks),
            attention=_imbalance(self.loads.attention_flops, num_ranks=self.num_ranks),
            memory=_imbalance(self.loads.num_tokens, num_ranks=self.num_ranks),
            communication=_imbalance(moved.tolist(), num_ranks=self.num_ranks),
            encoder=_imbalance(self.loads.encoder_s, num_ranks=self.num_ranks) if self.loads.encoder_s else None,
        )

    @property
    def compute_s(self) -> PerRank:
        """Seconds of attention, linear layers and pictures, by device."""
        return tuple(float(each) for each in np.sum(self.loads.work_s, axis=0))

    @property
    def sent_bytes(self) -> PerRank:
        return tuple(float(each) for each in np.sum(self.loads.sent_bytes, axis=0))

    @property
    def received_bytes(self) -> PerRank:
        return tuple(float(each) for each in np.sum(self.loads.received_bytes, axis=0))

    @property
    def peak_tokens(self) -> tuple[int, ...]:
        """Most tokens that a device holds in one microbatch."""
        return tuple(int(each) for each in np.max(self.loads.num_tokens, axis=0))

    @property
    def peak_memory_bytes(self) -> tuple[int, ...]:
        """Most bytes in use, by device."""
        return tuple(max(size for _, size in samples) for samples in self.memory)


def _imbalance(loads: Sequence[Sequence[float]], *, num_ranks: int) -> float:
    rows = np.array(loads, np.float64).reshape(-1, num_ranks)
    maxima, means = float(rows.max(axis=1).sum()), float(rows.mean(axis=1).sum())
    return max(maxima - means, 0.0) / maxima if maxima > 0 else 0.0
