"""Zig-zag cuts: a causal sequence in 2d slices, of which each of d ranks holds one early and one late.

From groups to blocks and rounds: what a group's primitive means, written out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from rayfcp.values import (
    BatchPlan,
    Block,
    Context,
    Group,
    Layout,
    MicrobatchPlan,
    Primitive,
    Round,
    SequenceSpec,
    Slice,
    Transfer,
)


def zigzag(num_tokens: int, *, degree: int, first: int = 0) -> tuple[list[list[tuple[int, int]]], int]:
    """Cut `[0, num_tokens)` for the positions of a group; position p holds slices p and 2d - 1 - p.

    Returns each position's non-empty ranges in ascending order, ranges that touch as one, and the
    `first` of the group's next sequence. Slices differ by at most one token. The tokens left over go
    round the positions, `first` on: first to their early slices, then to their late ones. As sequence
    follows sequence the round goes on where it stopped, so that the tokens of a group's positions
    also differ by at most one, however many sequences it holds. Any length, any degree, no padding.

    >>> zigzag(9, degree=2)
    ([[(0, 3), (7, 9)], [(3, 7)]], 1)
    """
    if degree == 1:
        return [[(0, num_tokens)]], 0
    num_slices = 2 * degree
    size, left = divmod(num_tokens, num_slices)
    sizes = [size] * num_slices
    for turn in range(first, first + left):
        at = turn % num_slices
        sizes[at if at < degree else 3 * degree - 1 - at] += 1
    bounds = [0]
    for each in sizes:
        bounds.append(bounds[-1] + each)
    ranges = []
    for early in range(degree):
        late = num_slices - 1 - early
        ranges.append(_joined((bounds[early], bounds[early + 1]), (bounds[late], bounds[late + 1])))
    return ranges, (first + left) % num_slices


def _joined(early: tuple[int, int], late: tuple[int, int]) -> list[tuple[int, int]]:
    held = [(early[0], late[1])] if early[1] == late[0] else [early, late]
    return [(start, stop) for start, stop in held if stop > start]


Spans = Mapping[int, tuple[int, int]]
"""Of each sequence, the tokens `[start, stop)` that a microbatch holds."""


def layouts_of(plan: BatchPlan, sequences: Sequence[SequenceSpec]) -> tuple[Layout, ...]:
    """The layouts of all microbatches; those of slices with the context that earlier microbatches left them.

    Context comes by earlier microbatch, then sequence, its blocks in the order of that microbatch's.

    Raises:
        ValueError: a group or a slice names an unknown sequence.
    """
    layouts: list[Layout] = []
    left: dict[int, list[Context]] = {}
    for number, microbatch in enumerate(plan.microbatches):
        pieces = sorted(microbatch.slices, key=lambda piece: piece.sequence)
        context = [each for piece in pieces for each in _before(piece, left.get(piece.sequence, ()))]
        context.sort(key=lambda each: each.microbatch)
        layouts.append(lay_out(microbatch, sequences, context=context))
        for piece in pieces:
            mine = tuple(block for block in layouts[-1].blocks if block.sequence == piece.sequence)
            left.setdefault(piece.sequence, []).append(Context(microbatch=number, blocks=mine))
    return tuple(layouts)


def _before(piece: Slice, left: Sequence[Context]) -> Iterator[Context]:
    """What earlier microbatches left of a slice's sequence."""
    for each in left:
        blocks = tuple(block for block in each.blocks if block.stop <= piece.start)
        if blocks:
            yield replace(each, blocks=blocks)


def lay_out(
    microbatch: MicrobatchPlan, sequences: Sequence[SequenceSpec], *, context: Sequence[Context] = ()
) -> Layout:
    """The microbatch's own layout, or its groups expanded: zig-zag rings, level shares for Ulysses.

    Blocks come by group, position in the group, sequence in the group's order, start. Rings of all
    groups share the rounds: in round r position p passes on what position (p - r) mod d owns, context included, so
    each block visits each other rank of its group once. The sequences of a Ulysses group, laid end to end, are cut
    into one contiguous share a rank, sizes within one token of each other; its exchanges need no rounds, and its
    context stays where it is. Invariant: rounds are matchings.

    Raises:
        ValueError: a group names an unknown sequence.
    """
    if microbatch.layout is not None:
        return microbatch.layout
    spans = {sequence.id: (0, sequence.num_tokens) for sequence in sequences}
    spans |= {each.sequence: (each.start, each.stop) for each in microbatch.slices}
    blocks: list[Block] = []
    rings = [group for group in microbatch.groups if group.primitive is Primitive.RING]
    num_rounds = max((group.degree - 1 for group in rings), default=0)
    owned: dict[int, tuple[int, ...]] = {}
    for group in microbatch.groups:
        _check_group(group, spans)
        if group.primitive is Primitive.ULYSSES:
            blocks += _shares(group, spans)
        else:
            owned |= _place(group, spans, blocks=blocks)
    for number, block in enumerate((block for each in context for block in each.blocks), start=len(blocks)):
        if block.rank in owned:
            owned[block.rank] += (number,)
    rounds = [
        Round(transfers=tuple(each for group in rings for each in _ring_round(group, owned, index=index)))
        for index in range(num_rounds)
    ]
    return Layout(blocks=tuple(blocks), rounds=tuple(rounds), context=tuple(context))


def _check_group(group: Group, spans: Spans) -> None:
    unknown = [sequence for sequence in group.sequences if sequence not in spans]
    if unknown:
        raise ValueError(f"group of ranks {group.ranks} names sequences {unknown} that the batch does not have")


def _place(group: Group, spans: Spans, *, blocks: list[Block]) -> dict[int, tuple[int, ...]]:
    """Append the group's blocks; returns the indices of each rank's own."""
    pieces: list[list[tuple[int, int, int]]] = [[] for _ in group.ranks]
    first = 0
    for sequence in group.sequences:
        begin, end = spans[sequence]
        ranges, first = zigzag(end - begin, degree=group.degree, first=first)
        for piece, held in zip(pieces, ranges, strict=True):
            piece += [(sequence, begin + start, begin + stop) for start, stop in held]
    owned = {}
    for rank, piece in zip(group.ranks, pieces, strict=True):
        before = len(blocks)
        blocks += [Block(sequence=sequence, start=start, stop=stop, rank=rank) for sequence, start, stop in piece]
        owned[rank] = tuple(range(before, len(blocks)))
    return owned


def _shares(group: Group, spans: Spans) -> list[Block]:
    """Each rank's contiguous share of the group's tokens, laid end to end (DeepSpeed-Ulysses, section 3.1)."""
    held = [spans[sequence] for sequence in group.sequences]
    size, left = divmod(sum(stop - start for start, stop in held), group.degree)
    blocks: list[Block] = []
    position, room = 0, size + (left > 0)
    for sequence, (begin, stop) in zip(group.sequences, held, strict=True):
        start = begin
        while start < stop:
            if room == 0:
                position, room = position + 1, size + (position + 1 < left)
                continue
            taken = min(room, stop - start)
            blocks.append(Block(sequence=sequence, start=start, stop=start + taken, rank=group.ranks[position]))
            start, room = start + taken, room - taken
    return blocks


def _ring_round(group: Group, owned: Mapping[int, tuple[int, ...]], *, index: int) -> list[Transfer]:
    degree = group.degree
    return [
        Transfer(blocks=carried, source=rank, target=group.ranks[(position + 1) % degree])
        for position, rank in enumerate(group.ranks)
        if index + 1 < degree and (carried := owned[group.ranks[(position - index) % degree]])
    ]
