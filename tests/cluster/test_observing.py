"""Conversion of workers' reports to observations of the cost model."""

import dataclasses
import math

import pytest

from rayfcp.cluster.facts.observing import TimedGroups, observations, own_seconds, rank_seconds, timed_groups
from rayfcp.config.models import PlanConfig
from rayfcp.execute.reports import DeviceReport
from rayfcp.plan import plan_batch
from rayfcp.plan.imbalance import rank_loads
from rayfcp.values import ClusterSpec, Span, SpanKind
from tests.plan.helpers import UNIT, batch_of
from tests.plan.pipeline.helpers import staged_cost

CLUSTER = ClusterSpec(num_ranks=3, max_tokens_per_rank=64, node_of_rank=(0, 0, 1))
BATCH = batch_of([100, 30, 20, 60, 9])
PLAN = plan_batch(BATCH, cluster=CLUSTER, cost=UNIT, options=PlanConfig())
GROUPS = timed_groups(PLAN, BATCH, cluster=CLUSTER)
TRAFFIC_S = 0.125


def reports(
    groups: TimedGroups = GROUPS, *, host_waits: bool = True, traffic_s: float = TRAFFIC_S
) -> list[DeviceReport]:
    """Ranks that compute as predicted, wait in gathers for the slowest of them, and gather for `traffic_s`."""
    found = []
    for rank in range(CLUSTER.num_ranks):
        spans, waited = [], []
        for number, held in enumerate(groups):
            longest_s = max(group.predicted_s for group in held)
            own_s = next((group.predicted_s for group in held if rank in group.ranks), 0.25)
            waited.append(longest_s - own_s + traffic_s)
            for kind, share in ((SpanKind.LOAD, 0.0), (SpanKind.FORWARD, 0.3), (SpanKind.BACKWARD, 0.7)):
                stop_s = share * (longest_s + traffic_s)
                spans.append(
                    Span(rank=rank, stage=0, kind=kind, label=f"{kind.value} {number}", start_s=0.0, stop_s=stop_s)
                )
        found.append(
            DeviceReport(
                number=rank,
                stage=0,
                rank=rank,
                tensor_rank=0,
                step=1,
                loss=1.0,
                grad_norm=1.0,
                learning_rate=1.0,
                step_s=sum(span.duration_s for span in spans) + rank,
                wait_s=sum(waited),
                memory_bytes={},
                gather_s=tuple(waited) if host_waits else (math.nan,) * len(waited),
                spans=tuple(spans),
            )
        )
    return found


def test_the_first_tensor_parallel_device_speaks_for_its_rank() -> None:
    alone = reports()
    both = [
        dataclasses.replace(
            report,
            number=2 * report.rank + tensor_rank,
            tensor_rank=tensor_rank,
            gather_s=tuple(100.0 * tensor_rank + each for each in report.gather_s),
        )
        for report in alone
        for tensor_rank in (0, 1)
    ]
    assert observations(GROUPS, both) == observations(GROUPS, alone)


def test_groups_are_those_of_the_plan() -> None:
    assert len(GROUPS) == len(PLAN.microbatches)
    tokens = sum(group.part.num_tokens for held in GROUPS for group in held)
    pairs = sum(group.part.num_pairs for held in GROUPS for group in held)
    assert (tokens, pairs) == (219, sum(each.attention_pairs for each in BATCH))
    for held in GROUPS:
        for group in held:
            assert group.part.degree == len(group.ranks)
            assert group.part.crosses == (2 in group.ranks and len(group.ranks) > 1)


def test_waiting_for_slower_groups_is_taken_off_and_traffic_stays() -> None:
    """One observation a group: its own seconds and the traffic, whoever it waited for."""
    found = observations(GROUPS, reports())
    want = [(group.part, group.predicted_s + TRAFFIC_S) for held in GROUPS for group in held]
    assert [each.groups for each in found] == [(part,) for part, _ in want]
    assert [each.seconds for each in found] == pytest.approx([seconds for _, seconds in want])


def test_hosts_that_do_not_wait_tell_of_whole_steps() -> None:
    told = reports(host_waits=False)
    found = observations(GROUPS, told)
    slowest = tuple(max(held, key=lambda group: group.predicted_s).part for held in GROUPS)
    assert [each.groups for each in found] == [slowest]
    assert found[0].seconds == max(report.step_s for report in told)


def test_blocks_placed_freely_tell_nothing() -> None:
    plan = plan_batch(BATCH, cluster=CLUSTER, cost=UNIT, strategy="magi", options=PlanConfig())
    groups = timed_groups(plan, BATCH, cluster=CLUSTER)
    assert groups == ((),) * len(plan.microbatches)
    told = [dataclasses.replace(report, gather_s=(0.0,) * len(plan.microbatches)) for report in reports()]
    assert observations(groups, told) == []
    assert observations(groups, reports(host_waits=False)) == []


SPEEDS = (1.0, 0.5, 1.0)


def test_seconds_of_slow_ranks_are_told_at_the_usual_speed() -> None:
    """Groups that take as long as predicted at their speeds log nothing new about the cost of compute."""
    slow = dataclasses.replace(CLUSTER, speed_of_rank=SPEEDS)
    free = UNIT.with_coefficients(ring_intra_s_per_token=0.0, ring_inter_s_per_token=0.0, ring_s_per_round=0.0)
    plan = plan_batch(BATCH, cluster=slow, cost=free, options=PlanConfig())
    groups = timed_groups(plan, BATCH, cluster=slow)
    speeds = [group.speed for held in groups for group in held]
    assert speeds == [min(SPEEDS[rank] for rank in group.ranks) for held in groups for group in held] and 0.5 in speeds
    longest_s = sum(max(group.predicted_s for group in held) for held in groups)
    for host_waits in (True, False):
        devices = reports(groups, host_waits=host_waits, traffic_s=0.0)
        more = 1.0 if host_waits else max(each.step_s for each in devices) / longest_s
        for each in observations(groups, devices):
            usual_s = sum(
                float(free.group_s(part.num_pairs, part.num_tokens, degree=part.degree, crosses=part.crosses))
                for part in each.groups
            )
            assert each.seconds == pytest.approx(usual_s * more)


def told(own_s: list[float], *, message_s: float = 0.0, num_stages: int = 1) -> list[DeviceReport]:
    """Devices that compute for `own_s` in one microbatch beside gathers, messages and other stages, for which all wait
    until the slowest is done."""
    longest_s = max(own_s) + 1.0
    return [
        dataclasses.replace(
            reports()[0],
            number=number,
            stage=number // (len(own_s) // num_stages),
            rank=number % (len(own_s) // num_stages),
            spans=tuple(
                Span(rank=0, stage=0, kind=kind, label=f"{kind.value} 0", start_s=0.0, stop_s=share * longest_s)
                for kind, share in ((SpanKind.FORWARD, 0.5), (SpanKind.BACKWARD, 0.5), (SpanKind.UPDATE, 3.0))
            ),
            gather_s=(longest_s - seconds - message_s,),
            message_s=message_s,
        )
        for number, seconds in enumerate(own_s)
    ]


def test_seconds_of_ranks_are_told_without_waiting() -> None:
    found = rank_seconds((2.0, 1.0, 3.0), told([2.0, 2.0, 3.0], message_s=0.5), num_ranks=3)
    assert found == tuple(pytest.approx(each) for each in ((2.0, 2.0), (1.0, 2.0), (3.0, 3.0)))
    speeds = [predicted_s / measured_s for predicted_s, measured_s in found]
    assert speeds == pytest.approx([1.0, 0.5, 1.0])


def test_the_slowest_stage_and_the_slowest_tensor_parallel_device_speak_for_a_rank() -> None:
    devices = told([1.0, 4.0, 2.0, 2.0], num_stages=2)
    found = rank_seconds((1.0, 1.0, 1.0, 2.0), devices, num_ranks=2)
    assert found == tuple(pytest.approx(each) for each in ((1.0, 2.0), (1.0, 4.0)))


def test_nothing_is_told_of_ranks_whose_hosts_do_not_wait() -> None:
    devices = [dataclasses.replace(each, message_s=math.nan) for each in told([1.0, 2.0])]
    assert rank_seconds((1.0, 1.0), devices, num_ranks=2) == ()


def test_own_seconds_are_those_of_lone_ranks_and_of_their_share_of_rings() -> None:
    free = UNIT.with_coefficients(ring_intra_s_per_token=0.0, ring_inter_s_per_token=0.0, ring_s_per_round=0.0)
    plan = plan_batch(BATCH, cluster=CLUSTER, cost=free, options=PlanConfig())
    found = own_seconds(rank_loads(plan, BATCH, cost=free), cost=free)
    for rank in range(CLUSTER.num_ranks):
        most_s = sum(
            next((s for g, s in zip(each.groups, each.group_s, strict=True) if rank in g.ranks), free.fixed_s)
            for each in plan.microbatches
        )
        assert found[rank] == pytest.approx(most_s, rel=0.05)


def test_own_seconds_of_stages_are_their_layers_and_the_head() -> None:
    cost = staged_cost(num_ranks=2, num_stages=2)
    batch = batch_of([900, 500, 300])
    cluster = ClusterSpec(num_ranks=2, max_tokens_per_rank=4096, num_stages=2)
    plan = plan_batch(batch, cluster=cluster, cost=cost)
    loads = rank_loads(plan, batch, cost=cost)
    found = own_seconds(loads, cost=cost)
    alone = own_seconds(loads, cost=dataclasses.replace(cost, pipeline=None))
    assert [found[rank] + found[2 + rank] for rank in range(2)] == pytest.approx(alone)
    assert found[2] > found[0] and found[3] > found[1]
