"""Figures of a strategy's simulated plans, one batch at a time and averaged: an entry of the results."""

import math
import pickle
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rayfcp.compare.settings import GIB, Setting
from rayfcp.cost.scans import HeadsCost
from rayfcp.plan.imbalance import rank_loads
from rayfcp.plan.layout import placements_of
from rayfcp.plan.strategies.registry import get
from rayfcp.program import Programs, check_progress, lower
from rayfcp.simulate import Breakdown, Timeline, simulate
from rayfcp.values import BatchPlan, Imbalance, InfeasiblePlanError, Primitive, SequenceSpec

PARTS = ("compute", "sharding", "all_to_all", "ring", "hop", "bubble")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFigures:
    """Figures of one simulated plan of one batch. `gap` = iteration_s / lower_bound_s; `maxima`: of
    `Timeline.maxima`."""

    num_tokens: int
    num_ranks: int
    iteration_s: float
    lower_bound_s: float
    mfu: float
    attention_mfu: float
    imbalance: Imbalance
    maxima: dict[str, float]
    bubble: float
    peak_memory_gib: float
    breakdown: Breakdown
    plan_s: float
    prepare_s: float
    degrees: dict[int, int]
    num_microbatches: int

    @property
    def gap(self) -> float:
        return self.iteration_s / self.lower_bound_s if self.lower_bound_s > 0 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Result of one strategy over all batches (`averaged`): all figures are None if it is infeasible, and `reason` says
    why."""

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
    prepare_s: float | None = None
    num_microbatches: float | None = None
    degrees: dict[int, float] | None = None
    recomputed_layers: int | None = None
    keeps_attention: bool | None = None
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
        names = ("iteration_s", "lower_bound_s", "gap", "plan_s", "prepare_s")
        shown["per_batch"] = [{name: getattr(each, name) for name in names} for each in self.per_batch]
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
    """Return the figures of an Entry from those of its batches, whose order decides nothing.

    Times, parts of them, microbatches and groups are means. Ratios are sums over sums, so that they agree with the
    times: tokens over time, bounds under time, work and idle time weighted by time, imbalances by what they divide by.
    `plan_s`, `prepare_s`: medians; `peak_memory_gib`: maximum.
    """

    def total(values: Iterable[float]) -> float:
        return math.fsum(values)

    count, whole_s = len(batches), total(each.iteration_s for each in batches)
    bounds_s = total(each.lower_bound_s for each in batches)
    degrees: Counter[int] = Counter()
    for each in batches:
        degrees.update(each.degrees)
    return {
        "iteration_s": whole_s / count,
        "lower_bound_s": bounds_s / count,
        "gap": whole_s / bounds_s if bounds_s > 0 else 1.0,
        "tokens_per_s_per_rank": sum(each.num_tokens for each in batches) / whole_s / batches[0].num_ranks,
        **{
            name: total(getattr(each, name) * each.iteration_s for each in batches) / whole_s
            for name in ("mfu", "attention_mfu", "bubble")
        },
        "imbalance": _imbalance_of(batches),
        "breakdown": Breakdown(
            **{name: total(getattr(each.breakdown, name) for each in batches) / count for name in PARTS}
        ),
        "peak_memory_gib": max(each.peak_memory_gib for each in batches),
        **{name: statistics.median(getattr(each, name) for each in batches) for name in ("plan_s", "prepare_s")},
        "num_microbatches": _whole(sum(each.num_microbatches for each in batches) / count),
        "degrees": {degree: _whole(degrees[degree] / count) for degree in sorted(degrees)},
        "per_batch": tuple(batches),
    }


def _imbalance_of(batches: Sequence[BatchFigures]) -> Imbalance:
    """Return the imbalance over the microbatches of all batches; of each resource over the batches that use it."""
    ratios = [(each.imbalance.by_resource, each.maxima) for each in batches]
    found = {}
    for name in dict.fromkeys(name for ratio, _ in ratios for name in ratio):
        most = math.fsum(maxima[name] for ratio, maxima in ratios if name in ratio)
        uneven = math.fsum(ratio[name] * maxima[name] for ratio, maxima in ratios if name in ratio)
        found[name] = uneven / most if most > 0 else 0.0
    return Imbalance(**found)


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value  # JSON has 3, not 3.0


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
    setting: Setting,
    bound_s: float,
    plan_s: float,
    programs: Programs | None = None,
) -> tuple[BatchFigures, Scene]:
    """Simulate a plan; `programs` are its own, lowered within `plan_s`, if known."""
    programs, ready_s = prepared(plan, sequences, setting=setting, programs=programs)
    timeline = timeline_of(programs, setting=setting)
    names = ("num_tokens", "num_ranks", "iteration_s", "mfu", "attention_mfu", "imbalance", "maxima", "bubble")
    measured = BatchFigures(
        **{name: getattr(timeline, name) for name in names},
        breakdown=timeline.breakdown,
        lower_bound_s=bound_s,
        peak_memory_gib=max(timeline.peak_memory_bytes) / GIB,
        plan_s=plan_s,
        prepare_s=plan_s + ready_s,
        degrees=plan.degrees,
        num_microbatches=len(plan.microbatches),
    )
    return measured, Scene(strategy=plan.strategy, plan=plan, sequences=tuple(sequences), timeline=timeline)


MOST_BYTES = 4 << 30
"""Memory that compare may take, everything else included, so that it runs beside other work on a laptop."""

BYTES_PER_TRANSFER = 2000
"""What lowering and simulating take for each transfer of keys and values, on each stage: 1,550 to 1,600 bytes measured
on a ring of 512 ranks, 2026-11-27."""


def can_simulate(plan: BatchPlan) -> bool:
    """Return whether simulating a plan takes at most `MOST_BYTES`."""
    return _simulation_bytes(plan) <= MOST_BYTES


def _simulation_bytes(plan: BatchPlan) -> int:
    return _transfers(plan) * BYTES_PER_TRANSFER * plan.num_stages


def _transfers(plan: BatchPlan) -> int:
    found = 0
    for each in plan.microbatches:
        if each.layout is not None:
            found += sum(len(step.transfers) for step in each.layout.rounds)
        else:
            rings = [group.degree for group in each.groups if group.primitive is Primitive.RING]
            found += sum(degree * (degree - 1) for degree in rings)
    return found


def check_size(plan: BatchPlan) -> None:
    """
    Raises:
        InfeasiblePlanError: Simulating the plan would take more than `MOST_BYTES`.
    """
    if not can_simulate(plan):
        raise InfeasiblePlanError(
            f"simulating it takes {_simulation_bytes(plan) / GIB:.1f} GiB, for {_transfers(plan)} transfers of keys "
            f"and values on {plan.num_stages} stages, compare has {MOST_BYTES / GIB:.0f}; use fewer --devices or a "
            "smaller --global-batch, or leave the strategy out of --strategies"
        )


def prepared(
    plan: BatchPlan, sequences: Sequence[SequenceSpec], *, setting: Setting, programs: Programs | None = None
) -> tuple[Programs, float]:
    """Return checked programs, and the CPU seconds from a plan to programs ready to send, as a run's planner prepares
    them: lowered unless `programs` are known, checked, their loads counted, and serialized."""
    start_s = time.process_time()
    placements = placements_of(plan, sequences)
    programs = programs or lower(plan, sequences, placements=placements, reduce_every=setting.reduce_every)
    check_progress(programs)
    rank_loads(plan, sequences, cost=setting.cost, placements=placements)
    pickle.dumps(programs, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=lambda _: False)
    return programs, time.process_time() - start_s


def timeline_of(programs: Programs, *, setting: Setting) -> Timeline:
    """Simulate programs on the devices of a setting."""
    return simulate(
        programs,
        model=setting.model,
        hardware=setting.hardware,
        node_of_rank=setting.cluster.node_of_rank,
        speed_of_rank=setting.cluster.speed_of_rank,
        layers_of_stage=setting.cluster.layers_of_stage,
        gather_every=setting.gather_every,
        recurrent_heads=isinstance(setting.cost.scan, HeadsCost),
    )
