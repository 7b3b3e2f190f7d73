"""Ways to chunk a batch that the planner tries: how long a slice is, how many tokens a bucket may hold, and how the
first and the last chunks taper off.

Which sequences share a 1F1B pipeline (InfiniPipe, section 3.3.2): contiguous ranges of numbers of chunks.

Sequences grouped with one of more chunks wait in its window and recompute more; another pipeline costs another
warm-up and cool-down, delta. A window that shrinks with the sequences (ours) leaves grouping little to gain.

From chunks to microbatches of a plan.

The pipeline planner: how to chunk, how to group, what to recompute, by which primitive.

Every recipe is chunked and estimated (Eq. 17 on the run without recomputation); the most promising are solved and
replayed exactly, the best of them also in several pipelines. Work is counted in recipes and nodes, never in seconds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np

from rayfcp.config.models import PipelineOptions, PlanConfig
from rayfcp.cost.model import CostModel
from rayfcp.cost.placement import node_of_ranks
from rayfcp.plan.pipeline.chunks import Chunked, Pool, Recipe, Splits, Work, balanced_ends, chunk, equal_ends, split
from rayfcp.plan.pipeline.evaluate import Loads, Piped, Place, estimate_s, loads_of, piped
from rayfcp.plan.pipeline.recompute import Recomputed
from rayfcp.plan.pipeline.schedule import pipeline_plan
from rayfcp.values import (
    ClusterSpec,
    Group,
    InfeasiblePlanError,
    MicrobatchPlan,
    PipelinePlan,
    Primitive,
    SequenceSpec,
    Slice,
)

COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128, 192, 256)
"""Slices of the longest sequence, and with 1, how many times as long a chunk may take (`DEPTHS`)."""

DEPTHS = (8.0, 6.0, 5.0, 4.0, 3.0, 2.5, 2.0, 1.5, 1.25)

ROOMS = (1.4, 1.0, 2.0)
"""Tokens of a bucket, in those of a slice: 1 is the paper's, with more a bucket of short sequences takes as long."""

TAPERS = (8, 0, 2, 4, 6, 12, 18, 26)
"""Chunks at either end that are shorter than the others, in equal steps."""

STRETCHES = (1.0, 0.8, 0.9, 1.1, 1.2)
"""How many times as long as a slice a bucket may be."""

ROWS = 2
"""Ends that a rank's part of a ring has in each sequence: slices of whole rows are equal on all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipes:
    """All recipes of a batch: by grain (from long chunks to short ones), room and taper, the usual ones first."""

    pool: Pool
    work: Work
    grains: tuple[tuple[float, tuple[int, ...]], ...]
    splits: dict[tuple[int, ...], Splits]
    rooms: tuple[float, ...]
    tapers: tuple[int, ...]
    most_tokens: float
    balanced: bool

    @classmethod
    def of(cls, pool: Pool, *, work: Work, num_ranks: int, most_tokens: float, options: PipelineOptions) -> "Recipes":
        """`most_tokens`: of a chunk."""
        sliced = pool.tokens[pool.sliced]
        longest = int(sliced.max(initial=0)) or int(pool.tokens.max())
        balanced, rows = options.chunking == "balanced", ROWS * num_ranks
        grains = []
        for depth, count in _grains(longest, options=options):
            ends = (
                balanced_ends(longest, count, work=work, rows=rows)
                if balanced
                else equal_ends(longest, count, rows=rows)
            )
            if ends[0] <= most_tokens:
                grains.append((depth, ends))
        return cls(
            pool=pool,
            work=work,
            grains=tuple(grains),
            splits={
                ends: split(pool, ends, work=work, merges=balanced, most_tokens=most_tokens)
                for ends in {ends for _, ends in grains}
            },
            rooms=ROOMS if balanced else (1.0,),
            tapers=TAPERS if balanced and options.order == "elastic" else (0,),
            most_tokens=most_tokens,
            balanced=balanced,
        )

    def chunked(self, grain: int, *, room: float, taper: int, stretch: float) -> Chunked:
        """The chunks of a recipe."""
        recipe = self.recipe(grain, room=room, taper=taper, stretch=stretch)
        return chunk(self.pool, recipe, splits=self.splits[recipe.ends])

    def recipe(self, grain: int, *, room: float, taper: int, stretch: float) -> Recipe:
        """The recipe of the grain with that number, buckets `stretch` times as long as slices."""
        depth, ends = self.grains[grain]
        depth *= stretch
        seconds = self.work.cell_s * self.work.cells(0, ends[0]) + self.work.token_s * ends[0]
        shares = np.arange(1, taper + 1) / (taper + 1)
        return Recipe(
            ends=ends,
            target_s=depth * seconds,
            room=min(room * depth * ends[0], self.most_tokens),
            balanced=self.balanced,
            first=tuple(shares.tolist()),
            last=tuple(shares[::-1].tolist()),
        )


def _grains(longest: int, *, options: PipelineOptions) -> list[tuple[float, int]]:
    """Times that a bucket is as long as a slice, and slices."""
    if options.slices is not None:
        return [(1.0, min(options.slices, longest))]
    counts = [(1.0, count) for count in COUNTS if count <= min(options.max_slices, longest)]
    return [*((depth, 1) for depth in DEPTHS), *counts]


Cost = Callable[[int, int], float]
Groups = tuple[tuple[int, int], ...]


def best_groups(cost: Cost, *, num_kinds: int, most: int) -> Groups:
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
    chunked: Chunked, pool: Pool, *, num_ranks: int, primitive: Primitive, seconds: Sequence[float]
) -> tuple[MicrobatchPlan, ...]:
    """One group of all ranks each, the slice before the whole sequences; `seconds[m]`: predicted."""
    ranks = tuple(range(num_ranks))
    ids = pool.ids.tolist()
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


WORSE = 1.2
"""Shorter chunks are not tried any more when they seem to take so many times the best found, `TRIES` times."""

TRIES = 3

GRAINS = 5
"""Grains of which every room and taper is tried."""

STRETCHED = 8
"""Recipes of which buckets of other lengths are tried."""


class Draft(NamedTuple):
    """Chunks that look as if they took `estimate_s`."""

    estimate_s: float
    pool: Pool
    place: Place
    chunked: Chunked
    loads: Loads


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best plan, what it was chosen from, and how far its recomputation may be above the least."""

    microbatches: tuple[MicrobatchPlan, ...]
    pipelines: tuple[PipelinePlan, ...]
    num_recipes: int
    longest_run: int
    bubble: float
    gap: float


def plan_pipelines(
    sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> Found:
    """The fastest plan found.

    Raises:
        InfeasiblePlanError: memory permits none.
    """
    search = Search(sequences, cluster=cluster, cost=cost, options=options)
    drafts, num_recipes = search.run(), len(search.tried)
    if not drafts:
        raise _nothing(sequences, cluster=cluster, cost=cost, options=options)
    rough = options.pipeline.model_copy(update={"milp_nodes": 0})
    best: tuple[float, Draft, tuple[Piped, ...]] | None = None
    why = None
    for number, draft in enumerate(drafts):
        if best and (number >= options.pipeline.candidates or draft.estimate_s >= best[0]):
            break
        try:
            found = _solved(draft, options=rough)
        except InfeasiblePlanError as error:
            why = why or error
            continue
        seconds = sum(each.makespan_s for each in found)
        if best is None or seconds < best[0]:
            best = seconds, draft, found
    if best is None:
        assert why is not None
        raise why
    return _assembled(best[1], _polished(best[1], best[2], options=options.pipeline), num_recipes=num_recipes)


def _polished(draft: Draft, found: tuple[Piped, ...], *, options: PipelineOptions) -> tuple[Piped, ...]:
    """The same pipelines with the search for less recomputation."""
    if not (options.milp_nodes and any(each.recomputed.gap for each in found)):
        return found
    starts = np.cumsum([0, *[each.order.shape[1] // 2 for each in found]])
    runs = np.searchsorted(np.cumsum([0, *draft.loads.runs]), starts)
    polished = (piped(draft.loads.part(first, last), options=options) for first, last in pairwise(runs.tolist()))
    return tuple(
        better if better.makespan_s <= each.makespan_s else each._replace(recomputed=_certified(each, better))
        for better, each in zip(polished, found, strict=True)
    )


def _certified(kept: Piped, searched: Piped) -> Recomputed:
    """What is kept, with the better bound."""
    return replace(kept.recomputed, bound=max(kept.recomputed.bound, searched.recomputed.bound))


class Choice(NamedTuple):
    """A recipe of one of the places."""

    place: int
    grain: int
    room: float
    taper: int
    stretch: float


class Search:
    """Recipes that were tried, and what came of them."""

    def __init__(
        self, sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
    ) -> None:
        self.options, self.most_tokens = options.pipeline, float(cluster.num_ranks * cluster.max_tokens_per_rank)
        self.places = _places(cluster, cost=cost, options=options)
        self.tried: dict[Choice, Draft] = {}
        self.recipes = []
        for place in self.places:
            work = Work.of(cost, degree=place.num_ranks, primitive=place.primitive, crosses=place.crosses)
            self.recipes.append(
                Recipes.of(
                    Pool.of(sequences, work=work),
                    work=work,
                    num_ranks=place.num_ranks,
                    most_tokens=self.most_tokens,
                    options=self.options,
                )
            )

    def run(self) -> list[Draft]:
        """Chunks that fit the ranks, the most promising first: of every grain, of the best grains with every room and
        taper, and of the best of these with buckets longer or shorter."""
        for number, recipes in enumerate(self.recipes):
            best_s, worse = np.inf, 0
            for grain in range(len(recipes.grains)):
                draft = self._try(Choice(number, grain, recipes.rooms[0], recipes.tapers[0], 1.0))
                worse = worse + 1 if draft.estimate_s > WORSE * best_s else 0
                best_s = min(best_s, draft.estimate_s)
                if worse == TRIES:
                    break
        for choice in self._best(GRAINS):
            recipes = self.recipes[choice.place]
            for room, taper in product(recipes.rooms, recipes.tapers):
                self._try(choice._replace(room=room, taper=taper))
        for choice in self._best(STRETCHED):
            for stretch in STRETCHES if self.recipes[choice.place].balanced else ():
                self._try(choice._replace(stretch=stretch))
        fit = (draft for draft in self.tried.values() if draft.chunked.chunks.tokens.max() <= self.most_tokens)
        return sorted(fit, key=lambda draft: draft.estimate_s)

    def _best(self, count: int) -> list[Choice]:
        return sorted(self.tried, key=lambda choice: self.tried[choice].estimate_s)[:count]

    def _try(self, choice: Choice) -> Draft:
        if choice not in self.tried:
            place, recipes = self.places[choice.place], self.recipes[choice.place]
            chunked = recipes.chunked(choice.grain, room=choice.room, taper=choice.taper, stretch=choice.stretch)
            loads = loads_of(chunked.chunks, chunked.runs, place=place)
            self.tried[choice] = Draft(estimate_s(loads, options=self.options), recipes.pool, place, chunked, loads)
        return self.tried[choice]


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


def _solved(draft: Draft, *, options: PipelineOptions) -> tuple[Piped, ...]:
    """One pipeline, or the best grouping if it recomputes."""
    whole = piped(draft.loads, options=options)
    kinds = kinds_of(draft.loads.runs)
    if options.pipelines == 1 or len(kinds) == 1 or not whole.recomputed.total:
        return (whole,)

    def cost(first: int, last: int) -> float:
        return estimate_s(draft.loads.part(kinds[first][0], kinds[last - 1][1]), options=options)

    groups = best_groups(cost, num_kinds=len(kinds), most=options.pipelines)
    if len(groups) < 2:
        return (whole,)
    parts = [draft.loads.part(kinds[first][0], kinds[last - 1][1]) for first, last in groups]
    try:
        apart = tuple(piped(each, options=options) for each in parts)
    except InfeasiblePlanError:
        return (whole,)
    return apart if sum(each.makespan_s for each in apart) < whole.makespan_s else (whole,)


def _assembled(draft: Draft, found: tuple[Piped, ...], *, num_recipes: int) -> Found:
    layers = np.concatenate([each.recomputed.layers for each in found], axis=1)
    times = draft.loads.times
    seconds = times.forward_s.max(axis=0) + times.recomputing(layers.astype(np.float64)).max(axis=0)
    starts = np.cumsum([0, *[each.order.shape[1] // 2 for each in found]]).tolist()
    total_s = sum(each.makespan_s for each in found)
    total, bound = (sum(getattr(each.recomputed, name) for each in found) for name in ("total", "bound"))
    return Found(
        microbatches=microbatches_of(
            draft.chunked,
            draft.pool,
            num_ranks=draft.place.num_ranks,
            primitive=draft.place.primitive,
            seconds=seconds.tolist(),
        ),
        pipelines=tuple(
            pipeline_plan(each.order, start=start, recomputed=each.recomputed.layers, predicted_s=each.makespan_s)
            for each, start in zip(found, starts, strict=False)
        ),
        num_recipes=num_recipes,
        longest_run=max(draft.loads.runs),
        bubble=sum(each.bubble * each.makespan_s for each in found) / total_s if total_s > 0 else 0.0,
        gap=total / bound - 1 if bound else 0.0,
    )


def _nothing(
    sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> InfeasiblePlanError:
    if not _places(cluster, cost=cost, options=options):
        return InfeasiblePlanError(
            f"plan.primitives is {', '.join(options.primitives)}, the {cluster.num_ranks} ranks of a stage cannot "
            f"share out {cost.num_heads} heads and {cost.num_kv_heads} key/value heads; add ring to plan.primitives"
        )
    longest = max(sequences, key=lambda each: (each.num_tokens, -each.id))
    room = cluster.num_ranks * cluster.max_tokens_per_rank
    return InfeasiblePlanError(
        f"sequence {longest.id} has {longest.num_tokens} tokens, a chunk holds at most {room} on {cluster.num_ranks} "
        f"ranks ({cluster.max_tokens_per_rank} each) and plan.pipeline permits no more slices; raise "
        "plan.pipeline.max_slices, lower data.max_seqlen, or add memory"
    )
