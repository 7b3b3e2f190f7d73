"""Figures of a strategy's simulated plans, one batch at a time and averaged: an entry of the results."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rayfcp.compare.settings import GIB, Setting
from rayfcp.plan.strategies.registry import get
from rayfcp.program import RankProgram, lower
from rayfcp.simulate import Breakdown, Timeline, simulate
from rayfcp.values import BatchPlan, HardwareProfile, Imbalance, ModelProfile, SequenceSpec

PARTS = ("compute", "sharding", "all_to_all", "ring", "hop", "bubble")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFigures:
    """Figures of one simulated plan of one batch. `gap` = iteration_s / lower_bound_s."""

    num_tokens: int
    num_ranks: int
    iteration_s: float
    lower_bound_s: float
    mfu: float
    attention_mfu: float
    imbalance: Imbalance
    bubble: float
    peak_memory_gib: float
    breakdown: Breakdown
    plan_s: float
    degrees: dict[int, int]
    num_microbatches: int

    @property
    def gap(self) -> float:
        return self.iteration_s / self.lower_bound_s if self.lower_bound_s > 0 else 1.0

    @property
    def tokens_per_s_per_rank(self) -> float:
        return self.num_tokens / self.iteration_s / self.num_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Result of one strategy. Figures are means over batches except `plan_s` (median) and `peak_memory_gib` (maximum);
    all are None if the strategy is infeasible, and `reason` says why."""

    strategy: str
    feasible: bool
    reason: str
    num_ranks: int
    num_stages: int = 1
    iteration_s: float | None = None
    lower_bound_s: float | None = None
    gap: float | None = None
    tokens_per_s_per_rank: float | None = None
    mfu: float | None = None
    attention_mfu: float | None = None
    imbalance: Imbalance | None = None
    bubble: float | None = None
    peak_memory_gib: float | None = None
    breakdown: Breakdown | None = None
    plan_s: float | None = None
    num_microbatches: float | None = None
    degrees: dict[int, float] | None = None
    recomputed_layers: int | None = None
    reduce_every: str | None = None
    gather_every: str | None = None
    layers_of_stage: tuple[int, ...] = ()
    max_tokens_per_rank: int | None = None
    per_batch: tuple[BatchFigures, ...] = ()

    def as_json(self, *, best_baseline_s: float | None) -> dict[str, Any]:
        """Return the entry of the JSON contract, with nulls if infeasible."""
        shown = {name: getattr(self, name) for name in self.__slots__ if name != "per_batch"}
        if self.imbalance is not None:
            shown["imbalance"] = self.imbalance.by_resource
        if self.breakdown is not None:
            shown["breakdown"] = {name: getattr(self.breakdown, name) for name in PARTS}
        shown["degrees"] = None if self.degrees is None else {str(key): value for key, value in self.degrees.items()}
        shown["speedup_over_best_baseline"] = self.speedup(best_baseline_s)
        shown["per_batch"] = [
            {
                "iteration_s": each.iteration_s,
                "lower_bound_s": each.lower_bound_s,
                "gap": each.gap,
                "plan_s": each.plan_s,
            }
            for each in self.per_batch
        ]
        return shown

    def speedup(self, best_baseline_s: float | None) -> float | None:
        """Iteration time of the best feasible baseline over this one's."""
        if best_baseline_s is None or self.iteration_s is None:
            return None
        return best_baseline_s / self.iteration_s


def best_baseline(entries: Sequence[Entry]) -> Entry | None:
    """Return the fastest feasible entry of a baseline."""
    feasible = [each for each in entries if each.iteration_s is not None and get(each.strategy).is_baseline]
    return min(feasible, key=lambda each: each.iteration_s or 0.0, default=None)


def averaged(batches: Sequence[BatchFigures]) -> dict[str, Any]:
    """Return the figures of an Entry from those of its batches."""

    def mean(name: str) -> float:
        return statistics.fmean(getattr(each, name) for each in batches)

    degrees: Counter[int] = Counter()
    for each in batches:
        degrees.update(each.degrees)
    names = ("iteration_s", "lower_bound_s", "gap", "tokens_per_s_per_rank", "mfu", "attention_mfu", "bubble")
    return {
        **{name: mean(name) for name in names},
        "imbalance": _mean_imbalance(batches),
        "breakdown": Breakdown(
            **{name: statistics.fmean(getattr(each.breakdown, name) for each in batches) for name in PARTS}
        ),
        "peak_memory_gib": max(each.peak_memory_gib for each in batches),
        "plan_s": statistics.median(each.plan_s for each in batches),
        "num_microbatches": _whole(mean("num_microbatches")),
        "degrees": {degree: _whole(degrees[degree] / len(batches)) for degree in sorted(degrees)},
        "per_batch": tuple(batches),
    }


def _mean_imbalance(batches: Sequence[BatchFigures]) -> Imbalance:
    """Average each resource over the batches that use it."""
    found = [each.imbalance.by_resource for each in batches]
    names = dict.fromkeys(name for each in found for name in each)
    return Imbalance(**{name: statistics.fmean(each[name] for each in found if name in each) for name in names})


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value  # JSON says 3, not 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A plan and its simulation. `strategy`: as requested; `auto` uses plans of others."""

    strategy: str
    plan: BatchPlan
    sequences: tuple[SequenceSpec, ...]
    timeline: Timeline


def measure(
    plan: BatchPlan,
    sequences: Sequence[SequenceSpec],
    *,
    model: ModelProfile,
    hardware: HardwareProfile,
    setting: Setting,
    bound_s: float,
    plan_s: float,
) -> tuple[BatchFigures, Scene]:
    """Simulate a plan; `hardware` is that of a rank (on a stage)."""
    programs = lower(plan, sequences, reduce_every=setting.reduce_every)
    timeline = timeline_of(programs, model=model, hardware=hardware, setting=setting)
    measured = BatchFigures(
        num_tokens=timeline.num_tokens,
        num_ranks=timeline.num_ranks,
        iteration_s=timeline.iteration_s,
        lower_bound_s=bound_s,
        mfu=timeline.mfu,
        attention_mfu=timeline.attention_mfu,
        imbalance=timeline.imbalance,
        bubble=timeline.bubble,
        peak_memory_gib=max(timeline.peak_memory_bytes) / GIB / setting.cluster.tensor_parallel,
        breakdown=timeline.breakdown,
        plan_s=plan_s,
        degrees=plan.degrees,
        num_microbatches=len(plan.microbatches),
    )
    return measured, Scene(strategy=plan.strategy, plan=plan, sequences=tuple(sequences), timeline=timeline)


def timeline_of(
    programs: Sequence[RankProgram], *, model: ModelProfile, hardware: HardwareProfile, setting: Setting
) -> Timeline:
    """Simulate programs on the devices of a setting."""
    return simulate(
        programs,
        model=model,
        hardware=hardware,
        node_of_rank=setting.cluster.node_of_rank,
        speed_of_rank=setting.cluster.speed_of_rank,
        layers_of_stage=setting.cluster.layers_of_stage,
        gather_every=setting.gather_every,
    )
