"""Runs of ranks that share heads: cut evenly, permitted where heads and nodes allow, worth it where they are taken."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.config.models import BlockOptions, PlanConfig
from rayfcp.plan import plan_batch
from rayfcp.plan.blocks.heads import as_runs, permitted, split
from rayfcp.values import Block, ClusterSpec, InfeasiblePlanError, Primitive
from rayfcp.verify import check_plan
from tests.examples import examples
from tests.plan.blocks.helpers import any_options, drawn, planned, small
from tests.plan.helpers import batch_of, profiled

BOTH = (Primitive.RING, Primitive.ULYSSES)


@st.composite
def run_blocks(draw: st.DrawFn) -> tuple[list[Block], int]:
    num_runs = draw(st.integers(1, 4))
    blocks = []
    for sequence in range(draw(st.integers(1, 6))):
        start = 0
        for size in draw(st.lists(st.integers(1, 30), min_size=1, max_size=5)):
            blocks.append(
                Block(sequence=sequence, start=start, stop=start + size, rank=draw(st.integers(0, num_runs - 1)))
            )
            start += size
    return blocks, num_runs


@examples(200)
@given(run_blocks(), st.integers(1, 5))
def test_runs_are_cut_into_equal_shares_in_order(drawn_blocks: tuple[list[Block], int], heads: int) -> None:
    blocks, num_runs = drawn_blocks
    cut, became = split(blocks, num_runs=num_runs, heads=heads)
    for block, parts in zip(blocks, became, strict=True):
        found = [cut[part] for part in parts]
        assert [found[0].start, found[-1].stop] == [block.start, block.stop]
        assert all(one.stop == other.start for one, other in itertools.pairwise(found))
        assert all(part.sequence == block.sequence and part.rank // heads == block.rank for part in found)
    assert sum(len(parts) for parts in became) == len(cut) and all(block.num_tokens > 0 for block in cut)
    held = np.bincount([block.rank for block in cut], [block.num_tokens for block in cut], minlength=num_runs * heads)
    shares = held.reshape(num_runs, heads)
    assert (shares.max(axis=1) - shares.min(axis=1) <= 1).all()
    ranks = [[block.rank for block in cut if block.rank // heads == run] for run in range(num_runs)]
    assert all(each == sorted(each) for each in ranks)  # end to end, a run's tokens lie as they did


def test_what_heads_ranks_and_nodes_permit() -> None:
    cost = profiled(48, hardware="gpu-x")  # 8 ranks a node; 32 heads, 8 for keys and values
    cluster = ClusterSpec(num_ranks=48, max_tokens_per_rank=100)
    assert permitted(cluster, cost, allowed=BOTH, wanted=None) == [1, 2, 4, 8]
    assert permitted(cluster, cost, allowed=[Primitive.RING], wanted=None) == [1]
    nodes = tuple(rank // 6 for rank in range(48))
    in_sixes = ClusterSpec(num_ranks=48, max_tokens_per_rank=100, node_of_rank=nodes)
    assert permitted(in_sixes, cost, allowed=BOTH, wanted=None) == [1, 2]
    runs, shared = as_runs(in_sixes, cost, heads=2)
    assert (runs.num_ranks, runs.max_tokens_per_rank, runs.node_of_rank[:4]) == (24, 200, (0, 0, 0, 1))
    assert shared.ring_inter_s_per_token == cost.ring_inter_s_per_token / 2


@pytest.mark.parametrize(
    ("wanted", "allowed", "why"),
    [
        (5, BOTH, "must divide the 48 ranks"),
        (3, BOTH, "each run of so many ranks must lie in one node"),
        (2, (Primitive.RING,), "plan.primitives must have ulysses"),
    ],
)
def test_runs_that_cannot_be_are_refused(wanted: int, allowed: tuple[Primitive, ...], why: str) -> None:
    cluster = ClusterSpec(num_ranks=48, max_tokens_per_rank=100)
    with pytest.raises(InfeasiblePlanError, match=f"plan.blocks.heads is {wanted}: {why}"):
        permitted(cluster, profiled(48, hardware="gpu-x"), allowed=allowed, wanted=wanted)


def test_heads_that_do_not_divide_are_refused() -> None:
    cost = profiled(48, hardware="gpu-x").with_coefficients(num_heads=6, num_kv_heads=6)
    with pytest.raises(InfeasiblePlanError, match=r"plan.blocks.heads is 4: must divide 6 heads"):
        permitted(ClusterSpec(num_ranks=48, max_tokens_per_rank=9), cost, allowed=BOTH, wanted=4)


def test_runs_are_taken_where_they_are_faster() -> None:
    """One very long sequence over 64 ranks: 8 times fewer blocks need its keys."""
    cost, sequences = profiled(64, hardware="gpu-x"), drawn("bimodal", num_ranks=64, seed=1)
    alone = planned(sequences, cost=cost, num_ranks=64, options=BlockOptions(heads=1))
    options = PlanConfig(primitives=("ring", "ulysses"))
    cluster = ClusterSpec(num_ranks=64, max_tokens_per_rank=40_000)
    plan = plan_batch(sequences, cluster=cluster, cost=cost, strategy="flex-block", options=options)
    (microbatch,) = plan.microbatches
    assert microbatch.layout is not None and microbatch.layout.heads > 1
    assert microbatch.group_s[0] < alone.seconds


def test_no_runs_without_exchanges() -> None:
    cost = profiled(8, hardware="gpu-x")
    cluster = ClusterSpec(num_ranks=8, max_tokens_per_rank=1000)
    plan = plan_batch(batch_of([900] * 8), cluster=cluster, cost=cost, strategy="flex-block")
    assert all(each.layout is not None and each.layout.heads == 1 for each in plan.microbatches)


@examples(15)
@given(seed=st.integers(0, 10**6), num_ranks=st.sampled_from([2, 4, 6, 8, 16]), wanted=st.sampled_from([None, 1, 2]))
def test_plans_of_runs_are_proved(seed: int, num_ranks: int, wanted: int | None) -> None:
    """Tokens, pairs, matchings, gradients, memory, buffers, progress: all of `check_plan`."""
    sequences, cluster = small(seed, num_ranks=num_ranks)
    blocks = any_options(seed).model_copy(update={"heads": wanted})
    options = PlanConfig(primitives=("ring", "ulysses"), blocks=blocks)
    cost = profiled(num_ranks, hardware="gpu-x")
    plan = plan_batch(sequences, cluster=cluster, cost=cost, strategy="flex-block", options=options)
    check_plan(plan, sequences, cluster=cluster)
    if wanted is not None:
        assert {each.layout.heads for each in plan.microbatches if each.layout} == {wanted}
