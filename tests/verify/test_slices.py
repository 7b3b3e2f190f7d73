"""Slices over microbatches: sound plans pass, counted pair by pair, and changed plans and programs do not."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.program import lower
from rayfcp.values import BatchPlan, PipelinePlan, Primitive, Slice
from rayfcp.verify import check_plan, check_programs
from tests.examples import examples
from tests.program.changes import assert_proved
from tests.program.helpers import cluster_of
from tests.program.pipelines import actions, random_pipelines, sliced_over_runs, split_split_hybrid


@examples(20)
@given(seed=st.integers(0, 10_000), num_stages=st.integers(1, 3), num_ranks=st.integers(1, 6))
def test_random_slices_pass_counted_one_by_one(seed: int, num_stages: int, num_ranks: int) -> None:
    plan, sequences = random_pipelines(seed, num_stages=num_stages, num_ranks=num_ranks)
    check_plan(plan, sequences, cluster=cluster_of(plan))
    if sequences:
        assert_proved(plan, sequences, seed=seed)


@examples(30)
@given(seed=st.integers(0, 10_000), num_runs=st.integers(1, 3), heads=st.integers(2, 3))
def test_slices_over_runs_that_share_out_heads(seed: int, num_runs: int, heads: int) -> None:
    plan, sequences = sliced_over_runs(seed, num_runs=num_runs, heads=heads)
    check_plan(plan, sequences, cluster=cluster_of(plan))
    assert_proved(plan, sequences, seed=seed)


PlanChange = Callable[[BatchPlan], BatchPlan]


def cut(number: int, *slices: Slice) -> PlanChange:
    """The slices of a microbatch."""
    return lambda plan: replace(
        plan,
        microbatches=tuple(
            replace(each, slices=slices) if at == number else each for at, each in enumerate(plan.microbatches)
        ),
    )


def group(number: int, **changes: object) -> PlanChange:
    """The only group of a microbatch."""
    return lambda plan: replace(
        plan,
        microbatches=tuple(
            replace(each, groups=(replace(each.groups[0], **changes),)) if at == number else each  # type: ignore[arg-type]
            for at, each in enumerate(plan.microbatches)
        ),
    )


def only(**changes: object) -> PlanChange:
    """The only pipeline."""
    return lambda plan: replace(plan, pipelines=(replace(plan.pipelines[0], **changes),))  # type: ignore[arg-type]


def two(plan: BatchPlan) -> BatchPlan:
    """The last microbatch in a pipeline of its own."""
    first, last = actions("F0 F1 B1 B0"), actions("F2 B2")
    return replace(
        plan,
        pipelines=(
            PipelinePlan(start=0, stop=2, actions=(first,) * 2, recomputed_layers=((0, 0),) * 2, predicted_s=2.0),
            PipelinePlan(start=2, stop=3, actions=(last,) * 2, recomputed_layers=((0,),) * 2, predicted_s=1.0),
        ),
    )


PLAN_CHANGES: dict[str, tuple[PlanChange, str]] = {
    "a slice lost": (cut(1), "names 0, which"),
    "a slice too short": (cut(1, Slice(sequence=0, start=8, stop=13)), r"piece \[14, 1[57]\) where token 13 is due"),
    "a slice too long": (cut(2, Slice(sequence=0, start=14, stop=18)), "18 of 17 tokens are placed"),
    "a slice twice in a microbatch": (
        cut(1, Slice(sequence=0, start=8, stop=11), Slice(sequence=0, start=11, stop=14)),
        "where token 8 is due",
    ),
    "an empty slice": (cut(1, Slice(sequence=0, start=8, stop=8)), "where token 8 is due"),
    "slices that change places": (
        lambda plan: cut(0, *plan.microbatches[1].slices)(cut(1, *plan.microbatches[0].slices)(plan)),
        r"queries \[8, 1[0-9]\) of sequence 0 must attend to each key that they see once",
    ),
    "a slice of a sequence of no group": (cut(0, Slice(sequence=1, start=0, stop=8)), "each token is placed once"),
    "a slice of a sequence that is not there": (
        lambda plan: group(0, sequences=(7,))(cut(0, Slice(sequence=7, start=0, stop=8))(plan)),
        "the batch does not have",
    ),
    "a slice on other ranks": (
        group(1, ranks=(0,)),
        "must attend to each key|must be what later microbatches read|keep a sequence's slices",
    ),
    "a slice with another primitive": (
        lambda plan: group(
            1, primitive=next(p for p in Primitive if p is not plan.microbatches[1].groups[0].primitive)
        )(plan),
        "on the same ranks, with the same primitive",
    ),
    "a slice in another pipeline": (two, "lacks the gradients"),
    "stages without pipelines": (lambda plan: replace(plan, pipelines=()), "of 1 stages, the cluster has 2"),
    "a pipeline that begins later": (only(start=1), r"must begin at 0"),
    "a microbatch of no pipeline": (
        lambda plan: replace(plan, pipelines=two(plan).pipelines[:1]),
        "pipelines hold 2 microbatches, must hold all 3",
    ),
    "a stage without actions": (
        only(actions=(actions("F0 F1 F2 B2 B1 B0"),)),
        "actions has 1 stages|stages, the cluster",
    ),
    "a forward pass lost": (only(actions=(actions("F0 F1 B2 B1 B0"),) * 2), "once forward"),
    "forward passes out of order": (only(actions=(actions("F1 F0 F2 B2 B1 B0"),) * 2), "Load names microbatches"),
    "a backward pass twice": (only(actions=(actions("F0 F1 F2 B2 B1 B0 B0"),) * 2), "once backward"),
    "a backward pass before its forward": (
        only(actions=(actions("F0 F1 B2 F2 B1 B0"),) * 2),
        r"instructions are \['Receive .*', 'Backward', 'Load'",
    ),
    "stages that disagree on backward": (
        only(actions=(actions("F0 F1 F2 B2 B1 B0"), actions("F0 F1 F2 B1 B2 B0"))),
        "must be that of stage 0",
    ),
    "a slice before the one that reads it": (only(actions=(actions("F0 F1 F2 B1 B2 B0"),) * 2), "lacks the gradients"),
    "recomputed layers of too few microbatches": (only(recomputed_layers=((0, 0),) * 2), "one for each of its 3"),
    "recomputed layers of one stage": (only(recomputed_layers=((0, 0, 0),)), "recomputed_layers has 1 stages"),
    "more recomputed layers than there are": (only(recomputed_layers=((0, 0, 0), (0, 9, 0))), r"in \[0, 2\]"),
    "recomputed layers of the whole plan": (lambda plan: replace(plan, recomputed_layers=1), "must be 0 beside"),
    "a pipeline in no time": (only(predicted_s=0.0), "above 0"),
    "a prediction that is not the pipelines'": (only(predicted_s=4.0), "must be the sum over pipelines, 4"),
}


@pytest.mark.parametrize("primitive", Primitive)
@pytest.mark.parametrize("name", PLAN_CHANGES)
def test_changed_plans_are_refused(name: str, primitive: Primitive) -> None:
    plan, sequences = split_split_hybrid(primitive)
    cluster = cluster_of(plan, layers_of_stage=(2, 2))
    check_plan(plan, sequences, cluster=cluster)
    change, named = PLAN_CHANGES[name]
    with pytest.raises(ValueError, match=named):
        check_plan(change(plan), sequences, cluster=cluster)


def test_slices_without_pipelines_are_refused() -> None:
    plan, sequences = split_split_hybrid(Primitive.RING, num_stages=1)
    check_plan(plan, sequences, cluster=cluster_of(plan))
    with pytest.raises(ValueError, match="lacks the gradients of its keys and values"):
        check_plan(replace(plan, pipelines=()), sequences, cluster=cluster_of(plan))


def test_pipelines_of_other_stages_than_the_clusters_are_refused() -> None:
    plan, sequences = split_split_hybrid(Primitive.RING)
    with pytest.raises(ValueError, match="pipelines of 2 stages, the cluster has 3"):
        check_plan(plan, sequences, cluster=cluster_of(plan, num_stages=3))


def test_context_with_other_heads_is_refused() -> None:
    """Rank 0 has the second share of the heads in ranks (1, 0), the first in (0, 1)."""
    plan, sequences = split_split_hybrid(Primitive.ULYSSES)
    with pytest.raises(ValueError, match="keep a sequence's slices in groups of the same ranks"):
        check_programs(lower(group(0, ranks=(1, 0))(plan), sequences), sequences)
    with pytest.raises(ValueError, match="keep a sequence's slices in groups of the same ranks"):
        check_plan(group(1, ranks=(1, 0))(plan), sequences, cluster=cluster_of(plan))
