"""From what a step's plan and workers say to what the cost model can be refitted from."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rayfcp.cost.refit import Observation, Part
from rayfcp.execute.reports import RankReport
from rayfcp.plan import CostModel
from rayfcp.plan.imbalance import ENCODER
from rayfcp.values import BatchPlan, ClusterSpec, SequenceSpec, SpanKind


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGroup:
    """A group of the plan: its ranks, what it has to do, the seconds that were predicted, and the speed of its slowest
    rank, by which they were."""

    ranks: tuple[int, ...]
    part: Part
    predicted_s: float
    speed: float = 1.0


Loads = npt.NDArray[np.float64]

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
                speed=min((cluster.speed_of_rank[rank] for rank in group.ranks), default=1.0)
                if cluster.speed_of_rank
                else 1.0,
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
    Seconds are those at speed 1: what is known of a slow rank is not learned as the cost of all (its messages, which
    are no slower, are taken for as slow).
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
                found.append(Observation(parts=(group.part,), seconds=seconds * group.speed))
    return found


def _of_step(groups: PlannedGroups, ranks: Sequence[RankReport]) -> list[Observation]:
    if not groups or not all(groups):
        return []
    slowest = [max(held, key=lambda group: group.predicted_s) for held in groups]
    usual_s = sum(group.predicted_s * group.speed for group in slowest)
    share = usual_s / max(sum(group.predicted_s for group in slowest), 1e-300)
    step_s = max(report.step_s for report in ranks)
    return [Observation(parts=tuple(group.part for group in slowest), seconds=step_s * share)]


def _pass_s(report: RankReport, microbatch: int) -> float:
    """Forward and backward of one microbatch."""
    labels = {f"{kind.value} {microbatch}" for kind in (SpanKind.FORWARD, SpanKind.BACKWARD)}
    return sum(span.duration_s for span in report.spans if span.label in labels)


def own_seconds(loads: Loads, *, cost: CostModel) -> tuple[float, ...]:
    """By stage and rank, rank r of N on stage p at p x N + r: seconds of a step in which it waits for nobody, at
    speed 1: attention, linear layers, pictures and fixed costs, of which a stage has its layers' share and the last one
    the head.

    `loads`: `rayfcp.plan.imbalance.rank_loads` of the plan. What memory makes a stage recompute is not counted: it is
    the same for all ranks of the stage.
    """
    compute_s, tokens = loads[:, 0].sum(axis=0) + len(loads) * cost.fixed_s, loads[:, 2].sum(axis=0)
    if cost.encoder is not None:
        encoded_s = loads[:, ENCODER]
        compute_s = compute_s + encoded_s.sum(axis=0) + np.count_nonzero(encoded_s.any(axis=1)) * cost.encoder.fixed_s
    if cost.pipeline is None:
        return tuple(compute_s.tolist())
    head_s = cost.pipeline.head_s_per_token * tokens
    share = np.array(cost.pipeline.layers_of_stage) / cost.pipeline.num_layers
    own_s = share[:, None] * (compute_s - head_s)
    own_s[-1] += head_s
    return tuple(own_s.ravel().tolist())


def rank_seconds(
    predicted_s: Sequence[float], devices: Sequence[RankReport], *, num_ranks: int
) -> tuple[tuple[float, float], ...]:
    """Of each rank, on the stage and the tensor-parallel device that is slowest by this: the seconds of a step's passes
    in which it should not wait, at speed 1 (`own_seconds`), and those in which it did not. Their ratio, over that of
    the other ranks, is its speed.

    Each device counts its own waiting: for messages of a ring, in which the fast wait for the slow, for gathers,
    reductions and other stages. Nothing where hosts do not wait.
    """
    if any(math.isnan(each) for report in devices for each in (report.message_s, *report.gather_s)):
        return ()
    slowest: dict[int, tuple[float, float]] = {}
    for report in devices:
        passes_s = sum(span.duration_s for span in report.spans if span.kind is not SpanKind.UPDATE)
        own_s = max(passes_s - report.message_s - sum(report.gather_s), 0.0)
        found = predicted_s[report.stage * num_ranks + report.rank], own_s
        before = slowest.setdefault(report.rank, found)
        if found[1] * before[0] > before[1] * found[0]:
            slowest[report.rank] = found
    return tuple(slowest[rank] for rank in range(num_ranks))
