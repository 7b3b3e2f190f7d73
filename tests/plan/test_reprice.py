"""Pricing a plan anew."""

import dataclasses

import pytest
from hypothesis import given

from jobs.bench.reprice import reprice
from rayfcp.config.models import PlanConfig
from rayfcp.plan import lower_bound, plan_batch
from rayfcp.plan.pipeline.schedule import one_forward_one_backward, pipeline_plan
from rayfcp.values import ClusterSpec, SequenceSpec
from tests.examples import examples
from tests.plan.helpers import UNIT, batch_of, batches

CLUSTER = ClusterSpec(num_ranks=4, max_tokens_per_rank=64)
OPTIONS = PlanConfig()


@examples(12)
@given(batch=batches(max_sequences=12, max_tokens=200))
@pytest.mark.parametrize("strategy", ["flex-ring", "static-cp", "ring", "magi"])
def test_its_own_cost_model_changes_nothing(strategy: str, batch: list) -> None:
    plan = plan_batch(batch, cluster=CLUSTER, cost=UNIT, strategy=strategy, options=OPTIONS)
    again = reprice(plan, batch, cluster=CLUSTER, cost=UNIT)
    assert again.predicted_s == pytest.approx(plan.predicted_s)
    assert again.lower_bound_s == pytest.approx(plan.lower_bound_s)
    for one, other in zip(again.microbatches, plan.microbatches, strict=True):
        assert one.groups == other.groups
        assert one.group_s == pytest.approx(other.group_s)


def test_twice_the_coefficients_take_twice_as_long() -> None:
    batch = batch_of([90, 40, 40, 8, 8, 200])
    plan = plan_batch(batch, cluster=CLUSTER, cost=UNIT, options=OPTIONS)
    times = [
        field.name
        for field in dataclasses.fields(UNIT)
        if field.name.endswith(("_s", "_per_token", "_per_pair", "_per_round"))
    ]
    double = UNIT.with_coefficients(**{name: 2 * getattr(UNIT, name) for name in times})
    again = reprice(plan, batch, cluster=CLUSTER, cost=double)
    assert again.predicted_s == pytest.approx(2 * plan.predicted_s)
    assert again.lower_bound_s == pytest.approx(lower_bound(batch, cluster=CLUSTER, cost=double))


def test_another_number_of_ranks_is_refused() -> None:
    batch = batch_of([8, 8])
    plan = plan_batch(batch, cluster=CLUSTER, cost=UNIT, options=OPTIONS)
    with pytest.raises(ValueError, match="plan is for 4 ranks"):
        reprice(plan, batch, cluster=dataclasses.replace(CLUSTER, num_ranks=3), cost=UNIT)


def test_pipelines_are_not_priced_anew() -> None:
    plan = plan_batch([SequenceSpec(id=0, num_tokens=8, num_targets=7)], cluster=CLUSTER, cost=UNIT, options=OPTIONS)
    order = one_forward_one_backward([1], num_stages=2)
    piped = pipeline_plan(order, start=0, recomputed=[[0], [0]], predicted_s=1.0)
    staged = dataclasses.replace(plan, pipelines=(piped,))
    with pytest.raises(ValueError, match="plan has 2 stages"):
        reprice(staged, [], cluster=CLUSTER, cost=UNIT)
