"""Layouts that no planner of ours emits: blocks anywhere, keys and values fetched from owners or passed on."""

import random
from collections.abc import Sequence

from rayfcp.values import Block, Layout, Mask, Round, SequenceSpec, Transfer


def random_layout(sequences: Sequence[SequenceSpec], *, num_ranks: int, seed: int) -> Layout:
    """Every sequence cut at random and strewn over random ranks. A rank that needs keys gets them, block
    by block, from the owner or from a rank that received them in an earlier round."""
    rng = random.Random(seed)
    blocks = _blocks(sequences, num_ranks=num_ranks, rng=rng)
    wanted = [
        (index, rank)
        for index, key in enumerate(blocks)
        for rank in range(num_ranks)
        if rank != key.rank and any(_needs(query, key, sequences) for query in blocks if query.rank == rank)
    ]
    rng.shuffle(wanted)
    holders = {index: {block.rank: -1} for index, block in enumerate(blocks)}
    rounds: list[list[Transfer]] = []
    for index, target in wanted:
        source, number = _place(rounds, holders[index], target=target, rng=rng)
        while len(rounds) <= number:
            rounds.append([])
        rounds[number].append(Transfer(blocks=(index,), source=source, target=target))
        holders[index][target] = number
    return Layout(blocks=tuple(blocks), rounds=tuple(Round(transfers=tuple(each)) for each in rounds))


def _blocks(sequences: Sequence[SequenceSpec], *, num_ranks: int, rng: random.Random) -> list[Block]:
    blocks = []
    for sequence in sequences:
        cuts = sorted(rng.sample(range(1, sequence.num_tokens), min(rng.randrange(4), sequence.num_tokens - 1)))
        for start, stop in zip([0, *cuts], [*cuts, sequence.num_tokens], strict=True):
            blocks.append(Block(sequence=sequence.id, start=start, stop=stop, rank=rng.randrange(num_ranks)))
    return blocks


def _needs(query: Block, key: Block, sequences: Sequence[SequenceSpec]) -> bool:
    if query.sequence != key.sequence:
        return False
    return sequences[key.sequence].mask is Mask.FULL or key.start < query.stop


def _place(rounds: list[list[Transfer]], held: dict[int, int], *, target: int, rng: random.Random) -> tuple[int, int]:
    source, since = rng.choice(sorted(held.items()))
    number = since + 1
    while number < len(rounds) and any(each.source == source or each.target == target for each in rounds[number]):
        number += 1
    return source, number
