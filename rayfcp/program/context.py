"""Keys and values that a microbatch leaves for later ones: where they lie, and what must be kept."""

from collections.abc import Collection, Mapping, Sequence

from rayfcp.program.instructions import ContextSlot
from rayfcp.program.parcels import Range
from rayfcp.program.placed import Placed, merged
from rayfcp.values import Block, Layout

Order = Mapping[tuple[int, int], int]
"""Where (sequence, start) of a block lies in a slot 0."""


def order_of(blocks: Sequence[Block]) -> Order:
    """Of the blocks of a slot 0, in its order.

    >>> order_of([Block(sequence=0, start=4, stop=6, rank=0), Block(sequence=2, start=0, stop=1, rank=0)])
    {(0, 4): 0, (2, 0): 2}
    """
    order, at = {}, 0
    for block in blocks:
        order[block.sequence, block.start] = at
        at += block.num_tokens
    return order


def context_slots(
    layout: Layout, *, num_ranks: int, earlier: Mapping[int, Sequence[Order]]
) -> list[tuple[ContextSlot, ...]]:
    """Slots 1.. of each rank that has blocks of the layout's contexts.

    Raises:
        ValueError: a context's microbatch does not have its blocks on the same rank, in the same order, side by side.
    """
    slots: list[list[ContextSlot]] = [[] for _ in range(num_ranks)]
    for number, context in enumerate(layout.context, start=1):
        of_rank: dict[int, list[Block]] = {}
        for block in context.blocks:
            of_rank.setdefault(block.rank, []).append(block)
        for rank, mine in of_rank.items():
            order = earlier[context.microbatch][rank] if context.microbatch in earlier else {}
            joined = merged([_span(block, order, microbatch=context.microbatch) for block in mine])
            if len(joined) > 1:
                raise ValueError(
                    f"context of microbatch {context.microbatch}: blocks of sequence {mine[0].sequence} on rank {rank} "
                    f"lie at {joined}, must lie side by side in their order; plan the batch again"
                )
            slots[rank].append(ContextSlot(slot=number, microbatch=context.microbatch, span=joined[0]))
    return [tuple(each) for each in slots]


def _span(block: Block, order: Order, *, microbatch: int) -> Range:
    start = order.get((block.sequence, block.start))
    if start is None:
        raise ValueError(
            f"context of microbatch {microbatch}: tokens [{block.start}, {block.stop}) of sequence {block.sequence} "
            f"are not on rank {block.rank} there; keep a sequence's slices on the same ranks, with the same primitive"
        )
    return start, start + block.num_tokens


def kept_ranges(held: Placed, blocks: Sequence[Block], *, needed: Collection[tuple[int, int]]) -> tuple[Range, ...]:
    """What of a slot 0 later microbatches need, in ascending ranges."""
    if not needed:
        return ()
    spans = (span for at, span in held.ranges.items() if (blocks[at].sequence, blocks[at].start) in needed)
    return merged(sorted(spans))
