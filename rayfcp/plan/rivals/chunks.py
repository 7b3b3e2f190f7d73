"""Sequences laid end to end and cut into chunks of one size, whatever lies at the cuts."""

from collections.abc import Sequence

from rayfcp.values import Block, SequenceSpec

Fragment = tuple[int, int, int]
"""Sequence, start, stop."""


def cut_chunks(sequences: Sequence[SequenceSpec], *, chunk_tokens: int) -> list[list[Fragment]]:
    """Chunks of `chunk_tokens` tokens, the last of at most that; a chunk holds a fragment of each sequence in it.

    >>> from rayfcp.values import SequenceSpec
    >>> both = [SequenceSpec(id=at, num_tokens=tokens, num_targets=tokens) for at, tokens in enumerate((5, 4))]
    >>> cut_chunks(both, chunk_tokens=3)
    [[(0, 0, 3)], [(0, 3, 5), (1, 0, 1)], [(1, 1, 4)]]
    """
    chunks: list[list[Fragment]] = [[]]
    left = chunk_tokens
    for sequence in sequences:
        start = 0
        while start < sequence.num_tokens:
            if left == 0:
                chunks.append([])
                left = chunk_tokens
            stop = min(start + left, sequence.num_tokens)
            chunks[-1].append((sequence.id, start, stop))
            left -= stop - start
            start = stop
    return chunks


def blocks_of(chunks: Sequence[Sequence[Fragment]], ranks: Sequence[int]) -> list[Block]:
    """Blocks of chunk c on rank `ranks[c]`, in order; fragments of a sequence that touch on one rank are one block."""
    blocks: list[Block] = []
    for fragments, rank in zip(chunks, ranks, strict=True):
        for sequence, start, stop in fragments:
            last = blocks[-1] if blocks else None
            if last and (last.sequence, last.stop, last.rank) == (sequence, start, rank):
                blocks[-1] = Block(sequence=sequence, start=last.start, stop=stop, rank=rank)
            else:
                blocks.append(Block(sequence=sequence, start=start, stop=stop, rank=rank))
    return blocks
