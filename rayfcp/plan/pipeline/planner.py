"""The pipeline planner: how to chunk a batch, which chunks share a pipeline, by which primitive.

Every recipe is chunked and replayed exactly; the best are also tried in several pipelines (InfiniPipe, section 3.3.2:
contiguous ranges of numbers of chunks). Sequences grouped with one of more chunks wait in its window and recompute
more; another pipeline costs another warm-up and cool-down. Work is counted in recipes, never in seconds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from rayfcp.config.models import PipelineOptions, PlanConfig
from rayfcp.cost.model import CostModel
from rayfcp.cost.placement import node_of_ranks
from rayfcp.plan.pipeline.chunks import (
    Chunked,
    ChunkWork,
    Recipe,
    SequenceColumns,
    Splits,
    balanced_ends,
    chunk,
    equal_ends,
    split,
)
from rayfcp.plan.pipeline.evaluate import ChunkLoads, ChunkPipeline, Place, loads_of, piped
from rayfcp.plan.pipeline.schedule import pipeline_plan
from rayfcp.plan.strategies.registry import Proposal
from rayfcp.values import ClusterSpec, Group, InfeasiblePlanError, MicrobatchPlan, Primitive, SequenceSpec, Slice

COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128, 192, 256)
"""Slices of the longest sequence."""

DEPTHS = (8.0, 6.0, 5.0, 4.0, 3.0, 2.5, 2.0, 1.5, 1.25)
"""Times that a bucket is as long as the longest sequence, where that is not cut: batches of short sequences need few
chunks, as each pays a fixed cost."""

WIDTHS = (1.4, 1.0)
"""Tokens of a bucket over those of a slice: 1 is the paper's, with more a bucket of short sequences takes as long."""

TAPERS = (8, 0, 2, 4, 6, 12, 18, 26)
"""Chunks at either end that are shorter than the others, in equal steps."""

STRETCHES = (1.0, 0.8, 0.9, 1.1, 1.2)
"""Seconds of a bucket over those of a slice."""

ROW_ENDS = 2
"""Ends that a rank's part of a ring has in each sequence: slices of whole rows are equal on all ranks."""

WORSE = 1.2
"""Shorter chunks are not tried any more when they take so many times the best found, `TRIES` times."""

TRIES = 3

GRAINS = 5
"""Grains of which every bucket size and taper is tried."""

STRETCHED = 8
"""Recipes of which buckets of other lengths are tried."""


class Choice(NamedTuple):
    """A recipe of one of the places: the number of its grain, and what buckets are like."""

    place: int
    grain: int
    width: float
    taper: int
    stretch: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipes:
    """All recipes of a batch: by grain (from long chunks to short ones), width and taper, the usual ones first."""

    batch: SequenceColumns
    work: ChunkWork
    grains: tuple[tuple[float, tuple[int, ...]], ...]
    splits: dict[tuple[int, ...], Splits]
    widths: tuple[float, ...]
    tapers: tuple[int, ...]
    max_tokens: float
    balanced: bool

    @classmethod
    def of(
        cls,
        batch: SequenceColumns,
        *,
        work: ChunkWork,
        num_ranks: int,
        max_tokens: float,
        options: PipelineOptions,
    ) -> "Recipes":
        """Recipes with at most `max_tokens` in a chunk."""
        longest = int(batch.tokens.max())
        balanced, rows = options.chunking == "balanced", ROW_ENDS * num_ranks
        grains = []
        for depth, count in _grains(longest, options=options):
            ends = (
                balanced_ends(longest, count, work=work, rows=rows)
                if balanced
                else equal_ends(longest, count, rows=rows)
            )
            if ends[0] <= max_tokens:
                grains.append((depth, ends))
        return cls(
            batch=batch,
            work=work,
            grains=tuple(grains),
            splits={
                ends: split(batch, ends, work=work, merges=balanced, max_tokens=max_tokens)
                for ends in {ends for _, ends in grains}
            },
            widths=WIDTHS if balanced else (1.0,),
            tapers=TAPERS if balanced and options.order == "elastic" else (0,),
            max_tokens=max_tokens,
            balanced=balanced,
        )

    def chunked(self, choice: Choice) -> Chunked:
        """The chunks of a recipe."""
        depth, ends = self.grains[choice.grain]
        depth *= choice.stretch
        shares = tuple((np.arange(1, choice.taper + 1) / (choice.taper + 1)).tolist())
        recipe = Recipe(
            ends=ends,
            target_s=depth * self.work.seconds(0, ends[0]),
            max_tokens=min(choice.width * depth * ends[0], self.max_tokens),
            balanced=self.balanced,
            first=shares,
            last=shares[::-1],
        )
        return chunk(self.batch, recipe, splits=self.splits[ends])


def _grains(longest: int, *, options: PipelineOptions) -> list[tuple[float, int]]:
    """Depth of buckets, and slices of the longest sequence."""
    if options.slices is not None:
        return [(1.0, min(options.slices, longest))]
    counts = [(1.0, count) for count in COUNTS if count <= min(options.max_slices, longest)]
    return [*((depth, 1) for depth in DEPTHS), *counts]


GroupCost = Callable[[int, int], float]
Groups = tuple[tuple[int, int], ...]


def best_groups(cost: GroupCost, *, num_kinds: int, most: int) -> Groups:
    """Ranges of `num_kinds` kinds of sequences, most chunks first, into at most `most` pipelines of the least cost.

    dp[i] = min over k < i of dp[k] + `cost(k, i)` (Eq. 14), which is delta and the recomputation of kinds [k, i); no
    pipelines if all cost infinitely much.
    """
    nothing: tuple[float, Groups] = (float("inf"), ())
    table = [(0.0, ()), *[nothing] * num_kinds]
    costs = {(k, i): cost(k, i) for i in range(1, num_kinds + 1) for k in range(i)}
    best = nothing
    for _ in range(most):
        table = [
            min(((table[k][0] + costs[k, i], (*table[k][1], (k, i))) for k in range(i)), default=nothing)
            for i in range(num_kinds + 1)
        ]
        best = min(best, table[num_kinds], key=lambda each: each[0])
    return best[1]


def kinds_of(runs: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges of runs of one length each.

    >>> kinds_of([3, 3, 2, 1, 1])
    [(0, 2), (2, 3), (3, 5)]
    """
    ends = [at for at in range(1, len(runs) + 1) if at == len(runs) or runs[at] != runs[at - 1]]
    return list(zip([0, *ends], ends, strict=False))


def microbatches_of(
    chunked: Chunked, batch: SequenceColumns, *, num_ranks: int, primitive: Primitive, seconds: Sequence[float]
) -> tuple[MicrobatchPlan, ...]:
    """One group of all ranks each, the slice before the whole sequences; `seconds[m]`: predicted."""
    ranks = tuple(range(num_ranks))
    ids = batch.ids.tolist()
    microbatches = []
    for piece, members, predicted_s in zip(chunked.pieces, chunked.members, seconds, strict=True):
        sequences = tuple(ids[position] for position in members)
        slices: tuple[Slice, ...] = ()
        if piece is not None:
            slices = (Slice(sequence=ids[piece.position], start=piece.start, stop=piece.stop),)
            sequences = (ids[piece.position], *sequences)
        group = Group(ranks=ranks, sequences=sequences, primitive=primitive)
        microbatches.append(
            MicrobatchPlan(groups=(group,), group_s=(predicted_s,), predicted_s=predicted_s, slices=slices)
        )
    return tuple(microbatches)


class Draft(NamedTuple):
    """Chunks and their pipeline; `makespan_s` is infinite where memory does not suffice for one."""

    makespan_s: float
    batch: SequenceColumns
    place: Place
    chunked: Chunked
    loads: ChunkLoads


def plan_pipelines(
    sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> Proposal:
    """The fastest plan found.

    Raises:
        InfeasiblePlanError: memory permits none.
    """
    drafts = RecipeSearch(sequences, cluster=cluster, cost=cost, options=options).run()
    if not drafts:
        raise _infeasible_chunks(sequences, cluster=cluster, cost=cost, options=options)
    if drafts[0].makespan_s == np.inf:
        piped(min(drafts, key=lambda each: float(each.loads.held.kept.max())).loads, options=options.pipeline)
    best: tuple[float, Draft, tuple[ChunkPipeline, ...]] | None = None
    feasible = [draft for draft in drafts if draft.makespan_s < np.inf]
    for draft in feasible[: options.pipeline.candidates]:
        found = _grouped(draft, options=options.pipeline)
        seconds = sum(each.makespan_s for each in found)
        if best is None or seconds < best[0]:
            best = seconds, draft, found
    assert best is not None  # of one candidate at least
    return _assembled(best[1], best[2], chunking=options.pipeline.chunking)


class RecipeSearch:
    """Recipes that were tried, and what came of them."""

    def __init__(
        self, sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
    ) -> None:
        self.options, self.max_tokens = options.pipeline, float(cluster.num_ranks * cluster.max_tokens_per_rank)
        self.places = _places(cluster, cost=cost, options=options)
        self.tried: dict[Choice, Draft] = {}
        self.recipes = []
        for place in self.places:
            work = ChunkWork.of(cost, degree=place.num_ranks, primitive=place.primitive, crosses=place.crosses)
            self.recipes.append(
                Recipes.of(
                    SequenceColumns.of(sequences, work=work),
                    work=work,
                    num_ranks=place.num_ranks,
                    max_tokens=self.max_tokens,
                    options=self.options,
                )
            )

    def run(self) -> list[Draft]:
        """Chunks that fit the ranks, the fastest first: of every grain, of the best grains with every bucket size and
        taper, and of the best of these with buckets longer or shorter."""
        for number, recipes in enumerate(self.recipes):
            best_s, worse = np.inf, 0
            for grain in range(len(recipes.grains)):
                draft = self._try(Choice(number, grain, recipes.widths[0], recipes.tapers[0], 1.0))
                worse = worse + 1 if draft.makespan_s > WORSE * best_s else 0
                best_s = min(best_s, draft.makespan_s)
                if worse == TRIES:
                    break
        for choice in self._best(GRAINS):
            recipes = self.recipes[choice.place]
            for width, taper in product(recipes.widths, recipes.tapers):
                self._try(choice._replace(width=width, taper=taper))
        for choice in self._best(STRETCHED):
            for stretch in STRETCHES if self.recipes[choice.place].balanced else ():
                self._try(choice._replace(stretch=stretch))
        fit = (draft for draft in self.tried.values() if draft.chunked.chunks.tokens.max() <= self.max_tokens)
        return sorted(fit, key=lambda draft: draft.makespan_s)

    def _best(self, count: int) -> list[Choice]:
        return sorted(self.tried, key=lambda choice: self.tried[choice].makespan_s)[:count]

    def _try(self, choice: Choice) -> Draft:
        if choice not in self.tried:
            place, recipes = self.places[choice.place], self.recipes[choice.place]
            chunked = recipes.chunked(choice)
            loads = loads_of(chunked.chunks, chunked.runs, place=place)
            self.tried[choice] = Draft(_piped_s(loads, options=self.options), recipes.batch, place, chunked, loads)
        return self.tried[choice]


def _piped_s(loads: ChunkLoads, *, options: PipelineOptions) -> float:
    try:
        return piped(loads, options=options).makespan_s
    except InfeasiblePlanError:
        return np.inf


def _places(cluster: ClusterSpec, *, cost: CostModel, options: PlanConfig) -> list[Place]:
    """All ranks of a stage, by each primitive that they may use."""
    nodes = node_of_ranks(cluster, ranks_per_node=cost.ranks_per_node)
    crosses = len(set(nodes)) > 1
    used = [Primitive(name) for name in options.primitives]
    if cluster.num_ranks == 1:
        used = [Primitive.RING]  # one rank exchanges nothing
    return [
        Place(cost=cost, num_ranks=cluster.num_ranks, primitive=primitive, crosses=crosses)
        for primitive in used
        if np.isfinite(cost.terms(cluster.num_ranks, primitive=primitive)[0].moved_s)
    ]


def _grouped(draft: Draft, *, options: PipelineOptions) -> tuple[ChunkPipeline, ...]:
    """One pipeline, or the best grouping if it recomputes."""
    whole = piped(draft.loads, options=options)
    kinds = kinds_of(draft.loads.runs)
    if options.pipelines == 1 or len(kinds) == 1 or not whole.layers.any():
        return (whole,)

    def cost(first: int, last: int) -> float:
        return _piped_s(draft.loads.part(kinds[first][0], kinds[last - 1][1]), options=options)

    groups = best_groups(cost, num_kinds=len(kinds), most=options.pipelines)
    parts = [draft.loads.part(kinds[first][0], kinds[last - 1][1]) for first, last in groups]
    apart = tuple(piped(each, options=options) for each in parts)
    return apart if sum(each.makespan_s for each in apart) < whole.makespan_s else (whole,)


def _assembled(draft: Draft, found: tuple[ChunkPipeline, ...], *, chunking: str) -> Proposal:
    layers = np.concatenate([each.layers for each in found], axis=1)
    times = draft.loads.times
    backward_s = times.recomputing(layers.astype(np.float64))
    starts = np.cumsum([0, *[each.layers.shape[1] for each in found]]).tolist()
    longest_run = max(draft.loads.runs)
    cut = f"the longest sequence in {longest_run} slices" if longest_run > 1 else "sequences whole"
    return Proposal(
        microbatches=microbatches_of(
            draft.chunked,
            draft.batch,
            num_ranks=draft.place.num_ranks,
            primitive=draft.place.primitive,
            seconds=(times.forward_s.max(axis=0) + backward_s.max(axis=0)).tolist(),
        ),
        pipelines=tuple(
            pipeline_plan(each.order, start=start, recomputed=each.layers, predicted_s=each.makespan_s)
            for each, start in zip(found, starts, strict=False)
        ),
        reason=f"chunks of equal {'time' if chunking == 'balanced' else 'tokens'}, {cut}, the best that was replayed",
    )


def _infeasible_chunks(
    sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> InfeasiblePlanError:
    if not _places(cluster, cost=cost, options=options):
        return InfeasiblePlanError(
            f"plan.primitives is {', '.join(options.primitives)}, the {cluster.num_ranks} ranks of a stage cannot "
            f"share out {cost.num_heads} heads and {cost.num_kv_heads} key/value heads; add ring to plan.primitives"
        )
    longest = max(sequences, key=lambda each: (each.num_tokens, -each.id))
    budget = cluster.num_ranks * cluster.max_tokens_per_rank
    return InfeasiblePlanError(
        f"sequence {longest.id} has {longest.num_tokens} tokens, a chunk holds at most {budget} on {cluster.num_ranks} "
        f"ranks ({cluster.max_tokens_per_rank} each) and plan.pipeline permits no more slices; raise "
        "plan.pipeline.max_slices, lower data.max_seqlen, or add memory"
    )
