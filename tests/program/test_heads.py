"""Ulysses groups: lowered, exchanged, and proved like rings."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.plan import lay_out
from rayfcp.program import AttentionProgram, Forward, Payload, exchange_rounds, lower, to_text
from rayfcp.values import Group, Primitive, Round, Transfer
from rayfcp.verify import check_plan, check_programs
from tests.examples import examples
from tests.program.helpers import heads_of, one_group, random_plan, with_primitives
from tests.program.mutations import explicit


@examples(40)
@given(seed=st.integers(0, 10_000), num_ranks=st.integers(1, 7))
def test_plans_of_both_primitives_pass_and_survive_text(seed: int, num_ranks: int) -> None:
    plan, sequences, cluster = random_plan(seed, num_ranks=num_ranks)
    plan = with_primitives(plan, seed)
    check_plan(plan, sequences, cluster=cluster)
    programs = lower(plan, sequences)
    due = {
        (number, rank)
        for number, microbatch in enumerate(plan.microbatches)
        for group in microbatch.groups
        for rank in group.ranks
        if group.primitive is Primitive.ULYSSES and group.degree > 1
    }
    assert {(item.microbatch, rank) for rank, item, _ in heads_of(programs)} == due


def test_what_a_program_of_heads_prints() -> None:
    plan, sequences = one_group([5, 4], (2, 0))
    text = to_text(lower(plan, sequences)[0])
    assert text.splitlines()[1:] == [
        "load 0 1[0:4]",
        "forward 0 tokens=4 recompute=1 heads=2:5,0:4",
        "  * 0:5@0[0:5]c * 5:9@0[5:9]c",
        "~",
        "  * 0:5@0[0:5]c * 5:9@0[5:9]c",
        "backward 0 reduce",
    ]


def test_a_group_of_one_rank_is_a_ring_of_one_rank() -> None:
    plan, sequences = one_group([5, 4], (1,))
    ring = replace(plan.microbatches[0], groups=(Group(ranks=(1,), sequences=(0, 1)),))
    found = [item.attention for item in lower(plan, sequences)[1].instructions if isinstance(item, Forward)]
    due = lower(replace(plan, microbatches=(ring,)), sequences)[1].instructions[1]
    assert isinstance(due, Forward) and found == [due.attention] and isinstance(found[0], AttentionProgram)


def test_transfers_of_a_ulysses_group_are_refused() -> None:
    plan, sequences = one_group([5, 4], (0, 1))
    layout = lay_out(plan.microbatches[0], sequences)
    check_programs(lower(explicit(plan, layout), sequences), sequences)
    travels = replace(layout, rounds=(Round(transfers=(Transfer(blocks=(0,), source=0, target=1),)),))
    with pytest.raises(ValueError, match=r"touches ranks \[0, 1\] of a ulysses group"):
        lower(explicit(plan, travels), sequences)


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_ranks_without_tokens_pad(num_tokens: int) -> None:
    plan, sequences = one_group([num_tokens], (0, 1, 2, 3))
    programs = lower(plan, sequences)
    check_programs(programs, sequences)
    heads = [head for _, _, head in heads_of(programs)]
    assert all(head.tokens == (1, 1, 1, 1) for head in heads)
    pairs = num_tokens * (num_tokens + 1) // 2 + 4 - num_tokens
    assert sum(head.num_pairs for head in heads) == pytest.approx(pairs)


def test_a_rank_of_another_group_is_named() -> None:
    plan, sequences = one_group([5, 4], (0, 1))
    _, _, head = heads_of(lower(plan, sequences))[0]
    with pytest.raises(ValueError, match="rank is 2, must be one of the group's"):
        exchange_rounds(head, rank=2, payload=Payload.QKV)
