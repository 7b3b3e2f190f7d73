"""Properties of every baseline: any ranks, any batch, a plan that the validator accepts or a named reason."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.config.models import PlanConfig
from rayfcp.plan import plan_batch
from rayfcp.values import ClusterSpec, InfeasiblePlanError, SequenceSpec
from rayfcp.verify import check_plan
from tests.examples import examples
from tests.plan.helpers import UNIT, batch_of, batches, profiled

BASELINES = ("static-cp", "ulysses", "ring", "bytescale", "wlb", "magi")
BOTH = PlanConfig(primitives=("ring", "ulysses"))
COSTS = st.builds(
    lambda overlap, half, heads: dataclasses.replace(
        UNIT,
        overlap=overlap,
        attention_half_tokens=half,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        ulysses_intra_s_per_token=2e-3,
        ulysses_inter_s_per_token=9e-3,
        ulysses_kv_share=0.3,
        ulysses_s=0.1,
    ),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([0.0, 20.0]),
    st.sampled_from([(1, 1), (4, 2), (12, 4), (32, 8)]),
)


def plan_or_reason(sequences: list[SequenceSpec], cluster: ClusterSpec, *, cost, strategy: str) -> None:  # type: ignore[no-untyped-def]
    longest = max(each.num_tokens for each in sequences)
    fits = longest <= cluster.num_ranks * cluster.max_tokens_per_rank
    try:
        plan = plan_batch(sequences, cluster=cluster, cost=cost, strategy=strategy, options=BOTH)
    except InfeasiblePlanError as error:
        assert f"has {longest} tokens" in str(error), "the binding constraint is named"
        assert not fits or (strategy == "ulysses" and "heads" in str(error))
        return
    check_plan(plan, sequences, cluster=cluster)


@pytest.mark.parametrize("strategy", BASELINES)
@examples(10)
@given(
    sequences=batches(max_sequences=10, max_tokens=200),
    num_ranks=st.integers(1, 24),
    room=st.integers(1, 220),
    cost=COSTS,
)
def test_any_ranks_any_batch(strategy, sequences, num_ranks, room, cost) -> None:  # type: ignore[no-untyped-def]
    plan_or_reason(sequences, ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=room), cost=cost, strategy=strategy)


@pytest.mark.parametrize("strategy", BASELINES)
@examples(4)
@given(
    lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=30),
    num_ranks=st.integers(25, 72),
    room=st.integers(100, 5000),
)
def test_many_ranks(strategy: str, lengths: list[int], num_ranks: int, room: int) -> None:
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=room)
    plan_or_reason(batch_of(lengths), cluster, cost=profiled(num_ranks), strategy=strategy)


@pytest.mark.parametrize("strategy", BASELINES)
@given(order=st.permutations(range(9)))
@examples(5)
def test_order_of_the_argument_does_not_matter(strategy: str, order: list[int]) -> None:
    sequences = batch_of([30, 20, 20, 20, 9, 9, 9, 1, 1])
    cluster = ClusterSpec(num_ranks=6, max_tokens_per_rank=32)
    plan = plan_batch(sequences, cluster=cluster, cost=UNIT, strategy=strategy, options=BOTH)
    shuffled = plan_batch([sequences[at] for at in order], cluster=cluster, cost=UNIT, strategy=strategy, options=BOTH)
    assert plan.plan_hash == shuffled.plan_hash


@pytest.mark.parametrize("strategy", BASELINES)
def test_nodes_of_odd_sizes(strategy: str) -> None:
    cluster = ClusterSpec(num_ranks=12, max_tokens_per_rank=40, node_of_rank=(0, 0, 0, 1, 1, 1, 1, 1, 2, 3, 3, 3))
    cost = dataclasses.replace(UNIT, num_heads=12, num_kv_heads=12)
    sequences = batch_of([150, 90, 40, 40, 30, 20, 10, 5, 5])
    plan_or_reason(sequences, cluster, cost=cost, strategy=strategy)
