"""From what a step's plan and workers say to what the cost model can be refitted from."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rayfcp.execute.reports import RankReport
from rayfcp.plan.profiles.refit import Observation, Part
from rayfcp.values import BatchPlan, ClusterSpec, SequenceSpec, SpanKind


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGroup:
    """A group of the plan: its ranks, what it has to do, and the seconds that were predicted."""

    ranks: tuple[int, ...]
    part: Part
    predicted_s: float


PlannedGroups = tuple[tuple[PlannedGroup, ...], ...]
"""Groups by microbatch."""


def planned_groups(plan: BatchPlan, sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec) -> PlannedGroups:
    """Nothing of microbatches whose blocks are placed freely, whose groups are not what takes the time, nor with
    stages, which run several microbatches at once."""
    if plan.pipelines:
        return ()
    nodes = cluster.node_of_rank or (0,) * cluster.num_ranks
    by_id = {sequence.id: sequence for sequence in sequences}
    return tuple(
        tuple(
            PlannedGroup(
                ranks=group.ranks,
                part=Part(
                    num_tokens=sum(by_id[each].num_tokens for each in group.sequences),
                    num_cells=sum(by_id[each].attention_cells for each in group.sequences),
                    degree=group.degree,
                    primitive=group.primitive,
                    crosses=len({nodes[rank] for rank in group.ranks}) > 1,
                ),
                predicted_s=predicted_s,
            )
            for group, predicted_s in zip(microbatch.groups, microbatch.group_s, strict=True)
        )
        if microbatch.layout is None
        else ()
        for microbatch in plan.microbatches
    )


def observations(groups: PlannedGroups, devices: Sequence[RankReport]) -> list[Observation]:
    """What a step of one stage tells of the cost model, from the reports of all devices in order. Of a rank's
    tensor-parallel devices, which wait for each other in every layer, the first speaks for it.

    On CPUs, one for each group of each microbatch: the median over its ranks of forward and backward, less
    their own gathers and reductions, in which a rank waits for slower groups, plus the shortest of any rank's, that
    of the slowest group, which is the traffic itself. Waiting for messages stays: that is the ring's own time.
    Where hosts do not wait, only the whole step has a time: that of the groups that decide its microbatches.
    """
    ranks = [report for report in devices if report.tensor_rank == 0]
    if any(math.isnan(each) for report in ranks for each in report.gather_s):
        return _of_step(groups, ranks)
    found = []
    for number, held in enumerate(groups):
        traffic_s = min(report.gather_s[number] for report in ranks)
        own_s = [_pass_s(report, number) - report.gather_s[number] + traffic_s for report in ranks]
        for group in held:
            seconds = statistics.median(own_s[rank] for rank in group.ranks)
            if seconds > 0:
                found.append(Observation(parts=(group.part,), seconds=seconds))
    return found


def _of_step(groups: PlannedGroups, ranks: Sequence[RankReport]) -> list[Observation]:
    if not groups or not all(groups):
        return []
    slowest = tuple(max(held, key=lambda group: group.predicted_s).part for held in groups)
    return [Observation(parts=slowest, seconds=max(report.step_s for report in ranks))]


def _pass_s(report: RankReport, microbatch: int) -> float:
    """Forward and backward of one microbatch."""
    labels = {f"{kind.value} {microbatch}" for kind in (SpanKind.FORWARD, SpanKind.BACKWARD)}
    return sum(span.duration_s for span in report.spans if span.label in labels)


def rank_seconds(
    predicted_s: Sequence[float], devices: Sequence[RankReport], *, num_ranks: int
) -> tuple[tuple[float, float], ...]:
    return ()
