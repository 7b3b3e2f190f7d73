import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfcp.plan import imbalance, lay_out, plan_batch
from rayfcp.plan.imbalance import block_cells
from rayfcp.values import BatchPlan, ClusterSpec, Group, MicrobatchPlan, SequenceSpec
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
    """Rank 0 holds 4 tokens (10 cells), rank 1 holds 2 (3 cells), rank 2 nothing."""
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


@settings(max_examples=30, deadline=None)
@given(batches(max_sequences=8, max_tokens=100), st.integers(1, 9))
def test_shares_of_cells_add_up_and_ratios_are_in_range(sequences: list[SequenceSpec], num_ranks: int) -> None:
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=100)
    plan = plan_batch(sequences, cluster=cluster, cost=UNIT)
    blocks = [block for microbatch in plan.microbatches for block in lay_out(microbatch, sequences).blocks]
    cells = sum(block_cells(block, sequences[block.sequence]) for block in blocks)
    assert cells == sum(sequence.attention_cells for sequence in sequences)
    found = imbalance(plan, sequences, cost=UNIT)
    assert all(0 <= each < 1 for each in (found.compute, found.attention, found.memory, found.communication))
