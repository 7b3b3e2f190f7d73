"""Blocks that lie anywhere, and their keys and values cast to every rank that needs them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from rayfcp.values import Block, Layout, Round, SequenceSpec, Transfer

Needs = Mapping[tuple[int, int], Sequence[int]]
"""(source, target) -> indices of blocks."""


def cast(blocks: Sequence[Block], *, by_id: Mapping[int, SequenceSpec], num_ranks: int) -> Layout:
    """The layout in which every block goes from its owner to each rank that attends to it, once.

    `blocks` come in ascending order within a sequence. In round i, 1 <= i < N, rank r sends to r + i mod N all
    that this rank needs of it: a matching in plain rotation, with no regard to who has how much to send, so
    the busiest port sets the pace. Rounds in which nobody sends are left out.
    """
    carried = needs(blocks, by_id=by_id)
    rounds: dict[int, list[Transfer]] = defaultdict(list)
    for (source, target), indices in sorted(carried.items()):
        transfer = Transfer(blocks=tuple(sorted(indices)), source=source, target=target)
        rounds[(target - source) % num_ranks].append(transfer)
    ordered = tuple(Round(transfers=tuple(rounds[shift])) for shift in sorted(rounds))
    return Layout(blocks=tuple(blocks), rounds=ordered)


def needs(blocks: Sequence[Block], *, by_id: Mapping[int, SequenceSpec]) -> Needs:
    """Which blocks each rank needs of each other: those that begin before what its last block of the sequence
    reaches."""
    by_sequence: dict[int, list[int]] = defaultdict(list)
    for index, block in enumerate(blocks):
        by_sequence[block.sequence].append(index)
    carried: dict[tuple[int, int], list[int]] = defaultdict(list)
    for sequence, indices in by_sequence.items():
        reach = {blocks[index].rank: by_id[sequence].reach(blocks[index].stop) for index in indices}
        for target, behind in reach.items():
            for index in indices:
                if blocks[index].rank != target and blocks[index].start < behind:
                    carried[blocks[index].rank, target].append(index)
    return carried
