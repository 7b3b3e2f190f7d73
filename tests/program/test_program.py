"""Lowering, text, and the validator: sound plans pass, mutated ones of every kind do not."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.plan import lay_out
from rayfcp.program import Backward, Forward, Payload, lower
from rayfcp.values import BatchPlan, Layout, Round, Transfer
from rayfcp.verify import check_plan, check_programs
from tests.examples import examples
from tests.program.changes import with_outlines
from tests.program.helpers import random_plan
from tests.program.mutations import PLAN_MUTATIONS, explicit


@examples(30)
@given(seed=st.integers(0, 10_000), num_ranks=st.integers(1, 7))
def test_plans_pass(seed: int, num_ranks: int) -> None:
    plan, sequences, cluster = random_plan(seed, num_ranks=num_ranks)
    check_plan(plan, sequences, cluster=cluster)


def test_every_rank_runs_the_same_passes() -> None:
    plan, sequences, _ = random_plan(3, num_ranks=5)
    programs = lower(plan, sequences)
    assert len({tuple(type(item).__name__ for item in program.instructions) for program in programs}) == 1
    last = [item for item in programs[0].instructions if isinstance(item, Backward)]
    assert [item.reduce for item in last] == [False] * (len(last) - 1) + [True]


@cache
def ring_plan() -> tuple[BatchPlan, list, object, Layout]:
    """A plan of several microbatches, the first with a ring of at least three ranks and two sequences."""
    for seed in range(1000):
        plan, sequences, cluster = random_plan(seed, num_ranks=4)
        layout = lay_out(plan.microbatches[0], sequences)
        large = len(layout.rounds) >= 2 and len(layout.rounds[0].transfers[0].blocks) >= 3
        if large and len(plan.microbatches) >= 2:
            return plan, sequences, cluster, layout
    raise AssertionError("no plan with a ring")


@pytest.mark.parametrize("name", PLAN_MUTATIONS)
def test_validator_rejects_mutated_plans(name: str) -> None:
    plan, sequences, cluster, layout = ring_plan()
    check_plan(explicit(plan, layout), sequences, cluster=cluster)
    with pytest.raises(ValueError):
        check_plan(PLAN_MUTATIONS[name](plan, layout), sequences, cluster=cluster)


def test_validator_rejects_too_little_memory() -> None:
    plan, sequences, cluster, _ = ring_plan()
    with pytest.raises(ValueError, match="max_tokens_per_rank"):
        check_plan(plan, sequences, cluster=replace(cluster, max_tokens_per_rank=3))


def test_passes_of_different_microbatches_may_interleave() -> None:
    plan, sequences, _, _ = ring_plan()
    ahead = with_outlines(
        lower(plan, sequences),
        lambda outlines: [
            replace(each, instructions=tuple(sorted(each.instructions, key=lambda item: isinstance(item, Backward))))
            for each in outlines
        ],
    )
    check_programs(ahead, sequences)


@examples(30)
@given(seed=st.integers(0, 10_000), num_ranks=st.integers(2, 6))
def test_gradients_of_rings_travel_in_matchings(seed: int, num_ranks: int) -> None:
    plan, sequences, _ = random_plan(seed, num_ranks=num_ranks)
    for program in lower(plan, sequences):
        for item in program.instructions:
            for step in item.attention.backward if isinstance(item, Forward) else ():
                for messages in (step.sends, step.receives):
                    assert sum(message.payload is Payload.GRAD for message in messages) <= 1


def test_transfer_of_blocks_that_the_source_lacks_is_named() -> None:
    plan, sequences, _, layout = ring_plan()
    owner = layout.blocks[0].rank
    wrong = Transfer(blocks=(0,), source=(owner + 1) % 4, target=owner)
    with pytest.raises(ValueError, match="does not hold them"):
        lower(explicit(plan, replace(layout, rounds=(Round(transfers=(wrong,)),))), sequences)


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"blocks": ()}, "blocks is empty"), ({"target": 1}, "two ranks of"), ({"source": 4}, "two ranks of")],
)
def test_transfers_without_blocks_or_between_no_two_ranks_are_named(changes: dict, named: str) -> None:
    plan, sequences, _, layout = ring_plan()
    wrong = replace(Transfer(blocks=(0,), source=1, target=0), **changes)
    with pytest.raises(ValueError, match=named):
        lower(explicit(plan, replace(layout, rounds=(Round(transfers=(wrong,)),))), sequences)
