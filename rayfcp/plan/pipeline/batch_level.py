"""Batch-level 1F1B (DAPPLE, Fan et al., 2021): microbatches of whole sequences pass the stages one after the other.

Groups may differ from microbatch to microbatch: they are the same ranks on every stage, which exchange keys and values
there; a rank passes its activations to its place on the next stage.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rayfcp.cost.memory import GIB
from rayfcp.cost.microbatches import WholeCosts, beside_traffic, whole_costs
from rayfcp.cost.model import CostModel
from rayfcp.plan.pipeline.schedule import Arrangement, Arranger, Recompute, Shortfall, pipeline_plan, recomputing
from rayfcp.plan.strategies.registry import Proposal
from rayfcp.values import ClusterSpec, InfeasiblePlanError, MicrobatchPlan, PipelinePlan, SequenceSpec

ARRANGED = 8
"""Candidates that are tried with stages further ahead or less far, the best by 1F1B."""
SURE = 5
"""Candidates that are looked at anyway."""
MUCH = 1.02
"""Times the best: that much worse."""
IMPROVED = 8
"""Orders, of one or several candidates, that local search goes on from, the best first."""


class Piped(NamedTuple):
    """Microbatches in the order in which they pass the stages."""

    microbatches: tuple[MicrobatchPlan, ...]
    pipeline: PipelinePlan
    reason: str


class _Entry(NamedTuple):
    candidate: Proposal
    costs: WholeCosts
    arranger: Arranger
    first_s: float


def best_pipeline(
    candidates: Iterable[Proposal],
    sequences: Sequence[SequenceSpec],
    *,
    cluster: ClusterSpec,
    cost: CostModel,
    recompute: Recompute = "alike",
    patience: int | None = None,
) -> Piped:
    """The candidate with the least makespan, those that are best by 1F1B each in the best order found.

    Beyond the first few, candidates that come after `patience` in a row which are much worse than the best are not
    looked at.

    Raises:
        InfeasiblePlanError: none fits the memory of all stages, whatever is recomputed; names stage, bytes and remedy.
    """
    by_id = {sequence.id: sequence for sequence in sequences}
    entries = []
    for candidate in candidates:
        costs = whole_costs(candidate.microbatches, by_id=by_id, cluster=cluster, cost=cost)
        arranger = Arranger(costs, cost=cost, recompute=recompute)
        first = arranger.by_1f1b()
        entries.append(_Entry(candidate, costs, arranger, first.makespan_s if first else math.inf))
        least_s = min(entry.first_s for entry in entries)
        if patience and len(entries) >= SURE and all(entry.first_s > MUCH * least_s for entry in entries[-patience:]):
            break
    entries.sort(key=lambda each: each.first_s)
    starts, short = _starts(entries)
    if not starts:
        raise _too_little(min(short, key=lambda each: each.excess), cluster=cluster)
    finalists = [(entry.arranger.improved(start), entry) for start, entry in starts[:IMPROVED]]
    arrangement, (candidate, costs, _, _) = min(finalists, key=lambda each: each[0].makespan_s)
    return Piped(
        microbatches=_in_order(candidate.microbatches, arrangement, costs, cost=cost),
        pipeline=pipeline_plan(
            arrangement.order,
            start=0,
            recomputed=arrangement.recomputed[:, arrangement.turns],
            predicted_s=arrangement.makespan_s,
        ),
        reason=f"{candidate.reason}, the best of {len(entries)} plans for {cluster.num_stages} stages, "
        f"{_spread(arrangement.recomputed)} layers of a stage recomputed",
    )


def _starts(entries: Sequence[_Entry]) -> tuple[list[tuple[Arrangement, _Entry]], list[Shortfall]]:
    """Of the first entries, all where none can pass by 1F1B; the best first."""
    starts: list[tuple[Arrangement, _Entry]] = []
    short: list[Shortfall] = []
    for entry in entries[:ARRANGED] if entries[0].first_s < math.inf else entries:
        found = entry.arranger.starts()
        if isinstance(found, Shortfall):
            short.append(found)
        else:
            starts += [(each, entry) for each in found[:IMPROVED]]
    return sorted(starts, key=lambda each: each[0].makespan_s), short


def _in_order(
    microbatches: Sequence[MicrobatchPlan], found: Arrangement, costs: WholeCosts, *, cost: CostModel
) -> tuple[MicrobatchPlan, ...]:
    """With seconds on the slowest stage: of groups what they compute, of microbatches beside traffic of parameters."""
    counts = np.diff(np.append(costs.first, len(costs.groups.transfer_s)))
    groups = recomputing(costs.groups, np.repeat(found.recomputed, counts, axis=1))
    groups_s = (groups.forward_s + groups.backward_s).max(axis=0)
    first, last = np.zeros((2, len(microbatches)), np.bool_)
    first[found.turns[0]], last[found.turns[-1]] = True, True
    times = beside_traffic(recomputing(costs.times, found.recomputed), cost=cost, gathered=first, reduced=last)
    seconds = (times.forward_s + times.backward_s).max(axis=0).tolist()
    ordered = []
    for turn in found.turns.tolist():
        microbatch, start = microbatches[turn], int(costs.first[turn])
        group_s = groups_s[start : start + counts[turn]].tolist()
        if microbatch.layout:
            group_s *= len(microbatch.groups)
        ordered.append(replace(microbatch, group_s=tuple(group_s), predicted_s=seconds[turn]))
    return tuple(ordered)


def _spread(recomputed: np.ndarray) -> str:
    least, most = int(recomputed.min()), int(recomputed.max())
    return f"{least}" if least == most else f"{least}-{most}"


def _too_little(short: Shortfall, *, cluster: ClusterSpec) -> InfeasiblePlanError:
    return InfeasiblePlanError(
        f"stage {short.stage} of {cluster.num_stages} needs {short.needed_bytes / GIB:.3g} GiB a rank for its "
        f"microbatches with all layers recomputed, states leave {short.room_bytes / GIB:.3g} GiB; add ranks or memory, "
        "lower data.max_seqlen, or use elastic-pipeline, which cuts long sequences"
    )
