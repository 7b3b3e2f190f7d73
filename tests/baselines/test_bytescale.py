"""`bytescale` and `wlb`: ranks in proportion to length, and the better of that and one ring."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.config.models import PlanConfig
from rayfcp.plan import plan_batch
from rayfcp.values import BatchPlan, ClusterSpec, InfeasiblePlanError, SequenceSpec
from tests.examples import examples
from tests.plan.helpers import UNIT, batch_of, batches, profiled


def degree_of(plan: BatchPlan) -> dict[int, int]:
    return {
        sequence: group.degree
        for microbatch in plan.microbatches
        for group in microbatch.groups
        for sequence in group.sequences
    }


@examples(20)
@given(batches(max_sequences=14, max_tokens=400), st.integers(1, 128), st.integers(1, 200))
def test_degrees_are_lengths_over_one_unit(sequences: list[SequenceSpec], num_ranks: int, room: int) -> None:
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=room)
    if max(each.num_tokens for each in sequences) > num_ranks * room:
        return
    plan = plan_batch(sequences, cluster=cluster, cost=UNIT, strategy="bytescale")
    degrees = degree_of(plan)
    lengths = {each.id: each.num_tokens for each in sequences}
    assert any(
        all(degrees[each] == math.ceil(lengths[each] / unit) for each in lengths) for unit in range(1, room + 1)
    ), "one unit explains all degrees"
    rings = [group for each in plan.microbatches for group in each.groups if group.degree > 1]
    assert all(len(group.sequences) == 1 for group in rings)


FEW = dataclasses.replace(UNIT, fixed_s=1e4)
"""Microbatches are dear, so that there is one wherever it fits."""


def test_twice_the_length_twice_the_ranks() -> None:
    cluster = ClusterSpec(num_ranks=7, max_tokens_per_rank=100)
    plan = plan_batch(batch_of([400, 200, 100]), cluster=cluster, cost=FEW, strategy="bytescale")
    assert degree_of(plan) == {0: 4, 1: 2, 2: 1}


def test_ranks_that_finish_early_get_more() -> None:
    """Beside a ring that takes long, short sequences fill the ranks that are left, and cost nothing."""
    cluster = ClusterSpec(num_ranks=6, max_tokens_per_rank=500)
    plan = plan_batch(batch_of([2000, *[40] * 20]), cluster=cluster, cost=FEW, strategy="bytescale")
    (microbatch,) = plan.microbatches
    seconds = {group.degree: group_s for group, group_s in zip(microbatch.groups, microbatch.group_s, strict=True)}
    assert seconds[max(seconds)] == max(microbatch.group_s) and min(seconds) == 1


@pytest.mark.parametrize("lengths", [[5000, *[100] * 30], [300] * 40, [2000] * 3])
@pytest.mark.parametrize("num_ranks", [1, 6, 16])
def test_wlb_is_the_better_of_both(lengths: list[int], num_ranks: int) -> None:
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=6000)
    seconds = {
        strategy: plan_batch(
            batch_of(lengths), cluster=cluster, cost=profiled(num_ranks), strategy=strategy
        ).predicted_s
        for strategy in ("ring", "bytescale", "wlb")
    }
    assert seconds["wlb"] == min(seconds["ring"], seconds["bytescale"])


@pytest.mark.parametrize("strategy", ["static-cp", "ring", "bytescale", "wlb", "magi"])
def test_strategies_of_rings_need_rings(strategy: str) -> None:
    cluster = ClusterSpec(num_ranks=2, max_tokens_per_rank=60)
    options = PlanConfig(primitives=("ulysses",))
    with pytest.raises(InfeasiblePlanError, match=r"needs primitive ring, plan\.primitives is ulysses; add ring"):
        plan_batch(batch_of([9]), cluster=cluster, cost=UNIT, strategy=strategy, options=options)
