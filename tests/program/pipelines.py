"""Plans of pipelines for tests: sequences cut over microbatches, and orders of stages of the tests' own."""

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rayfcp.values import (
    Action,
    BatchPlan,
    Block,
    Context,
    Group,
    Layout,
    MicrobatchPlan,
    PipelinePlan,
    Primitive,
    Round,
    SequenceSpec,
    Slice,
    Transfer,
)


def actions(text: str) -> tuple[Action, ...]:
    """Parse `F0 F1 B1 B0`."""
    return tuple(Action(microbatch=int(word[1:]), backward=word[0] == "B") for word in text.split())


def backward_order(microbatches: Sequence[MicrobatchPlan], *, start: int, stop: int) -> list[int]:
    """Microbatches that share a sequence in descending order, groups of such in ascending order."""
    last = {at: at for at in range(start, stop)}
    for _ in range(start, stop):
        for at in range(start, stop):
            mine = {each.sequence for each in microbatches[at].slices}
            last[at] = max(
                last[other]
                for other in range(start, stop)
                if other == at or mine & {each.sequence for each in microbatches[other].slices}
            )
    return sorted(range(start, stop), key=lambda at: (last[at], -at))


def ordered(backward: Sequence[int], *, stage: int, num_stages: int, ahead: bool) -> tuple[Action, ...]:
    """The order of a stage: all forward passes first (`ahead`), or as few as the next backward pass needs and one for
    each stage behind this one."""
    start, stop = min(backward), max(backward) + 1
    found, at, due = list[Action](), start, 0
    for microbatch in backward:
        due = stop if ahead else min(stop, max(due, microbatch + 1 + num_stages - 1 - stage))
        found += [Action(microbatch=each) for each in range(at, due)]
        at = max(at, due)
        found.append(Action(microbatch=microbatch, backward=True))
    return tuple(found)


def pipeline(
    microbatches: Sequence[MicrobatchPlan],
    *,
    start: int,
    stop: int,
    recomputed_layers: Sequence[Sequence[int]],
    ahead: bool = False,
) -> PipelinePlan:
    """Microbatches `[start, stop)` over `len(recomputed_layers)` stages."""
    backward = backward_order(microbatches, start=start, stop=stop)
    num_stages = len(recomputed_layers)
    return PipelinePlan(
        start=start,
        stop=stop,
        actions=tuple(
            ordered(backward, stage=stage, num_stages=num_stages, ahead=ahead) for stage in range(num_stages)
        ),
        recomputed_layers=tuple(map(tuple, recomputed_layers)),
        predicted_s=float(stop - start),
    )


def plan_of(microbatches: Sequence[MicrobatchPlan], pipelines: Sequence[PipelinePlan], *, num_ranks: int) -> BatchPlan:
    """A plan whose seconds agree."""
    return BatchPlan(
        strategy="by hand",
        num_ranks=num_ranks,
        generation=0,
        microbatches=tuple(microbatches),
        recomputed_layers=0,
        predicted_s=sum(each.predicted_s for each in pipelines),
        lower_bound_s=0.0,
        reason="",
        pipelines=tuple(pipelines),
    )


def chunk(groups: Sequence[Group], slices: Sequence[Slice] = ()) -> MicrobatchPlan:
    return MicrobatchPlan(groups=tuple(groups), group_s=(0.0,) * len(groups), predicted_s=1.0, slices=tuple(slices))


def split_split_hybrid(primitive: Primitive, *, num_stages: int = 2) -> tuple[BatchPlan, list[SequenceSpec]]:
    """Sequence 0 (17 tokens) in three slices on two ranks, the last beside sequence 1 (4 tokens)."""
    sequences = [SequenceSpec(id=0, num_tokens=17, num_targets=16), SequenceSpec(id=1, num_tokens=4, num_targets=3)]
    cuts, members = [(0, 8), (8, 14), (14, 17)], [(0,), (0,), (0, 1)]
    microbatches = [
        chunk([Group(ranks=(0, 1), sequences=held, primitive=primitive)], [Slice(sequence=0, start=start, stop=stop)])
        for (start, stop), held in zip(cuts, members, strict=True)
    ]
    recomputed_layers = [[stage % 2, 0, 1] for stage in range(num_stages)]
    only = pipeline(microbatches, start=0, stop=3, recomputed_layers=recomputed_layers)
    return plan_of(microbatches, [only], num_ranks=2), sequences


def random_pipelines(seed: int, *, num_stages: int, num_ranks: int) -> tuple[BatchPlan, list[SequenceSpec]]:
    """One to three pipelines of chains: a sequence cut over some microbatches, short sequences beside it or on other
    ranks, now and then a second sequence cut over the same microbatches, and ranks without tokens."""
    rng = random.Random(seed)
    sequences: list[SequenceSpec] = []
    microbatches: list[MicrobatchPlan] = []
    pipelines: list[PipelinePlan] = []
    for _ in range(rng.randrange(1, 4)):
        start = len(microbatches)
        for _ in range(rng.randrange(1, 3)):
            microbatches += _chain(rng, sequences, num_ranks=num_ranks)
        stop = len(microbatches)
        recomputed_layers = [[rng.randrange(3) for _ in range(start, stop)] for _ in range(num_stages)]
        ahead = rng.random() < 0.3
        pipelines.append(
            pipeline(microbatches, start=start, stop=stop, recomputed_layers=recomputed_layers, ahead=ahead)
        )
    return plan_of(microbatches, pipelines, num_ranks=num_ranks), sequences


def _chain(rng: random.Random, sequences: list[SequenceSpec], *, num_ranks: int) -> list[MicrobatchPlan]:
    length = rng.randrange(1, 5)
    ranks = rng.sample(range(num_ranks), num_ranks)
    cuts = sorted(rng.sample(range(num_ranks + 1), rng.randrange(2, min(4, num_ranks + 1) + 1)))
    lots = [tuple(ranks[start:stop]) for start, stop in itertools.pairwise(cuts)]
    cut: dict[int, list[tuple[int, list[int]]]] = {0: [], 1: []}
    for lot in range(min(2, len(lots))):
        for _ in range(rng.choice([0, 1, 1, 2]) if lot == 0 else rng.randrange(2)):
            bounds = sorted({0, *(rng.randrange(1, 40) for _ in range(length))})
            cut[lot].append((_new(sequences, bounds[-1]), bounds))
    primitives = [rng.choice(list(Primitive)) for _ in lots]
    return [_link(rng, sequences, at, lots=lots, primitives=primitives, cut=cut) for at in range(length)]


def _link(
    rng: random.Random,
    sequences: list[SequenceSpec],
    at: int,
    *,
    lots: Sequence[tuple[int, ...]],
    primitives: Sequence[Primitive],
    cut: Mapping[int, Sequence[tuple[int, list[int]]]],
) -> MicrobatchPlan:
    groups, slices = list[Group](), list[Slice]()
    for lot, (ranks, primitive) in enumerate(zip(lots, primitives, strict=True)):
        held = []
        for sequence, bounds in cut.get(lot, ()):
            if at + 1 < len(bounds):
                slices.append(Slice(sequence=sequence, start=bounds[at], stop=bounds[at + 1]))
                held.append(sequence)
        for _ in range(rng.choice([0, 0, 1, 2])):
            held.append(_new(sequences, rng.randrange(1, 12)))
        rng.shuffle(held)
        groups.append(Group(ranks=ranks, sequences=tuple(held), primitive=primitive))
    return chunk(groups, slices)


def _new(sequences: list[SequenceSpec], num_tokens: int) -> int:
    sequences.append(SequenceSpec(id=len(sequences), num_tokens=num_tokens, num_targets=num_tokens - 1))
    return sequences[-1].id


def sliced_over_runs(seed: int, *, num_runs: int, heads: int) -> tuple[BatchPlan, list[SequenceSpec]]:
    """A sequence in slices over runs of ranks that share out heads, the last slice beside a short sequence; keys and
    values of a run, context included, go to every other run."""
    rng = random.Random(seed)
    num_ranks, sequences = num_runs * heads, list[SequenceSpec]()
    bounds = [0, *itertools.accumulate(rng.randrange(1, 40) for _ in range(rng.randrange(1, 5)))]
    number, short = _new(sequences, bounds[-1]), _new(sequences, rng.randrange(1, 20))
    microbatches, layouts = list[MicrobatchPlan](), list[Layout]()
    for start, stop in itertools.pairwise(bounds):
        held = {number: (start, stop)} | ({short: (0, sequences[short].num_tokens)} if stop == bounds[-1] else {})
        blocks = [block for run in range(num_runs) for block in _of_run(held, run, num_runs=num_runs, heads=heads)]
        context = tuple(
            Context(microbatch=at, blocks=tuple(each for each in layout.blocks if each.sequence == number))
            for at, layout in enumerate(layouts)
        )
        layouts.append(_all_to_all(tuple(blocks), context, num_runs=num_runs, heads=heads))
        group = Group(ranks=tuple(range(num_ranks)), sequences=tuple(held))
        piece = Slice(sequence=number, start=start, stop=stop)
        microbatches.append(replace(chunk([group], [piece]), layout=layouts[-1]))
    count = len(microbatches)
    only = pipeline(microbatches, start=0, stop=count, recomputed_layers=[[1] * count] * 2)
    return plan_of(microbatches, [only], num_ranks=num_ranks), sequences


def _of_run(held: Mapping[int, tuple[int, int]], run: int, *, num_runs: int, heads: int) -> list[Block]:
    """A run's part of each sequence, laid end to end and cut over its ranks."""
    parts = []
    for sequence, (start, stop) in held.items():
        size = stop - start
        parts.append((sequence, start + size * run // num_runs, start + size * (run + 1) // num_runs))
    total = sum(stop - start for _, start, stop in parts)
    blocks, at = list[Block](), 0
    for sequence, start, stop in parts:
        cuts = [start + total * share // heads - at for share in range(heads + 1)]
        for share, (begin, end) in enumerate(itertools.pairwise(cuts)):
            first, last = max(begin, start), min(end, stop)
            if first < last:
                blocks.append(Block(sequence=sequence, start=first, stop=last, rank=run * heads + share))
        at += stop - start
    return blocks


def _all_to_all(blocks: tuple[Block, ...], context: tuple[Context, ...], *, num_runs: int, heads: int) -> Layout:
    layout = Layout(blocks=blocks, rounds=(), heads=heads, context=context)
    owned = [
        tuple(index for index, block in enumerate(layout.all_blocks) if block.rank // heads == run)
        for run in range(num_runs)
    ]
    rounds = tuple(
        Round(
            transfers=tuple(
                Transfer(blocks=mine, source=run, target=(run + turn) % num_runs)
                for run, mine in enumerate(owned)
                if mine
            )
        )
        for turn in range(1, num_runs)
    )
    return replace(layout, rounds=rounds)
