"""From groups to blocks and rounds: what a group's primitive means, written out."""

from collections.abc import Mapping, Sequence

from rayfcp.plan.zigzag import zigzag
from rayfcp.values import Block, Group, Layout, MicrobatchPlan, Primitive, Round, SequenceSpec, Transfer


def lay_out(microbatch: MicrobatchPlan, sequences: Sequence[SequenceSpec]) -> Layout:
    """The microbatch's own layout, or its groups expanded: zig-zag rings, level shares for Ulysses.

    Blocks come by group, position in the group, sequence in the group's order, start. Rings of all
    groups share the rounds: in round r position p passes on what position (p - r) mod d owns, so each
    block visits each other rank of its group once. The sequences of a Ulysses group, laid end to end, are cut
    into one contiguous share a rank, sizes within one token of each other; its exchanges need no rounds.
    Invariant: rounds are matchings.

    Raises:
        ValueError: a group names an unknown sequence.
    """
    if microbatch.layout is not None:
        return microbatch.layout
    lengths = {sequence.id: sequence.num_tokens for sequence in sequences}
    blocks: list[Block] = []
    rings = [group for group in microbatch.groups if group.primitive is Primitive.RING]
    num_rounds = max((group.degree - 1 for group in rings), default=0)
    rounds: list[list[Transfer]] = [[] for _ in range(num_rounds)]
    for group in microbatch.groups:
        _check_group(group, lengths)
        if group.primitive is Primitive.ULYSSES:
            blocks += _shares(group, lengths)
            continue
        owned = _place(group, lengths, blocks=blocks)
        for index in range(group.degree - 1):
            rounds[index] += _ring_round(group, owned, index=index)
    return Layout(blocks=tuple(blocks), rounds=tuple(Round(transfers=tuple(each)) for each in rounds))


def _check_group(group: Group, lengths: Mapping[int, int]) -> None:
    unknown = [sequence for sequence in group.sequences if sequence not in lengths]
    if unknown:
        raise ValueError(f"group of ranks {group.ranks} names sequences {unknown} that the batch does not have")


def _place(group: Group, lengths: Mapping[int, int], *, blocks: list[Block]) -> list[tuple[int, ...]]:
    """Append the group's blocks; returns the indices of each position's own."""
    pieces: list[list[tuple[int, int, int]]] = [[] for _ in group.ranks]
    first = 0
    for sequence in group.sequences:
        ranges, first = zigzag(lengths[sequence], degree=group.degree, first=first)
        for piece, held in zip(pieces, ranges, strict=True):
            piece += [(sequence, start, stop) for start, stop in held]
    owned = []
    for rank, piece in zip(group.ranks, pieces, strict=True):
        before = len(blocks)
        blocks += [Block(sequence=sequence, start=start, stop=stop, rank=rank) for sequence, start, stop in piece]
        owned.append(tuple(range(before, len(blocks))))
    return owned


def _shares(group: Group, lengths: Mapping[int, int]) -> list[Block]:
    """Each rank's contiguous share of the group's tokens, laid end to end (DeepSpeed-Ulysses, section 3.1)."""
    size, left = divmod(sum(lengths[sequence] for sequence in group.sequences), group.degree)
    blocks: list[Block] = []
    position, room = 0, size + (left > 0)
    for sequence in group.sequences:
        start, stop = 0, lengths[sequence]
        while start < stop:
            if room == 0:
                position, room = position + 1, size + (position + 1 < left)
                continue
            taken = min(room, stop - start)
            blocks.append(Block(sequence=sequence, start=start, stop=start + taken, rank=group.ranks[position]))
            start, room = start + taken, room - taken
    return blocks


def _ring_round(group: Group, owned: list[tuple[int, ...]], *, index: int) -> list[Transfer]:
    degree = group.degree
    return [
        Transfer(blocks=carried, source=rank, target=group.ranks[(position + 1) % degree])
        for position, rank in enumerate(group.ranks)
        if (carried := owned[(position - index) % degree])
    ]
