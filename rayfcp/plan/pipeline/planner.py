"""The pipeline planner: how to chunk a batch, which chunks share a pipeline, by which primitive.

Every recipe is chunked and replayed exactly; the best are also tried in several pipelines (InfiniPipe, section 3.3.2:
contiguous ranges of numbers of chunks). Sequences grouped with one of more chunks wait in its window and recompute
more; another pipeline costs another warm-up and cool-down. Work is counted in recipes, never in seconds.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from rayfcp.config.models import PipelineOptions, PlanConfig
from rayfcp.cost.memory import GIB
from rayfcp.cost.microbatches import StageBytes, StageTimes, chunk_bytes, chunk_passes, stage_times
from rayfcp.cost.model import CostModel
from rayfcp.cost.placement import node_of_ranks
from rayfcp.plan.pipeline.chunks import (
    Buckets,
    Chunked,
    ChunkWork,
    SequenceColumns,
    balanced_ends,
    chunk,
    equal_ends,
    split,
)
from rayfcp.plan.pipeline.kernels.passes import eager_leads
from rayfcp.plan.pipeline.schedule import (
    Order,
    Recompute,
    backward_order,
    leads_of_stages,
    least_leads,
    order_of_leads,
    peak_bytes,
    pipeline_plan,
    recomputed_layers,
    replayed_s,
)
from rayfcp.plan.strategies.registry import Proposal
from rayfcp.values import ClusterSpec, Group, InfeasiblePlanError, MicrobatchPlan, Primitive, SequenceSpec
from rayfcp.values.arrays import Ints

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


AHEAD = 3
"""Microbatches that a stage may be further than the next one where memory permits; more hide nothing."""


class ChunkLoads(NamedTuple):
    """Chunks' seconds and bytes by stage; lengths of their runs."""

    times: StageTimes
    held: StageBytes
    runs: tuple[int, ...]

    def part(self, start: int, stop: int) -> "ChunkLoads":
        """Runs `[start, stop)`."""
        first, last = sum(self.runs[:start]), sum(self.runs[:stop])
        return ChunkLoads(self.times.part(first, last), self.held.part(first, last), self.runs[start:stop])


class ChunkPipeline(NamedTuple):
    """One pipeline of chunks, numbered from 0; `layers[stage, chunk]` are recomputed."""

    order: Order
    layers: Ints
    makespan_s: float


def piped(loads: ChunkLoads, *, options: PipelineOptions) -> ChunkPipeline:
    """One pipeline of the chunks: by 1F1B or, if the order is elastic, with forward passes as early as memory permits,
    whichever is faster.

    Raises:
        InfeasiblePlanError: memory does not suffice.
    """
    times, held, runs = loads
    elastic = options.order == "elastic"
    base = least_leads(runs, shrinking=elastic)
    least = leads_of_stages(base, num_stages=len(held.layers), ahead=1)
    order = order_of_leads(least, runs=runs)
    layers = recomputed_layers(order, held=held, layer_s=times.layer_s, how=options.recompute)
    if layers is None:
        raise infeasible(order, held=held, how=options.recompute)
    orders = [order]
    if elastic:
        most = leads_of_stages(base, num_stages=len(held.layers), ahead=AHEAD)
        orders.append(order_of_leads(eager_leads(least, most, backward_order(runs), held, layers), runs=runs))
    backward_s = times.recomputing(layers.astype(np.float64))
    found = [
        ChunkPipeline(
            each,
            layers,
            replayed_s(each, forward_s=times.forward_s, backward_s=backward_s, transfer_s=times.transfer_s),
        )
        for each in orders
    ]
    return min(found, key=lambda each: each.makespan_s)


def infeasible(order: Order, *, held: StageBytes, how: Recompute) -> InfeasiblePlanError:
    """Name the stage that lacks most when all is recomputed that `how` permits, the bytes and the remedy."""
    peaks = peak_bytes(order, held=held, recomputed=0 if how == "none" else held.layers[:, None])
    stage = int(np.argmax(peaks - held.budget))
    return InfeasiblePlanError(
        f"stage {stage} has {held.budget[stage] / GIB:.3g} GiB beside its states, the microbatches that it holds at a "
        f"time need {peaks[stage] / GIB:.3g} GiB with {'0 layers' if how == 'none' else 'every layer'} recomputed; "
        "add memory or ranks, lower data.max_seqlen, or raise plan.pipeline.max_slices"
    )


class Choice(NamedTuple):
    """A recipe of one of the primitives: the number of its grain, and what buckets are like."""

    primitive: Primitive
    grain: int
    width: float
    taper: int
    stretch: float


class Draft(NamedTuple):
    """Chunks and their pipeline; `makespan_s` is infinite where memory does not suffice for one."""

    makespan_s: float
    primitive: Primitive
    chunked: Chunked
    loads: ChunkLoads


class Recipes:
    """All recipes of a batch, whose chunks all ranks of a stage share by one primitive: by grain (from long chunks to
    short ones), width and taper, the usual ones first."""

    def __init__(
        self,
        sequences: Sequence[SequenceSpec],
        *,
        primitive: Primitive,
        cluster: ClusterSpec,
        cost: CostModel,
        options: PipelineOptions,
    ) -> None:
        crosses = len(set(node_of_ranks(cluster, ranks_per_node=cost.ranks_per_node))) > 1
        self._primitive, self._crosses, self._cost, self._options = primitive, crosses, cost, options
        self._num_ranks, self._max_tokens = cluster.num_ranks, float(cluster.num_ranks * cluster.max_tokens_per_rank)
        self._work = ChunkWork.of(cost, degree=self._num_ranks, primitive=primitive, crosses=crosses)
        self._batch = SequenceColumns.of(sequences, work=self._work)
        self.balanced, rows = options.chunking == "balanced", ROW_ENDS * self._num_ranks
        self.widths = WIDTHS if self.balanced else (1.0,)
        self.tapers = TAPERS if self.balanced and options.order == "elastic" else (0,)
        longest = int(self._batch.tokens.max())
        self.grains: list[tuple[float, tuple[int, ...]]] = []
        for depth, count in _grains(longest, options=options):
            if self.balanced:
                ends = balanced_ends(longest, count, work=self._work, rows=rows)
            else:
                ends = equal_ends(longest, count, rows=rows)
            if ends[0] <= self._max_tokens:
                self.grains.append((depth, ends))
        self._splits = {
            ends: split(self._batch, ends, work=self._work, merges=self.balanced, max_tokens=self._max_tokens)
            for ends in {ends for _, ends in self.grains}
        }

    def draft(self, choice: Choice) -> Draft:
        """The chunks of a recipe, replayed."""
        depth, ends = self.grains[choice.grain]
        depth *= choice.stretch
        buckets = Buckets(
            max_tokens=min(choice.width * depth * ends[0], self._max_tokens),
            target_s=depth * self._work.seconds(0, ends[0]) if self.balanced else None,
            taper=choice.taper,
        )
        chunked = chunk(self._batch, buckets, splits=self._splits[ends])
        loads = self._loads(chunked)
        return Draft(_piped_s(loads, options=self._options), self._primitive, chunked, loads)

    def _loads(self, chunked: Chunked) -> ChunkLoads:
        """Of all chunks of a step: the first gathers, the last backward pass reduces, where that is once a step."""
        chunks, cost, degree, primitive = chunked.chunks, self._cost, self._num_ranks, self._primitive
        passes = chunk_passes(chunks, cost=cost, degree=degree, primitive=primitive, crosses=self._crosses)
        times = stage_times(passes, cost=cost, gathers=0, reduces=int(backward_order(chunked.runs)[-1]))
        return ChunkLoads(times, chunk_bytes(chunks, cost=cost, degree=degree, primitive=primitive), chunked.runs)


def _grains(longest: int, *, options: PipelineOptions) -> list[tuple[float, int]]:
    """Depth of buckets, and slices of the longest sequence."""
    if options.slices is not None:
        return [(1.0, min(options.slices, longest))]
    counts = [(1.0, count) for count in COUNTS if count <= min(options.max_slices, longest)]
    return [*((depth, 1) for depth in DEPTHS), *counts]


def best_groups(cost: Callable[[int, int], float], *, num_kinds: int, most: int) -> tuple[tuple[int, int], ...]:
    """Ranges of `num_kinds` kinds of sequences, most chunks first, into at most `most` pipelines of the least cost.

    dp[i] = min over k < i of dp[k] + `cost(k, i)` (Eq. 14), which is delta and the recomputation of kinds [k, i); no
    pipelines if all cost infinitely much.
    """
    nothing: tuple[float, tuple[tuple[int, int], ...]] = (float("inf"), ())
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
    chunked: Chunked, *, num_ranks: int, primitive: Primitive, seconds: Sequence[float]
) -> tuple[MicrobatchPlan, ...]:
    """One group of all ranks each, the slice before the whole sequences; `seconds[m]`: predicted."""
    ranks = tuple(range(num_ranks))
    microbatches = []
    for piece, whole, predicted_s in zip(chunked.slices, chunked.members, seconds, strict=True):
        slices = () if piece is None else (piece,)
        sequences = (*(each.sequence for each in slices), *whole)
        group = Group(ranks=ranks, sequences=sequences, primitive=primitive)
        microbatches.append(
            MicrobatchPlan(groups=(group,), group_s=(predicted_s,), predicted_s=predicted_s, slices=slices)
        )
    return tuple(microbatches)


def plan_pipelines(
    sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> Proposal:
    """The fastest plan found.

    Raises:
        InfeasiblePlanError: memory permits none.
    """
    recipes = {
        primitive: Recipes(sequences, primitive=primitive, cluster=cluster, cost=cost, options=options.pipeline)
        for primitive in _usable(cluster, cost=cost, options=options)
    }
    max_tokens = cluster.num_ranks * cluster.max_tokens_per_rank
    drafts = [each for each in RecipeSearch(recipes).run() if each.chunked.chunks.tokens.max() <= max_tokens]
    if not drafts:
        raise _too_long(sequences, cluster=cluster)
    if drafts[0].makespan_s == np.inf:
        piped(min(drafts, key=lambda each: float(each.loads.held.kept.max())).loads, options=options.pipeline)
    feasible = [draft for draft in drafts if draft.makespan_s < np.inf]
    grouped = [(draft, _grouped(draft, options=options.pipeline)) for draft in feasible[: options.pipeline.candidates]]
    draft, found = min(grouped, key=lambda each: sum(pipeline.makespan_s for pipeline in each[1]))
    return _assembled(draft, found, num_ranks=cluster.num_ranks, chunking=options.pipeline.chunking)


class RecipeSearch:
    """Recipes that were tried, and what came of them."""

    def __init__(self, recipes: Mapping[Primitive, Recipes]) -> None:
        self.recipes = recipes
        self.tried: dict[Choice, Draft] = {}

    def run(self) -> list[Draft]:
        """Chunks, the fastest first: of every grain, of the best grains with every bucket size and taper, and of the
        best of these with buckets longer or shorter."""
        for primitive, recipes in self.recipes.items():
            best_s, worse = np.inf, 0
            for grain in range(len(recipes.grains)):
                draft = self._try(Choice(primitive, grain, recipes.widths[0], recipes.tapers[0], 1.0))
                worse = worse + 1 if draft.makespan_s > WORSE * best_s else 0
                best_s = min(best_s, draft.makespan_s)
                if worse == TRIES:
                    break
        for choice in self._best(GRAINS):
            recipes = self.recipes[choice.primitive]
            for width, taper in product(recipes.widths, recipes.tapers):
                self._try(choice._replace(width=width, taper=taper))
        for choice in self._best(STRETCHED):
            for stretch in STRETCHES if self.recipes[choice.primitive].balanced else ():
                self._try(choice._replace(stretch=stretch))
        return sorted(self.tried.values(), key=lambda draft: draft.makespan_s)

    def _best(self, count: int) -> list[Choice]:
        return sorted(self.tried, key=lambda choice: self.tried[choice].makespan_s)[:count]

    def _try(self, choice: Choice) -> Draft:
        if choice not in self.tried:
            self.tried[choice] = self.recipes[choice.primitive].draft(choice)
        return self.tried[choice]


def _piped_s(loads: ChunkLoads, *, options: PipelineOptions) -> float:
    try:
        return piped(loads, options=options).makespan_s
    except InfeasiblePlanError:
        return np.inf


def _usable(cluster: ClusterSpec, *, cost: CostModel, options: PlanConfig) -> list[Primitive]:
    """Primitives by which all ranks of a stage may share each chunk.

    Raises:
        InfeasiblePlanError: there is none.
    """
    used = [Primitive(name) for name in options.primitives]
    if cluster.num_ranks == 1:
        used = [Primitive.RING]  # one rank exchanges nothing
    usable = [each for each in used if np.isfinite(cost.terms(cluster.num_ranks, primitive=each)[0].moved_s)]
    if not usable:
        raise InfeasiblePlanError(
            f"plan.primitives is {', '.join(options.primitives)}, the {cluster.num_ranks} ranks of a stage cannot "
            f"share out {cost.num_heads} heads and {cost.num_kv_heads} key/value heads; add ring to plan.primitives"
        )
    return usable


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


def _assembled(draft: Draft, found: tuple[ChunkPipeline, ...], *, num_ranks: int, chunking: str) -> Proposal:
    layers = np.concatenate([each.layers for each in found], axis=1)
    times = draft.loads.times
    backward_s = times.recomputing(layers.astype(np.float64))
    starts = np.cumsum([0, *[each.layers.shape[1] for each in found]]).tolist()
    longest_run = max(draft.loads.runs)
    cut = f"the longest sequence in {longest_run} slices" if longest_run > 1 else "sequences whole"
    return Proposal(
        microbatches=microbatches_of(
            draft.chunked,
            num_ranks=num_ranks,
            primitive=draft.primitive,
            seconds=(times.forward_s.max(axis=0) + backward_s.max(axis=0)).tolist(),
        ),
        pipelines=tuple(
            pipeline_plan(each.order, start=start, recomputed=each.layers, predicted_s=each.makespan_s)
            for each, start in zip(found, starts, strict=False)
        ),
        reason=f"chunks of equal {'time' if chunking == 'balanced' else 'tokens'}, {cut}, the best that was replayed",
    )


def _too_long(sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec) -> InfeasiblePlanError:
    longest = max(sequences, key=lambda each: (each.num_tokens, -each.id))
    budget = cluster.num_ranks * cluster.max_tokens_per_rank
    return InfeasiblePlanError(
        f"sequence {longest.id} has {longest.num_tokens} tokens, a chunk holds at most {budget} on {cluster.num_ranks} "
        f"ranks ({cluster.max_tokens_per_rank} each) and plan.pipeline permits no more slices; raise "
        "plan.pipeline.max_slices, lower data.max_seqlen, or add memory"
    )
