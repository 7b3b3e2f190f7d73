"""`auto`: the fastest plan of all strategies, and mixtures of microbatches."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.bench.reprice import reprice
from rayfcp.config.models import PlanConfig
from rayfcp.plan import CostModel, hardware_profile, model_profile, plan_batch, strategy_names
from rayfcp.plan.auto import MIXED
from rayfcp.plan.batch import plan_candidates
from rayfcp.values import ClusterSpec, InfeasiblePlanError, SequenceSpec
from rayfcp.verify import check_plan
from tests.examples import examples
from tests.plan.helpers import UNIT, batch_of, batches

BOTH = PlanConfig(primitives=("ring", "ulysses"), search_moves=2000)
ALL = BOTH.model_copy(update={"auto_candidates": 16})
SINGLE = [name for name in strategy_names() if name != "auto"]
MIXES = (ClusterSpec(num_ranks=4, max_tokens_per_rank=96), batch_of([20, 190, 267, 191, 191, 296, 126, 29]))


def singles(sequences: list[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel) -> dict[str, float]:
    """Predicted seconds of every strategy that has a plan."""
    found = {}
    for name in SINGLE:
        try:
            plan = plan_batch(sequences, cluster=cluster, cost=cost, strategy=name, options=BOTH)
        except InfeasiblePlanError:
            continue
        found[name] = plan.predicted_s
    return found


@examples(8)
@given(batches(max_sequences=10, max_tokens=300), st.integers(1, 9), st.integers(1, 400))
def test_never_slower_than_one_strategy(sequences: list[SequenceSpec], num_ranks: int, room: int) -> None:
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=room)
    alone = singles(sequences, cluster=cluster, cost=UNIT)
    if not alone:
        with pytest.raises(InfeasiblePlanError, match=r"no strategy has a plan for this batch: sequence \d+ has"):
            plan_batch(sequences, cluster=cluster, cost=UNIT, strategy="auto", options=BOTH)
        return
    plan = plan_batch(sequences, cluster=cluster, cost=UNIT, strategy="auto", options=BOTH)
    assert plan.strategy in {*SINGLE, MIXED}
    assert plan.predicted_s <= min(alone.values())
    check_plan(plan, sequences, cluster=cluster)
    assert plan == plan_batch(sequences, cluster=cluster, cost=UNIT, strategy="auto", options=BOTH)


@examples(2)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=8), st.integers(1, 4), st.integers(2, 3))
def test_never_slower_than_one_strategy_with_stages(lengths: list[int], num_ranks: int, num_stages: int) -> None:
    sequences, cost = batch_of(lengths), staged(num_ranks, num_stages)
    cluster = ClusterSpec(num_ranks=num_ranks, num_stages=num_stages, max_tokens_per_rank=2048)
    alone = singles(sequences, cluster=cluster, cost=cost)
    plan = plan_batch(sequences, cluster=cluster, cost=cost, strategy="auto", options=BOTH)
    assert plan.predicted_s <= min(alone.values()) and plan.num_stages == num_stages
    check_plan(plan, sequences, cluster=cluster, cost=cost)


@examples(6)
@given(batches(max_sequences=12, max_tokens=200), st.integers(2, 6), st.integers(60, 150))
def test_mixtures_are_whole_plans(sequences: list[SequenceSpec], num_ranks: int, room: int) -> None:
    """Every token once and every pair once, by the validator; seconds are those of the cost model."""
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=room)
    if max(each.num_tokens for each in sequences) > num_ranks * room:
        return
    plans = plan_candidates(sequences, cluster=cluster, cost=UNIT, options=ALL)
    assert [each.predicted_s for each in plans] == sorted(each.predicted_s for each in plans)
    assert len({each.strategy for each in plans}) == len(plans)
    for plan in [each for each in plans if each.strategy == MIXED]:
        check_plan(plan, sequences, cluster=cluster)
        again = reprice(plan, sequences, cluster=cluster, cost=UNIT)
        assert again.predicted_s == pytest.approx(plan.predicted_s, rel=1e-9)


def test_groups_and_blocks_in_one_plan() -> None:
    """Long sequences share all ranks as blocks, equal short ones stay whole."""
    cluster, sequences = MIXES
    plans = {each.strategy: each for each in plan_candidates(sequences, cluster=cluster, cost=UNIT, options=ALL)}
    mixed = plans[MIXED]
    assert {each.layout is None for each in mixed.microbatches} == {True, False}
    assert mixed.predicted_s < min(plans[name].predicted_s for name in ("flex-ring", "flex-block"))
    check_plan(mixed, sequences, cluster=cluster)


def test_infeasible_everywhere_names_what_binds() -> None:
    """Memory, and where heads are all that is short, these."""
    with pytest.raises(InfeasiblePlanError, match="sequence 1 has 90 tokens, 2 ranks hold at most 80 "):
        auto([9, 90], num_ranks=2, room=40, options=BOTH)
    exchanged = BOTH.model_copy(update={"primitives": ("ulysses",)})
    headless = dataclasses.replace(UNIT, num_heads=3, num_kv_heads=3)
    with pytest.raises(InfeasiblePlanError, match=r"ranks that share out heads .*; add ring to plan.primitives"):
        auto([70], num_ranks=2, room=40, options=exchanged, cost=headless)


def test_with_stages_the_constraint_is_that_of_slices() -> None:
    cost = staged(2, 2, memory_bytes=16 << 30)
    with pytest.raises(InfeasiblePlanError, match=r"no strategy has a plan for this batch: .*GiB"):
        auto([3_000_000], num_ranks=2, num_stages=2, room=1 << 22, cost=cost)


def test_the_plan_says_why() -> None:
    plan = auto([30, 20, 20, 9, 1], num_ranks=3, room=40, options=BOTH)
    assert plan.reason.startswith(f"Auto took {plan.strategy} (predicted {plan.predicted_s:.4g} s; ")
    assert plan.reason.count(". ") == 0 and plan.reason.endswith("above the lower bound.")


def auto(
    lengths: list[int],
    *,
    num_ranks: int,
    room: int,
    num_stages: int = 1,
    options: PlanConfig = BOTH,
    cost: CostModel = UNIT,
):
    cluster = ClusterSpec(num_ranks=num_ranks, num_stages=num_stages, max_tokens_per_rank=room)
    return plan_batch(batch_of(lengths), cluster=cluster, cost=cost, strategy="auto", options=options)


def staged(num_ranks: int, num_stages: int, *, memory_bytes: int = 80 << 30) -> CostModel:
    return CostModel.from_profiles(
        model_profile("qwen3-1.7b"),
        hardware_profile("h100"),
        num_ranks=num_ranks,
        num_stages=num_stages,
        memory_bytes=memory_bytes,
        bytes_per_element=2,
        reduce_every="step",
    )
