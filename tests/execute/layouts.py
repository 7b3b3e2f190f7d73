"""Layouts: one ring, and such as no planner of ours emits: blocks anywhere, keys and values fetched from owners or
passed on."""

import bisect
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

from rayfcp.plan import lay_out
from rayfcp.values import BatchPlan, Block, Group, Layout, MicrobatchPlan, Round, SequenceSpec, Transfer


def ring(sequences: Sequence[SequenceSpec], *, num_ranks: int) -> Layout:
    """One zig-zag ring of all ranks over all sequences."""
    group = Group(ranks=tuple(range(num_ranks)), sequences=tuple(each.id for each in sequences))
    return lay_out(MicrobatchPlan(groups=(group,), group_s=(1.0,), predicted_s=1.0), sequences)


def random_layout(sequences: Sequence[SequenceSpec], *, num_ranks: int, seed: int) -> Layout:
    """Every sequence cut at random and strewn over random ranks. A rank that needs keys gets them, block
    by block, from the owner or from a rank that received them in an earlier round."""
    rng = random.Random(seed)
    blocks = random_blocks(sequences, num_ranks=num_ranks, rng=rng)
    wanted = [
        (index, rank)
        for index, key in enumerate(blocks)
        for rank in range(num_ranks)
        if rank != key.rank and any(_needs(query, key) for query in blocks if query.rank == rank)
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


def random_blocks(sequences: Sequence[SequenceSpec], *, num_ranks: int, rng: random.Random) -> list[Block]:
    """Every sequence cut into up to four blocks, each on a random rank."""
    blocks = []
    for sequence in sequences:
        cuts = sorted(rng.sample(range(1, sequence.num_tokens), min(rng.randrange(4), sequence.num_tokens - 1)))
        for start, stop in zip([0, *cuts], [*cuts, sequence.num_tokens], strict=True):
            blocks.append(Block(sequence=sequence.id, start=start, stop=stop, rank=rng.randrange(num_ranks)))
    return blocks


def _needs(query: Block, key: Block) -> bool:
    return query.sequence == key.sequence and key.start < query.stop


def _place(rounds: list[list[Transfer]], held: dict[int, int], *, target: int, rng: random.Random) -> tuple[int, int]:
    source, since = rng.choice(sorted(held.items()))
    number = since + 1
    while number < len(rounds) and any(each.source == source or each.target == target for each in rounds[number]):
        number += 1
    return source, number


def over_runs(layout: Layout, *, num_ranks: int, heads: int, dealt: bool = False) -> Layout:
    """The layout of `num_ranks` / `heads` ranks with runs of `heads` ranks in place of each: its tokens laid end to end
    and cut into level shares, or (`dealt`) its blocks dealt out in turn."""
    held: list[list[int]] = [[] for _ in range(num_ranks // heads)]
    for index, block in enumerate(layout.blocks):
        held[block.rank].append(index)
    blocks: list[Block] = []
    parts: dict[int, list[int]] = {}
    for run, own in enumerate(held):
        ends = _ends([layout.blocks[index].num_tokens for index in own], heads=heads)
        at = 0
        for turn, index in enumerate(own):
            block = layout.blocks[index]
            cuts = [
                block.start,
                *(block.start + end - at for end in sorted(set(ends)) if at < end < at + block.num_tokens),
                block.stop,
            ]
            spans = [(block.start, block.stop)] if dealt else list(itertools.pairwise(cuts))
            parts[index] = list(range(len(blocks), len(blocks) + len(spans)))
            for start, stop in spans:
                share = turn % heads if dealt else bisect.bisect_right(ends, at + start - block.start)
                blocks.append(replace(block, start=start, stop=stop, rank=run * heads + share))
            at += block.num_tokens
    rounds = tuple(
        Round(
            transfers=tuple(
                replace(each, blocks=tuple(part for block in each.blocks for part in parts[block]))
                for each in step.transfers
            )
        )
        for step in layout.rounds
    )
    return Layout(blocks=tuple(blocks), rounds=rounds, pacing=layout.pacing, heads=heads)


def _ends(sizes: Sequence[int], *, heads: int) -> list[int]:
    """Ends of the shares of tokens laid end to end, except the last."""
    return [sum(sizes) * share // heads for share in range(1, heads)]


def relayed(sequences: Sequence[SequenceSpec], *, num_ranks: int, heads: int, seed: int) -> BatchPlan:
    """A `random_layout` of ranks, or of runs of `heads` ranks in place of each."""
    layout = random_layout(sequences, num_ranks=num_ranks, seed=seed)
    if heads > 1:
        layout = over_runs(layout, num_ranks=heads * num_ranks, heads=heads)
    return plan_of(layout, sequences, num_ranks=heads * num_ranks)


def plan_of(layout: Layout, sequences: Sequence[SequenceSpec], *, num_ranks: int) -> BatchPlan:
    """One microbatch of one group of all ranks with this layout."""
    group = Group(ranks=tuple(range(num_ranks)), sequences=tuple(each.id for each in sequences))
    microbatch = MicrobatchPlan(groups=(group,), group_s=(1.0,), predicted_s=1.0, layout=layout)
    return BatchPlan(
        strategy="by hand",
        num_ranks=num_ranks,
        generation=0,
        microbatches=(microbatch,),
        recomputed_layers=0,
        predicted_s=1.0,
        lower_bound_s=1.0,
        reason="a test",
    )
