"""Ulysses groups: lowered, exchanged, and proved like rings; mutated programs are found."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.plan import lay_out
from rayfcp.program import (
    Attend,
    AttentionProgram,
    Forward,
    HeadProgram,
    RankProgram,
    check_progress,
    head_rounds,
    lower,
    to_text,
)
from rayfcp.values import BatchPlan, Group, Primitive, Round, SequenceSpec, Transfer
from rayfcp.verify import check_plan, check_programs
from tests.examples import examples
from tests.program.helpers import heads_of, one_group, random_plan, with_primitives
from tests.program.mutations import explicit
from tests.program.random_changes import mutate

Programs = Sequence[RankProgram]


@cache
def both(seed: int) -> tuple[BatchPlan, list[SequenceSpec], Programs]:
    """A plan whose first microbatch has a Ulysses group of three ranks or more; rings elsewhere."""
    for at in range(seed, seed + 1000):
        plan, sequences, _ = random_plan(at, num_ranks=5)
        plan = with_primitives(plan, at)
        programs = lower(plan, sequences)
        if any(item.microbatch == 0 and head.degree >= 3 for _, item, head in heads_of(programs)):
            return plan, sequences, programs
    raise AssertionError("no plan with a Ulysses group")


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
        head_rounds(head, rank=2, backward=False)


HeadMutation = Callable[[HeadProgram], HeadProgram]
AttendsMutation = Callable[[Sequence[Attend]], Sequence[Attend]]


def with_attends(head: HeadProgram, change: AttendsMutation) -> HeadProgram:
    """The same change of what is attended to first, in either direction."""
    forward, backward = (
        (replace(rounds[0], attends=change(tuple(rounds[0].attends))), *rounds[1:])
        for rounds in (head.attention.forward, head.attention.backward)
    )
    return replace(head, attention=replace(head.attention, forward=forward, backward=backward))


HEAD_MUTATIONS: dict[str, HeadMutation] = {
    "ranks in another order": lambda head: replace(head, ranks=head.ranks[1:] + head.ranks[:1]),
    "ranks and tokens in another order": lambda head: replace(head, ranks=head.ranks[::-1], tokens=head.tokens[::-1]),
    "a rank too few": lambda head: replace(head, ranks=head.ranks[:-1], tokens=head.tokens[:-1]),
    "a rank twice": lambda head: replace(head, ranks=(*head.ranks, head.ranks[0]), tokens=(*head.tokens, 1)),
    "a rank that is not there": lambda head: replace(head, ranks=(*head.ranks, 99), tokens=(*head.tokens, 1)),
    "a rank below zero": lambda head: replace(head, ranks=(*head.ranks, -1), tokens=(*head.tokens, 1)),
    "tokens of a rank too few": lambda head: replace(head, tokens=head.tokens[:-1]),
    "a token moved to the next": lambda head: replace(
        head, tokens=(head.tokens[0] - 1, head.tokens[1] + 1, *head.tokens[2:])
    ),
    "a token more of each": lambda head: replace(head, tokens=tuple(each + 1 for each in head.tokens)),
    "no tokens at the end": lambda head: replace(head, tokens=(*head.tokens[:-1], 0)),
    "a token more to attend to": lambda head: replace(
        head, attention=replace(head.attention, num_tokens=head.attention.num_tokens + 1)
    ),
    "an attend lost": lambda head: with_attends(head, lambda attends: attends[1:]),
    "no attends": lambda head: with_attends(head, lambda _: ()),
    "an attend twice": lambda head: with_attends(head, lambda attends: (*attends, attends[0])),
    "the other mask": lambda head: with_attends(
        head, lambda attends: (replace(attends[0], causal=not attends[0].causal), *attends[1:])
    ),
    "another slot": lambda head: with_attends(head, lambda attends: (replace(attends[0], slot=1), *attends[1:])),
    "beyond the tokens": lambda head: with_attends(
        head, lambda attends: (*attends, replace(attends[0], query=(0, 10**6), key=(0, 10**6)))
    ),
    "across sequences": lambda head: with_attends(
        head, lambda attends: (*attends, replace(attends[0], query=attends[-1].query, causal=False))
    ),
    "no backward": lambda head: replace(head, attention=replace(head.attention, backward=())),
    "a backward of other attends": lambda head: replace(
        head,
        attention=replace(head.attention, forward=with_attends(head, lambda attends: attends[1:]).attention.forward),
    ),
}


def _changed(programs: Programs, change: HeadMutation, *, ranks: Sequence[int]) -> Programs:
    """The first microbatch's programs of heads changed on some ranks."""
    found = list(programs)
    for rank in ranks:
        items = tuple(
            replace(item, attention=change(item.attention))
            if isinstance(item, Forward) and item.microbatch == 0 and isinstance(item.attention, HeadProgram)
            else item
            for item in programs[rank].instructions
        )
        found[rank] = replace(programs[rank], instructions=items)
    return found


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("name", HEAD_MUTATIONS)
def test_validator_rejects_mutated_heads(name: str, everywhere: bool) -> None:
    plan, sequences = one_group([17, 5, 9], (3, 0, 1))
    programs = lower(plan, sequences)
    check_programs(programs, sequences)
    mutated = _changed(programs, HEAD_MUTATIONS[name], ranks=(3, 0, 1) if everywhere else (0,))
    assert list(mutated) != list(programs)
    with pytest.raises(ValueError):
        check_programs(mutated, sequences)


def test_peers_that_disagree_on_tokens_would_not_match() -> None:
    """Found before anything is looked at but messages: what one sends is not what the other expects."""
    plan, sequences = one_group([17, 5, 9], (3, 0, 1))
    programs = lower(plan, sequences)
    check_progress(programs)

    def fewer(head: HeadProgram) -> HeadProgram:
        tokens = (*head.tokens[:2], 1)
        return replace(head, tokens=tokens, attention=replace(head.attention, num_tokens=sum(tokens)))

    with pytest.raises(ValueError, match="sends out of 1 tokens where rank 1 expects out of 10"):
        check_progress(_changed(programs, fewer, ranks=(0,)))


@pytest.mark.parametrize("changes", [{"recomputed_layers": 0}, {"keeps_attention": True}])
def test_a_peer_that_recomputes_less_is_found(changes: dict[str, int]) -> None:
    plan, sequences = one_group([17, 5, 9], (3, 0, 1))
    programs = list(lower(plan, sequences))
    items = [replace(item, **changes) if isinstance(item, Forward) else item for item in programs[0].instructions]
    programs[0] = replace(programs[0], instructions=tuple(items))
    with pytest.raises(ValueError, match="must be the same on all ranks of a stage"):
        check_progress(programs)


@examples(60)
@given(seed=st.integers(0, 10**6))
def test_validator_rejects_programs_with_one_thing_changed(seed: int) -> None:
    """Any label, instruction, rank, token count, attend or piece dropped, doubled or changed, anywhere, is found."""
    rng = random.Random(seed)
    _, sequences, programs = both(seed % 50)
    check_programs(programs, sequences)
    rank = rng.randrange(len(programs))
    mutated = mutate(programs[rank], rng)
    if mutated == programs[rank]:
        return
    with pytest.raises(ValueError):
        check_programs([*programs[:rank], mutated, *programs[rank + 1 :]], sequences)
