"""Batch-level 1F1B (DAPPLE, Fan et al., 2021): microbatches of whole sequences pass the stages one after the other.

Groups may differ from microbatch to microbatch: they are the same ranks on every stage, which exchange keys and values
there; a rank passes its activations to its place on the next stage.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from rayfcp.cost.memory import GIB
from rayfcp.cost.microbatches import StageTimes, WholeCosts, beside_traffic, whole_costs
from rayfcp.cost.model import CostModel
from rayfcp.plan.pipeline.kernels.passes import Timed, in_turns, makespan_s, reorder
from rayfcp.plan.pipeline.schedule import (
    Order,
    Recompute,
    one_forward_one_backward,
    peak_bytes,
    pipeline_plan,
    recomputed_layers,
)
from rayfcp.plan.strategies.registry import Proposal
from rayfcp.values import ClusterSpec, InfeasiblePlanError, MicrobatchPlan, SequenceSpec
from rayfcp.values.arrays import Ints

ARRANGED = 3
"""Candidates, the best by 1F1B, that are tried with stages further ahead or less far."""
SURE = 5
"""Candidates that are tried in any case."""
MUCH = 1.02
"""Times the best makespan: a candidate that is much worse."""
IMPROVED = 8
"""Orders, of one or several candidates, that local search goes on from, the best first."""
AHEAD = (1, 2, 3)
"""Microbatches that a stage may be further than the next one."""
REPLAYED = 1_000_000
"""Passes of stages that one search of the order replays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """`turns[i]`: the microbatch that passes as the i-th; `order` of passes in these numbers i;
    `recomputed[stage, microbatch]` layers."""

    makespan_s: float
    turns: Ints
    order: Order
    recomputed: Ints


class _Entry(NamedTuple):
    candidate: Proposal
    arranger: "Arranger"
    first_s: float


def best_pipeline(
    candidates: Iterable[Proposal],
    sequences: Sequence[SequenceSpec],
    *,
    cluster: ClusterSpec,
    cost: CostModel,
    recompute: Recompute = "uniform",
    patience: int | None = None,
) -> Proposal:
    """The candidate with the least makespan, those that are best by 1F1B each in the best order found.

    Beyond the first few, the search ends after `patience` candidates in a row that are much worse than the best.

    Raises:
        InfeasiblePlanError: none fits the memory of all stages, whatever is recomputed; names stage, bytes and remedy.
    """
    by_id = {sequence.id: sequence for sequence in sequences}
    entries: list[_Entry] = []
    for candidate in candidates:
        costs = whole_costs(candidate.microbatches, by_id=by_id, cluster=cluster, cost=cost)
        arranger = Arranger(costs, cost=cost, recompute=recompute)
        entries.append(_Entry(candidate, arranger, arranger.first_s()))
        least_s = min(entry.first_s for entry in entries)
        if patience and len(entries) >= SURE and all(entry.first_s > MUCH * least_s for entry in entries[-patience:]):
            break
    entries.sort(key=lambda each: each.first_s)
    finalists = _finalists(entries)
    if not finalists:
        _, stage, needed_bytes, available_bytes = min(entry.arranger.shortfall() for entry in entries)
        raise InfeasiblePlanError(
            f"stage {stage} of {cluster.num_stages} needs {needed_bytes / GIB:.3g} GiB a rank for its microbatches "
            f"with all layers recomputed, states leave {available_bytes / GIB:.3g} GiB; add ranks or memory, lower "
            "data.max_seqlen, or use elastic-pipeline, which cuts long sequences"
        )
    found, (candidate, arranger, _) = min(finalists, key=lambda each: each[0].makespan_s)
    least, most = int(found.recomputed.min()), int(found.recomputed.max())
    return Proposal(
        microbatches=_in_order(candidate.microbatches, found, arranger.costs, cost=cost),
        pipelines=(
            pipeline_plan(
                found.order, start=0, recomputed=found.recomputed[:, found.turns], predicted_s=found.makespan_s
            ),
        ),
        reason=f"{candidate.reason}, the best of {len(entries)} plans for {cluster.num_stages} stages, "
        f"{least if least == most else f'{least}-{most}'} layers of a stage recomputed",
    )


def _finalists(entries: Sequence[_Entry]) -> list[tuple[Arrangement, _Entry]]:
    """Improved arrangements of the first entries, of all where memory permits none by 1F1B."""
    starts: list[tuple[Arrangement, _Entry]] = []
    for entry in entries[:ARRANGED] if entries[0].first_s < math.inf else entries:
        starts += [(each, entry) for each in entry.arranger.starts()[:IMPROVED]]
    starts.sort(key=lambda each: each[0].makespan_s)
    return [(entry.arranger.improved(start), entry) for start, entry in starts[:IMPROVED]]


def _in_order(
    microbatches: Sequence[MicrobatchPlan], found: Arrangement, costs: WholeCosts, *, cost: CostModel
) -> tuple[MicrobatchPlan, ...]:
    """Microbatches with seconds on the slowest stage: of groups what they compute, of microbatches beside traffic of
    parameters."""
    counts = np.diff(np.append(costs.first, len(costs.groups.transfer_s)))
    groups = _recomputing(costs.groups, np.repeat(found.recomputed, counts, axis=1))
    groups_s = (groups.forward_s + groups.backward_s).max(axis=0)
    first, last = np.zeros((2, len(microbatches)), np.bool_)
    first[found.turns[0]], last[found.turns[-1]] = True, True
    times = beside_traffic(_recomputing(costs.times, found.recomputed), cost=cost, gathered=first, reduced=last)
    seconds = (times.forward_s + times.backward_s).max(axis=0).tolist()
    ordered = []
    for turn in found.turns.tolist():
        microbatch, start = microbatches[turn], int(costs.first[turn])
        group_s = groups_s[start : start + counts[turn]].tolist()
        if microbatch.layout:
            group_s *= len(microbatch.groups)
        ordered.append(replace(microbatch, group_s=tuple(group_s), predicted_s=seconds[turn]))
    return tuple(ordered)


class Arranger:
    """Arrangements of the microbatches of one candidate."""

    def __init__(self, costs: WholeCosts, *, cost: CostModel, recompute: Recompute) -> None:
        self.costs, self._cost, self._recompute = costs, cost, recompute
        self._count, self._num_stages = costs.held.kept.shape[1], len(costs.held.layers)

    def first_s(self) -> float:
        """Makespan of the best of a few orders by 1F1B; infinite if memory permits none."""
        return min((each.makespan_s for each in self._by_1f1b(ahead=1)), default=math.inf)

    def starts(self) -> list[Arrangement]:
        """A few orders by 1F1B and with stages further ahead, and, where these recompute, less far ahead, down to one
        microbatch at a time. The best come first; none if memory does not suffice."""
        found = [each for ahead in AHEAD for each in self._by_1f1b(ahead=ahead)]
        most = self._num_stages - 1
        while most and all(each.recomputed.any() for each in found):
            most //= 2
            found += self._by_1f1b(ahead=1, most=most)
        return sorted(found, key=lambda each: each.makespan_s)

    def improved(self, found: Arrangement) -> Arrangement:
        """The arrangement with its order improved by local search, bounded in work."""
        turns, times = found.turns.copy(), _timed(self.costs, found.recomputed, cost=self._cost)
        reorder(found.order, times, self.costs.held, found.recomputed, turns, REPLAYED // found.order.size)
        better = self._arranged(found.order, turns)
        return better if better and better.makespan_s < found.makespan_s else found

    def shortfall(self) -> tuple[float, int, float, float]:
        """The stage that lacks most where one microbatch passes at a time and recomputes all layers: needed over
        available memory, the stage, and the bytes of both."""
        held = self.costs.held
        order = one_forward_one_backward([1] * self._count, num_stages=self._num_stages, most=0)
        peaks = peak_bytes(order, held=held, recomputed=held.layers[:, None])
        stage = int(np.argmax(peaks / held.budget))
        needed_bytes, available_bytes = float(peaks[stage]), float(held.budget[stage])
        return needed_bytes / max(available_bytes, 1.0), stage, needed_bytes, available_bytes

    def _by_1f1b(self, *, ahead: int, most: int | None = None) -> list[Arrangement]:
        order = one_forward_one_backward([1] * self._count, num_stages=self._num_stages, ahead=ahead, most=most)
        return [each for turns in _turns(self.costs) if (each := self._arranged(order, turns))]

    def _arranged(self, order: Order, turns: Ints) -> Arrangement | None:
        """The order with the least recomputation that memory permits; None if it permits none."""
        layer_s = self.costs.times.layer_s[turns]
        found = recomputed_layers(order, held=in_turns(self.costs.held, turns), layer_s=layer_s, how=self._recompute)
        if found is None:
            return None
        recomputed = np.empty_like(found)
        recomputed[:, turns] = found
        seconds = makespan_s(order, _timed(self.costs, recomputed, cost=self._cost), turns)
        return Arrangement(makespan_s=seconds, turns=turns, order=order, recomputed=recomputed)


def _recomputing(times: StageTimes, recomputed: Ints) -> StageTimes:
    """Times with backward passes that recompute `recomputed[stage, microbatch]` layers."""
    return times._replace(backward_s=times.recomputing(recomputed.astype(np.float64)))


def _timed(costs: WholeCosts, recomputed: Ints, *, cost: CostModel) -> Timed:
    plain = _recomputing(costs.times, recomputed)
    none = np.zeros(plain.forward_s.shape[1], np.bool_)
    least, most = (beside_traffic(plain, cost=cost, gathered=each, reduced=each) for each in (none, ~none))
    return Timed(least.forward_s, most.forward_s, least.backward_s, most.backward_s, plain.transfer_s)


def _turns(costs: WholeCosts) -> Iterator[Ints]:
    """Longest in the middle, where all stages are busy beside them; longest first; shortest first; long and short ones
    alternating, which holds the least."""
    seconds = (costs.times.forward_s + costs.times.backward_s).max(axis=0)
    rising = np.argsort(seconds, kind="stable")
    yield np.concatenate([rising[::2], rising[1::2][::-1]])
    yield rising[::-1].copy()
    yield rising
    turns = np.empty_like(rising)
    turns[::2], turns[1::2] = rising[::-1][: (len(rising) + 1) // 2], rising[: len(rising) // 2]
    yield turns
