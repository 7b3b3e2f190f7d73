"""`rayfcp.plan_lengths`: a plan from lengths and two names."""

import pytest

import rayfcp
from rayfcp.values import BatchPlan, InfeasiblePlanError


def test_one_call_gives_a_plan_that_other_calls_take() -> None:
    plan = rayfcp.plan_lengths([60_000, 9_000, 9_000, 500], model="qwen3-8b", hardware="h100", ranks=8)
    assert isinstance(plan, BatchPlan) and plan.num_ranks == 8 and plan.gap >= 1
    assert [each.num_tokens for each in plan.sequences] == [60_000, 9_000, 9_000, 500]
    rayfcp.check_plan(plan, plan.sequences, cluster=plan.cluster, cost=plan.cost)
    assert len(rayfcp.lower(plan, plan.sequences)) == 8


def test_what_cannot_be_planned_says_why() -> None:
    with pytest.raises(InfeasiblePlanError, match="GiB"):
        rayfcp.plan_lengths([1000], model="qwen3-8b", hardware="h100", ranks=1, memory_gib=10)
    with pytest.raises(ValueError, match="lengths has 0 entries"):
        rayfcp.plan_lengths([], model="qwen3-8b", hardware="h100", ranks=8)
    with pytest.raises(ValueError, match="qwen3-8b"):
        rayfcp.plan_lengths([1000], model="qwen3-8", hardware="h100", ranks=8)
