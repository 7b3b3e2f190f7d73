"""Constraints of host trainers: kept by every plan, and the best plan that keeps them is found on tiny batches."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.config.constraints import PRESETS, UNCONSTRAINED, HostConstraints
from rayfcp.config.loading import parse_config
from rayfcp.config.models import PlanConfig
from rayfcp.plan import CostModel, hardware_profile, model_profile, plan_batch
from rayfcp.plan.constraints import broken_constraint
from rayfcp.values import ClusterSpec, InfeasiblePlanError, SequenceSpec
from rayfcp.verify import check_plan
from tests.cost.test_bound import best_plan_s
from tests.examples import examples
from tests.plan.helpers import UNIT, batch_of, batches, profiled

MEGATRON = PRESETS["megatron"]


def constraints() -> st.SearchStrategy[HostConstraints]:
    """Combinations of all kinds; degrees of two divide the ranks that tests use."""
    degrees = st.sampled_from(["any", "powers_of_two", (2,), (1, 2), (1, 3)])
    counts = st.sampled_from([(1, None), (2, None), (3, None), (1, 2), (2, 4)])
    return st.builds(
        lambda degrees, contiguous, all_ranks, count: HostConstraints(
            degrees=degrees,
            placement="nodes" if not contiguous else "contiguous" if degrees == "any" else "aligned",
            all_ranks=all_ranks,
            microbatch_multiple=count[0],
            num_microbatches=count[1],
        ),
        degrees,
        st.booleans(),
        st.booleans(),
        counts,
    )


def in_units(sequences: list[SequenceSpec], *, size: int) -> list[SequenceSpec]:
    """Each `size` sequences in a row are a unit."""
    return [replace(each, unit=each.id // size) for each in sequences]


@given(
    batches(max_sequences=24, max_tokens=90),
    st.integers(1, 12).map(lambda half: 2 * half),
    constraints(),
    st.sampled_from([1, 1, 2]),
    st.sampled_from(["joint", "bfd"]),
)
def test_every_plan_keeps_its_constraints(
    sequences: list[SequenceSpec], num_ranks: int, asked: HostConstraints, unit: int, packing: str
) -> None:
    sequences = in_units(sequences, size=unit) if unit > 1 else sequences
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=100)
    options = PlanConfig(constraints=asked, packing=packing)
    try:
        plan = plan_batch(sequences, cluster=cluster, cost=UNIT, options=options)
    except InfeasiblePlanError:
        return  # whether that is right: `test_tiny_batches_have_the_best_plan`
    assert broken_constraint(plan.microbatches, sequences, cluster=cluster, constraints=asked) is None
    check_plan(plan, sequences, cluster=cluster)
    assert plan.lower_bound_s <= plan.predicted_s * (1 + 1e-12)


@examples(30)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=4).map(batch_of),
    st.sampled_from([2, 3, 4, 6]),
    constraints(),
)
def test_tiny_batches_have_the_best_plan(sequences: list[SequenceSpec], num_ranks: int, asked: HostConstraints) -> None:
    cost = UNIT.with_coefficients(ranks_per_node=8)
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=60)
    least_s = best_plan_s(sequences, cluster, cost, constraints=asked)
    options = PlanConfig(constraints=asked)
    if least_s == float("inf"):
        with pytest.raises(InfeasiblePlanError):
            plan_batch(sequences, cluster=cluster, cost=cost, options=options)
        return
    plan = plan_batch(sequences, cluster=cluster, cost=cost, options=options)
    assert plan.lower_bound_s <= least_s * (1 + 1e-12)
    assert least_s * (1 - 1e-12) <= plan.predicted_s <= 1.05 * least_s


@pytest.mark.parametrize("num_ranks", [10, 14, 18, 20])
def test_numbers_of_ranks_that_are_no_powers_of_two(num_ranks: int) -> None:
    lengths = [32_000, 30_000, 9_000, *([2_000, 700, 300] * num_ranks)]
    sequences = batch_of(lengths)
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=8192)
    options = PlanConfig(constraints=MEGATRON)
    plan = plan_batch(sequences, cluster=cluster, cost=profiled(num_ranks), options=options)
    assert set(plan.degrees) <= {1, 2, 4, 8, num_ranks} - ({8} if num_ranks < 16 else set())
    assert plan.gap < 1.15


def test_constraints_hold_with_stages() -> None:
    sequences = batch_of([9_000, 5_000, *([2_000, 700, 300] * 12)])
    cluster = ClusterSpec(num_ranks=4, max_tokens_per_rank=8192, num_stages=2)
    cost = CostModel.from_profiles(
        model_profile("qwen3-1.7b"),
        hardware_profile("h100"),
        num_ranks=4,
        num_stages=2,
        bytes_per_element=2,
        reduce_every="step",
    )
    asked = MEGATRON.model_copy(update={"microbatch_multiple": 2})
    plan = plan_batch(sequences, cluster=cluster, cost=cost, options=PlanConfig(constraints=asked))
    assert plan.pipelines
    assert broken_constraint(plan.microbatches, sequences, cluster=cluster, constraints=asked) is None


def test_a_strategy_that_breaks_a_constraint_says_which() -> None:
    sequences = batch_of([50, 20, 7])
    cluster = ClusterSpec(num_ranks=4, max_tokens_per_rank=60)
    options = PlanConfig(constraints={"num_microbatches": 3})
    with pytest.raises(
        InfeasiblePlanError, match=r"ring does not keep plan.constraints: \d microbatch.* num_microbatches is 3"
    ):
        plan_batch(sequences, cluster=cluster, cost=UNIT, strategy="ring", options=options)
    plan = plan_batch(sequences, cluster=cluster, cost=UNIT, strategy="auto", options=options)
    assert len(plan.microbatches) == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("slime", r"plan\.constraints.*must be one of 'megatron'"),
        ({"placement": "aligned"}, r"plan\.constraints.*each divides the next"),
        ({"placement": "aligned", "degrees": [2, 3]}, r"plan\.constraints.*each divides the next"),
        ({"num_microbatches": 3, "microbatch_multiple": 2}, r"plan\.constraints.*multiple of microbatch_multiple 2"),
        ({"degrees": [0]}, r"plan\.constraints\.degrees"),
    ],
)
def test_wrong_constraints(given: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config({"data": {"paths": ["rows.jsonl"]}, "plan": {"constraints": given}})


@pytest.mark.parametrize(
    ("asked", "lengths", "message"),
    [
        ({"degrees": 3, "all_ranks": True}, [10, 10], "no groups can have all 4 ranks"),
        ({"degrees": 8}, [10], "no groups can have all 4 ranks|permits"),
        ({"degrees": 1}, [100], r"needs 2 ranks or more, plan\.constraints\.degrees permits \(1,\)"),
        ({"num_microbatches": 3}, [10, 10], "asks for 3 microbatches or more, the batch has 2 sequences"),
        ({"all_ranks": True, "degrees": [1]}, [10, 10], "no plan was found on 4 ranks"),
    ],
)
def test_constraints_that_nothing_keeps(asked: dict[str, object], lengths: list[int], message: str) -> None:
    cluster = ClusterSpec(num_ranks=4, max_tokens_per_rank=60)
    with pytest.raises(InfeasiblePlanError, match=message):
        plan_batch(batch_of(lengths), cluster=cluster, cost=UNIT, options=PlanConfig(constraints=asked))


def test_a_unit_that_all_ranks_cannot_hold() -> None:
    sequences = in_units(batch_of([100, 100, 60]), size=2)
    cluster = ClusterSpec(num_ranks=3, max_tokens_per_rank=60)
    with pytest.raises(InfeasiblePlanError, match="200 tokens needs 4 ranks or more, there are 3"):
        plan_batch(sequences, cluster=cluster, cost=UNIT)


def test_units_are_kept_without_constraints() -> None:
    """By flex-ring also on ranks of unequal speeds; a strategy that tears one is refused, and `auto` takes another."""
    sequences = in_units(batch_of([50, 10, 40, 20, 30, 30, 25, 5]), size=2)
    for speeds in ((), (1.0, 1.0, 0.5, 0.8)):
        cluster = ClusterSpec(num_ranks=4, max_tokens_per_rank=60, speed_of_rank=speeds)
        for strategy in ("flex-ring", "auto"):
            plan = plan_batch(sequences, cluster=cluster, cost=UNIT, strategy=strategy)
            assert broken_constraint(plan.microbatches, sequences, cluster=cluster, constraints=UNCONSTRAINED) is None
            check_plan(plan, sequences, cluster=cluster)
    with pytest.raises(InfeasiblePlanError, match=r"flexsp does not keep .*sequences of unit \d are in several groups"):
        plan_batch(sequences, cluster=cluster, cost=UNIT, strategy="flexsp")


def test_memory_bounds_groups_where_few_degrees_are_permitted() -> None:
    """Batches of so many tokens that microbatches are filled in turn, within the time of a degree that may not be."""
    rng = random.Random(0)
    sequences = batch_of([min(int(rng.lognormvariate(6.5, 1.2)) + 1, 4000) for _ in range(60)])
    cluster = ClusterSpec(num_ranks=4, max_tokens_per_rank=1024)
    plan = plan_batch(sequences, cluster=cluster, cost=profiled(4), options=PlanConfig(constraints=MEGATRON))
    check_plan(plan, sequences, cluster=cluster)
