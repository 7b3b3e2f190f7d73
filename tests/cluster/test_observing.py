"""From reports of workers to observations of the cost model."""

import dataclasses
import math

import pytest

from rayfcp.cluster.observing import observations, planned_groups
from rayfcp.config.plan import PlanConfig
from rayfcp.execute.reports import RankReport
from rayfcp.plan import plan_batch
from rayfcp.values import ClusterSpec, Span, SpanKind
from tests.plan.helpers import UNIT, batch_of

CLUSTER = ClusterSpec(num_ranks=3, max_tokens_per_rank=64, node_of_rank=(0, 0, 1))
BATCH = batch_of([100, 30, 20, 60, 9])
PLAN = plan_batch(BATCH, cluster=CLUSTER, cost=UNIT, options=PlanConfig())
GROUPS = planned_groups(PLAN, BATCH, cluster=CLUSTER)
TRAFFIC_S = 0.125


def reports(*, host_waits: bool = True) -> list[RankReport]:
    """Ranks that compute as predicted, wait in gathers for the slowest of them, and gather for `TRAFFIC_S`."""
    found = []
    for rank in range(CLUSTER.num_ranks):
        spans, waited = [], []
        for number, held in enumerate(GROUPS):
            longest_s = max(group.predicted_s for group in held)
            own_s = next((group.predicted_s for group in held if rank in group.ranks), 0.25)
            waited.append(longest_s - own_s + TRAFFIC_S)
            for kind, share in ((SpanKind.LOAD, 0.0), (SpanKind.FORWARD, 0.3), (SpanKind.BACKWARD, 0.7)):
                stop_s = share * (longest_s + TRAFFIC_S)
                spans.append(
                    Span(rank=rank, stage=0, kind=kind, label=f"{kind.value} {number}", start_s=0.0, stop_s=stop_s)
                )
        found.append(
            RankReport(
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
                bytes_sent=0,
                num_cells=0,
                memory_bytes={},
                gather_s=tuple(waited) if host_waits else (math.nan,) * len(waited),
                spans=tuple(spans),
                saved=None,
            )
        )
    return found


def test_the_first_tensor_parallel_device_speaks_for_its_rank() -> None:
    alone = reports()
    pairs = [
        dataclasses.replace(
            report,
            number=2 * report.rank + tensor_rank,
            tensor_rank=tensor_rank,
            gather_s=tuple(100.0 * tensor_rank + each for each in report.gather_s),
        )
        for report in alone
        for tensor_rank in (0, 1)
    ]
    assert observations(GROUPS, pairs) == observations(GROUPS, alone)


def test_groups_are_those_of_the_plan() -> None:
    assert len(GROUPS) == len(PLAN.microbatches)
    tokens = sum(group.part.num_tokens for held in GROUPS for group in held)
    cells = sum(group.part.num_cells for held in GROUPS for group in held)
    assert (tokens, cells) == (219, sum(each.attention_cells for each in BATCH))
    for held in GROUPS:
        for group in held:
            assert group.part.degree == len(group.ranks)
            assert group.part.crosses == (2 in group.ranks and len(group.ranks) > 1)


def test_waiting_for_slower_groups_is_taken_off_and_traffic_stays() -> None:
    """One observation a group: its own seconds and the traffic, whoever it waited for."""
    found = observations(GROUPS, reports())
    want = [(group.part, group.predicted_s + TRAFFIC_S) for held in GROUPS for group in held]
    assert [each.parts for each in found] == [(part,) for part, _ in want]
    assert [each.seconds for each in found] == pytest.approx([seconds for _, seconds in want])


def test_hosts_that_do_not_wait_tell_of_whole_steps() -> None:
    told = reports(host_waits=False)
    found = observations(GROUPS, told)
    slowest = tuple(max(held, key=lambda group: group.predicted_s).part for held in GROUPS)
    assert [each.parts for each in found] == [slowest]
    assert found[0].seconds == max(report.step_s for report in told)


def test_blocks_placed_freely_tell_nothing() -> None:
    plan = plan_batch(BATCH, cluster=CLUSTER, cost=UNIT, strategy="magi", options=PlanConfig())
    groups = planned_groups(plan, BATCH, cluster=CLUSTER)
    assert groups == ((),) * len(plan.microbatches)
    told = [dataclasses.replace(report, gather_s=(0.0,) * len(plan.microbatches)) for report in reports()]
    assert observations(groups, told) == []
    assert observations(groups, reports(host_waits=False)) == []
