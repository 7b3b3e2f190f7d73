from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.plan import CostModel, imbalance, lay_out, plan_batch
from rayfcp.values import (
    BatchPlan,
    Block,
    ClusterSpec,
    Group,
    Layout,
    MicrobatchPlan,
    Primitive,
    Round,
    SequenceSpec,
    Transfer,
)
from tests.examples import examples
from tests.plan.helpers import UNIT, batch_of, batches


def plan_of(groups: tuple[Group, ...], num_ranks: int) -> BatchPlan:
    microbatch = MicrobatchPlan(groups=groups, group_s=(1.0,) * len(groups), predicted_s=1.0)
    return BatchPlan(
        strategy="ring",
        num_ranks=num_ranks,
        generation=0,
        microbatches=(microbatch,),
        recomputed_layers=0,
        predicted_s=1.0,
        lower_bound_s=1.0,
        reason="By hand.",
    )


def test_by_hand() -> None:
    """Rank 0 holds 4 tokens (10 pairs), rank 1 holds 2 (3 pairs), rank 2 nothing."""
    plan = plan_of((Group(ranks=(0,), sequences=(0,)), Group(ranks=(1,), sequences=(1,))), 3)
    found = imbalance(plan, batch_of([4, 2]), cost=UNIT)
    assert found.memory == pytest.approx((4 - 2) / 4)
    assert found.attention == pytest.approx((10 - 13 / 3) / 10)
    heavy, light = 10 * 1e-3 + 4 * 1e-2, 3 * 1e-3 + 2 * 1e-2
    assert found.compute == pytest.approx((heavy - (heavy + light) / 3) / heavy)
    assert found.communication == 0


def test_communication_counts_the_busier_direction() -> None:
    """One token on a ring of two: the owner sends one, the other receives one."""
    assert imbalance(plan_of((Group(ranks=(0, 1), sequences=(0,)),), 2), batch_of([1]), cost=UNIT).communication == 0
    shared = imbalance(plan_of((Group(ranks=(0, 1), sequences=(0,)),), 4), batch_of([1]), cost=UNIT)
    assert shared.communication == pytest.approx(0.5)


@examples(15)
@given(batches(max_sequences=8, max_tokens=100), st.integers(1, 9))
def test_shares_of_pairs_add_up_and_ratios_are_in_range(sequences: list[SequenceSpec], num_ranks: int) -> None:
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=100)
    plan = plan_batch(sequences, cluster=cluster, cost=UNIT)
    blocks = [block for microbatch in plan.microbatches for block in lay_out(microbatch, sequences).blocks]
    pairs = sum(sequences[block.sequence].block_pairs(block.start, block.stop) for block in blocks)
    assert pairs == sum(sequence.attention_pairs for sequence in sequences)
    found = imbalance(plan, sequences, cost=UNIT)
    assert all(0 <= each < 1 for each in (found.compute, found.attention, found.memory, found.communication))


def headed(**changes: float) -> CostModel:
    """Eight query heads, two key/value heads."""
    return UNIT.with_coefficients(num_heads=8, num_kv_heads=2, **changes)


def test_ulysses_ranks_share_pairs_alike_and_exchange_heads() -> None:
    """Ten tokens on three ranks of a Ulysses group hold 4, 3, 3; rank 3 has a sequence of its own."""
    ulysses = Group(ranks=(0, 1, 2), sequences=(0,), primitive=Primitive.ULYSSES)
    plan = plan_of((ulysses, Group(ranks=(3,), sequences=(1,))), 4)
    found = imbalance(plan, batch_of([10, 4]), cost=headed())
    assert found.attention == pytest.approx((55 / 3 - 65 / 4) / (55 / 3))
    assert found.memory == pytest.approx((4 - 14 / 4) / 4)
    busiest = 55 / 3 * 1e-3 + 4 * 1e-2
    assert found.compute == pytest.approx((busiest - (65e-3 + 14e-2) / 4) / busiest)
    queries, keys = 8 / 3, 2 * 1  # of one token: heads to each rank; two heads on three ranks are replicated
    first = max(4 * 2 * (queries + keys) + 6 * queries, 6 * (queries + keys) + 4 * 2 * queries)
    others = max(3 * 2 * (queries + keys) + 7 * queries, 7 * (queries + keys) + 3 * 2 * queries)
    assert found.communication == pytest.approx(1 - (first + 2 * others) / 4 / max(first, others))


def test_volumes_of_rings_and_ulysses_have_one_unit() -> None:
    """Four tokens on a ring of two: each rank sends 2 tokens of 2 x 2 heads. On a Ulysses group of two: 2 tokens
    of 4 queries and 2 x 1 keys and values to the other, and 4 outputs of its 2 tokens back."""
    pair = (Group(ranks=(0, 1), sequences=(0,)), Group(ranks=(2, 3), sequences=(1,), primitive=Primitive.ULYSSES))
    found = imbalance(plan_of(pair, 4), batch_of([4, 4]), cost=headed()).communication
    ring, ulysses = 2 * 2 * 2, 2 * (4 + 2) + 2 * 4
    assert found == pytest.approx(1 - (ring + ulysses) / 2 / ulysses)


@pytest.mark.parametrize("primitive", list(Primitive))
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_busiest_rank_is_what_the_cost_model_says(primitive: Primitive, degree: int) -> None:
    """A level group beside ranks without work: max = the group's seconds without fixed and moved ones."""
    cost = headed(attention_half_tokens=7.0, fixed_s=0.0)
    cost = cost.with_coefficients(
        ring_intra_s_per_token=0.0, ring_inter_s_per_token=0.0, ring_s_per_round=0.0, ulysses_s=0.0
    ).with_coefficients(ulysses_intra_s_per_token=1e-15, ulysses_inter_s_per_token=1e-15)
    group = Group(ranks=tuple(range(degree)), sequences=(0,), primitive=primitive)
    sequences = batch_of([64])
    busiest_s = float(cost.group_s(64 * 65 / 2, 64, degree=degree, primitive=primitive))
    found = imbalance(plan_of((group,), degree + 1), sequences, cost=cost)
    assert found.compute == pytest.approx(1 / (degree + 1))
    beside = imbalance(
        plan_of((group, Group(ranks=(degree,), sequences=(1,))), degree + 1),
        [*sequences, *(replace(each, id=1) for each in batch_of([1]))],
        cost=cost,
    )
    alone_s = float(cost.group_s(1, 1, degree=1))
    assert beside.compute == pytest.approx(1 - (degree * busiest_s + alone_s) / (degree + 1) / busiest_s)


def test_blocks_of_a_free_layout_are_pieces() -> None:
    """Blocks of 2 tokens, 3 and 7 pairs, are slowed alike by a half-length of 4 tokens; of 1 and 3 tokens, 1 and
    9 pairs, they are not."""
    blocks = tuple(Block(sequence=0, start=2 * rank, stop=2 * rank + 2, rank=rank) for rank in range(2))
    sent = Round(transfers=(Transfer(blocks=(0,), source=0, target=1),))
    plan = plan_of((Group(ranks=(0, 1), sequences=(0,)),), 2)
    free = replace(plan.microbatches[0], layout=Layout(blocks=blocks, rounds=(sent,)))
    cost = headed(attention_half_tokens=4.0, linear_s_per_token=0.0)
    found = imbalance(replace(plan, microbatches=(free,)), batch_of([4]), cost=cost)
    assert found.compute == pytest.approx((7 - 5) / 7) and found.communication == 0
    uneven = Layout(blocks=(replace(blocks[0], stop=1), replace(blocks[1], start=1)), rounds=(sent,))
    free = replace(free, layout=uneven)
    found = imbalance(replace(plan, microbatches=(free,)), batch_of([4]), cost=cost)
    slowed = (1 * (1 + 4 / 1), 9 * (1 + 4 / 3))
    assert found.compute == pytest.approx((slowed[1] - sum(slowed) / 2) / slowed[1])
