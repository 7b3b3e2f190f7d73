"""The pipeline planner: how to chunk, how to group, what to recompute, by which primitive.

Every recipe is chunked and estimated (Eq. 17 on the run without recomputation); the most promising are solved and
replayed exactly, the best of them also in several pipelines. Work is counted in recipes and nodes, never in seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np

from rayfcp.config.plan import PipelineOptions, PlanConfig
from rayfcp.plan.costs.model import CostModel
from rayfcp.plan.pipelines.assemble import microbatches_of
from rayfcp.plan.pipelines.chunks import Chunked
from rayfcp.plan.pipelines.evaluate import Loads, Piped, Place, estimate_s, loads_of, piped
from rayfcp.plan.pipelines.grouping import best_groups, kinds_of
from rayfcp.plan.pipelines.pool import Pool, Work
from rayfcp.plan.pipelines.recipes import STRETCHES, Recipes
from rayfcp.plan.pipelines.recompute import Recomputed
from rayfcp.plan.pipelines.schedule import pipeline_plan
from rayfcp.plan.placement import node_of_ranks
from rayfcp.values import ClusterSpec, InfeasiblePlanError, MicrobatchPlan, PipelinePlan, Primitive, SequenceSpec

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
