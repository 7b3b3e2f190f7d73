"""Layouts of tokens that training loops bring."""

import random
from collections.abc import Sequence

from rayfcp.program import Piece
from rayfcp.values import SequenceSpec
from tests.execute.layouts import random_blocks


def random_pieces(sequences: Sequence[SequenceSpec], *, num_ranks: int, seed: int) -> list[list[Piece]]:
    """Layout that a loop may hold: every sequence cut at random, pieces in any order on any ranks; some bring
    nothing."""
    rng = random.Random(seed)
    busy = rng.sample(range(num_ranks), rng.randint(1, num_ranks))
    pieces = [
        Piece(sequence=block.sequence, start=block.start, stop=block.stop)
        for block in random_blocks(sequences, num_ranks=num_ranks, rng=rng)
    ]
    rng.shuffle(pieces)
    held: list[list[Piece]] = [[] for _ in range(num_ranks)]
    for piece in pieces:
        held[rng.choice(busy)].append(piece)
    return held


def packed_slices(sequences: Sequence[SequenceSpec], *, num_ranks: int) -> list[list[Piece]]:
    """The sequences end to end, an equal slice for each rank."""
    total, at = sum(each.num_tokens for each in sequences), 0
    cuts = [total * rank // num_ranks for rank in range(num_ranks + 1)]
    held: list[list[Piece]] = [[] for _ in range(num_ranks)]
    for sequence in sequences:
        for rank in range(num_ranks):
            start, stop = (min(max(cut - at, 0), sequence.num_tokens) for cut in cuts[rank : rank + 2])
            if start < stop:
                held[rank].append(Piece(sequence=sequence.id, start=start, stop=stop))
        at += sequence.num_tokens
    return held


def whole_sequences(sequences: Sequence[SequenceSpec], *, num_ranks: int) -> list[list[Piece]]:
    """Sequence i whole on rank i modulo ranks."""
    held: list[list[Piece]] = [[] for _ in range(num_ranks)]
    for sequence in sequences:
        held[sequence.id % num_ranks].append(Piece(sequence=sequence.id, start=0, stop=sequence.num_tokens))
    return held
