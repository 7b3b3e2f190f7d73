"""Observations for refitting the cost model and for rank speeds, from a step's plan and the reports of its devices."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rayfcp.cost.refit import GroupWork, Observation
from rayfcp.execute.reports import DeviceReport
from rayfcp.plan import CostModel
from rayfcp.plan.imbalance import ENCODER
from rayfcp.values import BatchPlan, ClusterSpec, Group, SequenceSpec, SpanKind

Loads = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedGroup:
    """One CP group of a microbatch: its work, its predicted seconds, and the speed of its slowest rank, which the
    prediction includes."""

    ranks: tuple[int, ...]
    part: GroupWork
    predicted_s: float
    speed: float = 1.0


_OTHER_SPANS = (SpanKind.UPDATE, SpanKind.SCORE)
"""Spans of a step beside those of its program."""

TimedGroups = tuple[tuple[TimedGroup, ...], ...]
"""Groups by microbatch."""


def timed_groups(plan: BatchPlan, sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec) -> TimedGroups:
    """Groups of each microbatch whose times can be attributed to them.

    Empty for pipelines, which run several microbatches at once, and for microbatches whose blocks are placed freely.
    """
    if plan.pipelines:
        return ()
    by_id = {sequence.id: sequence for sequence in sequences}
    nodes = cluster.node_of_rank or (0,) * cluster.num_ranks
    speeds = cluster.speed_of_rank or (1.0,) * cluster.num_ranks

    def timed(group: Group, predicted_s: float) -> TimedGroup:
        crosses = len({nodes[rank] for rank in group.ranks}) > 1
        part = GroupWork.of(group, [by_id[each] for each in group.sequences], crosses=crosses)
        speed = min((speeds[rank] for rank in group.ranks), default=1.0)
        return TimedGroup(ranks=group.ranks, part=part, predicted_s=predicted_s, speed=speed)

    return tuple(
        tuple(timed(*each) for each in zip(microbatch.groups, microbatch.group_s, strict=True))
        if microbatch.layout is None
        else ()
        for microbatch in plan.microbatches
    )


def observations(groups: TimedGroups, devices: Sequence[DeviceReport]) -> list[Observation]:
    """Observations from one step of one stage; `devices` are the reports of all devices in order.

    The first tensor-parallel device of a rank stands for all of them, since they wait for each other in every layer.
    On CPUs there is one observation per group and microbatch: the median over its ranks of forward plus backward,
    with the rank's own gathers and reductions, in which it waits for slower groups, replaced by the shortest ones of
    any rank, which are pure traffic. Waiting for ring messages is part of the group's time.
    Where hosts do not wait for devices, only the whole step has a time, which the slowest group of each microbatch
    explains. Seconds are scaled to speed 1, so that a slow rank does not raise the cost of all (its messages, which
    are not slower, are scaled too).
    """
    ranks = [report for report in devices if report.tensor_rank == 0]
    if any(math.isnan(seconds) for report in ranks for seconds in report.gather_s):
        return _whole_step(groups, ranks)
    found = []
    for number, in_microbatch in enumerate(groups):
        traffic_s = min(report.gather_s[number] for report in ranks)
        own_s = [_pass_s(report, number) - report.gather_s[number] + traffic_s for report in ranks]
        for group in in_microbatch:
            seconds = statistics.median(own_s[rank] for rank in group.ranks)
            if seconds > 0:
                found.append(Observation(groups=(group.part,), seconds=seconds * group.speed))
    return found


def _whole_step(groups: TimedGroups, ranks: Sequence[DeviceReport]) -> list[Observation]:
    if not groups or not all(groups):
        return []
    slowest = [max(in_microbatch, key=lambda group: group.predicted_s) for in_microbatch in groups]
    at_speed_1_s = sum(group.predicted_s * group.speed for group in slowest)
    share = at_speed_1_s / max(sum(group.predicted_s for group in slowest), 1e-300)
    step_s = max(report.step_s - _scored_s(report) for report in ranks)
    return [Observation(groups=tuple(group.part for group in slowest), seconds=step_s * share)]


def _pass_s(report: DeviceReport, microbatch: int) -> float:
    labels = {f"{kind.value} {microbatch}" for kind in (SpanKind.FORWARD, SpanKind.BACKWARD)}
    return sum(span.duration_s for span in report.spans if span.label in labels)


def _scored_s(report: DeviceReport) -> float:
    """Seconds of the forward pass before the step's programs, which a loss of pairs takes."""
    return sum(span.duration_s for span in report.spans if span.kind is SpanKind.SCORE)


def own_seconds(loads: Loads, *, cost: CostModel) -> tuple[float, ...]:
    """Predicted busy seconds of a step at speed 1, stage p's rank r of N at index p x N + r.

    Counts attention, linear layers, vision encoder and fixed costs; a stage has its layers' share and the last one the
    head. Recomputation is left out: it is the same for all ranks of a stage.

    Args:
        loads: `rayfcp.plan.imbalance.rank_loads` of the plan.
    """
    compute_s, tokens = loads[:, 0].sum(axis=0) + len(loads) * cost.fixed_s, loads[:, 2].sum(axis=0)
    if cost.encoder is not None:
        encoded_s = loads[:, ENCODER]
        compute_s = compute_s + encoded_s.sum(axis=0) + np.count_nonzero(encoded_s.any(axis=1)) * cost.encoder.fixed_s
    if cost.pipeline is None:
        return tuple(compute_s.tolist())
    head_s = cost.pipeline.head_s_per_token * tokens
    share = np.array(cost.pipeline.share)
    own_s = share[:, None] * (compute_s - head_s)
    own_s[-1] += head_s
    return tuple(own_s.ravel().tolist())


def rank_seconds(
    predicted_s: Sequence[float], devices: Sequence[DeviceReport], *, num_ranks: int
) -> tuple[tuple[float, float], ...]:
    """Predicted (`own_seconds`) and measured busy seconds of each rank, for its relatively slowest device.

    Their ratio over that of the other ranks is the rank's speed. Measured seconds exclude waiting for ring messages,
    gathers, reductions and other stages. Empty where hosts do not wait for devices.
    """
    if any(math.isnan(each) for report in devices for each in (report.message_s, *report.gather_s)):
        return ()
    slowest: dict[int, tuple[float, float]] = {}
    for report in devices:
        passes_s = sum(span.duration_s for span in report.spans if span.kind not in _OTHER_SPANS)
        own_s = max(passes_s - report.message_s - sum(report.gather_s), 0.0)
        found = predicted_s[report.stage * num_ranks + report.rank], own_s
        before = slowest.setdefault(report.rank, found)
        if found[1] * before[0] > before[1] * found[0]:
            slowest[report.rank] = found
    return tuple(slowest[rank] for rank in range(num_ranks))
