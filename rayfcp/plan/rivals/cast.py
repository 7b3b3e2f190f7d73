"""Blocks that lie anywhere, and their keys and values cast to every rank that needs them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from rayfcp.values import Block, Layout, Mask, Round, Transfer

Needs = Mapping[tuple[int, int], Sequence[int]]
"""(source, target) -> indices of blocks."""


def cast(blocks: Sequence[Block], *, masks: Mapping[int, Mask], num_ranks: int) -> Layout:
    """The layout in which every block goes from its owner to each rank that attends to it, once.

    `blocks` come in ascending order within a sequence. In round i, 1 <= i < N, rank r sends to r + i mod N all
    that this rank needs of it: a matching in plain rotation, with no regard to who has how much to send, so
    the busiest port sets the pace. Rounds in which nobody sends are left out.
    """
    carried = needs(blocks, masks=masks)
    rounds: dict[int, list[Transfer]] = defaultdict(list)
    for (source, target), indices in sorted(carried.items()):
        transfer = Transfer(blocks=tuple(sorted(indices)), source=source, target=target)
        rounds[(target - source) % num_ranks].append(transfer)
    ordered = tuple(Round(transfers=tuple(rounds[shift])) for shift in sorted(rounds))
    return Layout(blocks=tuple(blocks), rounds=ordered)


def needs(blocks: Sequence[Block], *, masks: Mapping[int, Mask]) -> Needs:
    """Which blocks each rank needs of each other: under a causal mask, those before its last block of the
    sequence; under a full mask, all of the sequence."""
    by_sequence: dict[int, list[int]] = defaultdict(list)
    for index, block in enumerate(blocks):
        by_sequence[block.sequence].append(index)
    carried: dict[tuple[int, int], list[int]] = defaultdict(list)
    for sequence, indices in by_sequence.items():
        last_start = {blocks[index].rank: blocks[index].start for index in indices}
        for target, start in last_start.items():
            for index in indices:
                if blocks[index].rank != target and (masks[sequence] is Mask.FULL or blocks[index].start < start):
                    carried[blocks[index].rank, target].append(index)
    return carried
