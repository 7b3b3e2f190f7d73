"""Layouts whose blocks lie anywhere: lowered, proved, and held against a count cell by cell."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfcp.program import AttentionProgram, Forward, Load, Payload, RankProgram, check_plan, check_programs, lower
from rayfcp.values import Layout, Mask, SequenceSpec
from tests.masks import sees
from tests.program.helpers import assert_one_change_is_found, random_plan, scattered
from tests.program.mutations import explicit

Token = tuple[int, int]


def counted(programs: Sequence[RankProgram], microbatch: int) -> Counter[tuple[Token, Token]]:
    """How often each (query, key) pair of tokens is computed forward, one by one; padding left out."""
    loads = [item for each in programs for item in each.instructions if isinstance(item, Load)]
    loads = [load for load in loads if load.microbatch == microbatch]
    passes = [item for each in programs for item in each.instructions if isinstance(item, Forward)]
    parts = [item.attention for item in passes if item.microbatch == microbatch]
    slots: list[dict[int, list[Token]]] = [
        {0: [(piece.sequence, at) for piece in load.pieces for at in range(piece.start, piece.stop)]} for load in loads
    ]
    found: Counter[tuple[Token, Token]] = Counter()
    for index in range(max(len(part.forward) for part in parts if isinstance(part, AttentionProgram))):
        brought = []
        for rank, part in enumerate(parts):
            assert isinstance(part, AttentionProgram)
            step = part.forward[index] if index < len(part.forward) else None
            for attend in step.attends if step and loads[rank].pieces else ():
                queries, keys = slots[rank][0][slice(*attend.query)], slots[rank][attend.slot][slice(*attend.key)]
                found.update(
                    (query, key)
                    for i, query in enumerate(queries)
                    for j, key in enumerate(keys)
                    if not attend.causal or (j >= i if attend.flipped else j <= i)
                )
            for sent in step.sends if step else ():
                assert sent.payload is Payload.KV
                tokens = [token for span in sent.ranges for token in slots[rank][sent.slot][slice(*span)]]
                brought.append((rank, sent.peer, tokens))
        for source, target, tokens in brought:
            received = next(each for each in parts[target].forward[index].receives if each.peer == source)
            slots[target][received.slot] = tokens
    return found


def due(sequences: Sequence[SequenceSpec], members: set[int], *, window: int = 0) -> Counter[tuple[Token, Token]]:
    """Each cell of each mask once, in layers with this window (0: none)."""
    return Counter(
        ((each.id, query), (each.id, key))
        for each in sequences
        if each.id in members
        for query in range(each.num_tokens)
        for key in range(each.num_tokens)
        if sees(each, query, key, window=window)
    )


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), num_ranks=st.integers(1, 6), place_freely=st.booleans())
def test_every_cell_is_computed_once_counted_one_by_one(seed: int, num_ranks: int, place_freely: bool) -> None:
    plan, sequences, _ = random_plan(seed, num_ranks=num_ranks)
    sequences = [replace(each, num_tokens=1 + each.num_tokens % 40) for each in sequences]
    plan = scattered(plan, sequences, seed=seed) if place_freely else plan
    programs = lower(plan, sequences)
    check_programs(programs, sequences)
    members = {sequence for group in plan.microbatches[0].groups for sequence in group.sequences}
    assert counted(programs, 0) == due(sequences, members)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), num_ranks=st.integers(2, 6))
def test_blocks_anywhere_sent_by_their_owners_pass(seed: int, num_ranks: int) -> None:
    plan, sequences, cluster = random_plan(seed, num_ranks=num_ranks)
    bound = sum(sequence.num_tokens for sequence in sequences)
    check_plan(scattered(plan, sequences, seed=seed), sequences, cluster=replace(cluster, max_tokens_per_rank=bound))


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_one_thing_changed_is_found(seed: int) -> None:
    plan, sequences, _ = random_plan(seed % 100, num_ranks=4)
    programs = list(lower(scattered(plan, sequences, seed=seed % 100), sequences))
    assert_one_change_is_found(programs, sequences, seed=seed)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_layouts_with_a_block_left_out_of_a_transfer_are_found(seed: int) -> None:
    """A missing key is found unless nobody there needed it."""
    plan, sequences, _ = random_plan(seed, num_ranks=4)
    plan = scattered(plan, sequences, seed=seed)
    layout = plan.microbatches[0].layout
    assert layout is not None
    rng = random.Random(seed)
    rounds = [step for step in layout.rounds if step.transfers]
    if not rounds:
        return
    step = rng.choice(rounds)
    transfer = rng.choice(step.transfers)
    block = layout.blocks[rng.choice(transfer.blocks)]
    kept = tuple(each for each in transfer.blocks if layout.blocks[each] != block)
    others = [each for each in step.transfers if each != transfer]
    changed = replace(step, transfers=(*others, *([replace(transfer, blocks=kept)] if kept else [])))
    thinner = Layout(blocks=layout.blocks, rounds=tuple(changed if each is step else each for each in layout.rounds))
    programs = lower(explicit(plan, thinner), sequences)
    full = sequences[block.sequence].mask is Mask.FULL
    asked = [each for each in layout.blocks if (each.rank, each.sequence) == (transfer.target, block.sequence)]
    if full or any(each.start >= block.stop for each in asked):
        with pytest.raises(ValueError, match="computed 0 times"):
            check_programs(programs, sequences)
    else:
        check_programs(programs, sequences)
