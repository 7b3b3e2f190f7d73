import itertools
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.plan import lay_out
from rayfcp.plan.layout import zigzag
from rayfcp.values import Block, Group, Layout, MicrobatchPlan, Primitive, Round, SequenceSpec
from tests.plan.helpers import batch_of


@st.composite
def microbatches(draw: st.DrawFn) -> tuple[MicrobatchPlan, list[SequenceSpec]]:
    """Groups of any degree on shuffled ranks, each with some sequences of any length."""
    degrees = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    lengths = draw(
        st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=5), min_size=len(degrees), max_size=len(degrees))
    )
    ranks = draw(st.permutations(range(sum(degrees))))
    groups, first_rank, first_id = [], 0, 0
    for degree, held in zip(degrees, lengths, strict=True):
        groups.append(
            Group(
                ranks=tuple(ranks[first_rank : first_rank + degree]),
                sequences=tuple(range(first_id, first_id + len(held))),
            )
        )
        first_rank, first_id = first_rank + degree, first_id + len(held)
    plan = MicrobatchPlan(groups=tuple(groups), group_s=(1.0,) * len(groups), predicted_s=1.0)
    return plan, batch_of([length for held in lengths for length in held])


@given(st.integers(1, 100), st.integers(1, 9), st.integers(0, 17))
def test_slices_are_level_and_mirrored(num_tokens: int, degree: int, before: int) -> None:
    """The second sequence of a group, whose first one leaves the round at any place."""
    lengths, group = np.array([2 * degree + before, num_tokens]), np.zeros(2, np.int64)
    columns = zigzag(lengths, degree=np.full(2, degree), group=group)
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(degree)]
    for sequence, position, start, stop in zip(*(each.tolist() for each in columns), strict=True):
        if sequence == 1:
            ranges[position].append((start, stop))
    flat = sorted(piece for held in ranges for piece in held)
    assert flat[0][0] == 0 and flat[-1][1] == num_tokens
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(flat))
    assert all(start < stop for start, stop in flat)
    if num_tokens >= 2 * degree:  # no empty slice: early halves ascend with the position, late halves descend
        firsts = [held[0][0] for held in ranges]
        lasts = [held[-1][1] for held in ranges]
        assert firsts == sorted(firsts) and lasts == sorted(lasts, reverse=True)
        assert len(ranges[-1]) == 1


@given(microbatches())
def test_each_token_is_placed_once_and_ranks_are_level(case: tuple[MicrobatchPlan, list[SequenceSpec]]) -> None:
    plan, sequences = case
    layout = lay_out(plan, sequences)
    placed = Counter((block.sequence, at) for block in layout.blocks for at in range(block.start, block.stop))
    assert placed == Counter((sequence.id, at) for sequence in sequences for at in range(sequence.num_tokens))
    held = Counter({block.rank: 0 for block in layout.blocks})
    for block in layout.blocks:
        held[block.rank] += block.num_tokens
    for group in plan.groups:
        counts = [held[rank] for rank in group.ranks]
        assert max(counts) - min(counts) <= 1


@given(microbatches())
def test_blocks_are_ordered(case: tuple[MicrobatchPlan, list[SequenceSpec]]) -> None:
    plan, sequences = case
    place = {}
    for number, group in enumerate(plan.groups):
        for position, rank in enumerate(group.ranks):
            place[rank] = (number, position, group.sequences)
    keys = [
        (*place[block.rank][:2], place[block.rank][2].index(block.sequence), block.start)
        for block in lay_out(plan, sequences).blocks
    ]
    assert keys == sorted(keys)


@given(microbatches())
def test_rounds_bring_every_block_to_every_rank_of_its_group_once(
    case: tuple[MicrobatchPlan, list[SequenceSpec]],
) -> None:
    plan, sequences = case
    layout = lay_out(plan, sequences)
    holds: dict[int, Counter[int]] = defaultdict(Counter)
    for index, block in enumerate(layout.blocks):
        holds[block.rank][index] += 1
    for step in layout.rounds:
        sources = [transfer.source for transfer in step.transfers]
        targets = [transfer.target for transfer in step.transfers]
        assert len(set(sources)) == len(sources) and len(set(targets)) == len(targets)
        before = {rank: set(blocks) for rank, blocks in holds.items()}
        for transfer in step.transfers:
            assert transfer.blocks and set(transfer.blocks) <= before[transfer.source]
            assert len({layout.blocks[index].rank for index in transfer.blocks}) == 1
            holds[transfer.target].update(transfer.blocks)
    for group in plan.groups:
        due = Counter(index for index, block in enumerate(layout.blocks) if block.rank in group.ranks)
        assert all(holds[rank] == due for rank in group.ranks)


def test_a_layout_of_ones_own_is_kept() -> None:
    own = Layout(blocks=(Block(sequence=0, start=0, stop=3, rank=1),), rounds=())
    plan = MicrobatchPlan(groups=(), group_s=(), predicted_s=1.0, layout=own)
    assert lay_out(plan, batch_of([3])) is own


@given(microbatches(), st.lists(st.sampled_from(Primitive), min_size=4, max_size=4))
def test_ulysses_groups_cut_their_sequences_laid_end_to_end(
    case: tuple[MicrobatchPlan, list[SequenceSpec]], primitives: list[Primitive]
) -> None:
    plan, sequences = case
    groups = tuple(replace(group, primitive=each) for group, each in zip(plan.groups, primitives, strict=False))
    rings = replace(plan, groups=tuple(group for group in groups if group.primitive is Primitive.RING))
    layout, ring_layout = lay_out(replace(plan, groups=groups), sequences), lay_out(rings, sequences)
    for group in groups:
        if group.primitive is Primitive.RING:
            continue
        laid = [(each, at) for each in group.sequences for at in range(sequences[each].num_tokens)]
        shares = [
            [
                (block.sequence, at)
                for block in layout.blocks
                if block.rank == rank
                for at in range(block.start, block.stop)
            ]
            for rank in group.ranks
        ]
        assert [token for share in shares for token in share] == laid
        sizes = [len(share) for share in shares]
        assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
    ring_ranks = {rank for group in rings.groups for rank in group.ranks}
    assert [block for block in layout.blocks if block.rank in ring_ranks] == list(ring_layout.blocks)
    assert [_ends(step) for step in layout.rounds] == [_ends(step) for step in ring_layout.rounds]


def _ends(step: Round) -> list[tuple[int, int]]:
    return [(transfer.source, transfer.target) for transfer in step.transfers]


def test_unknown_sequences_are_named() -> None:
    group = Group(ranks=(0, 1), sequences=(7,))
    with pytest.raises(ValueError, match=r"sequences \[7\]"):
        lay_out(MicrobatchPlan(groups=(group,), group_s=(1.0,), predicted_s=1.0), batch_of([3]))
