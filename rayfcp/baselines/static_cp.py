"""Static context parallelism as in Megatron-LM: one degree for the whole batch, zig-zag rings.

N ranks are N / d groups of d ranks. Sequences are packed, packs are dealt to the groups, and all groups run
the same number of microbatches; those without a pack left run one padding token.

Source: Megatron-LM's `context_parallel_size`, which must divide the ranks; groups of consecutive ranks, the
others in data parallelism; sequences packed, up to degree x tokens per rank; per-rank work halves zig-zag.
Tuned as its authors would: every divisor of N is tried as degree and every number of microbatches, up to
`plan.max_microbatches` above the fewest.

The source packs sequences before training or, in the order in which they come, into bins of the
capacity, by tokens alone; it is silent on which packing suits a batch. `plan.packing: bfd` is that standard,
at its best: best-fit decreasing by length, at the least capacity that needs no more microbatches. Otherwise
packs are also balanced by time, which Megatron-LM does not do, and the better is taken. Packs are dealt
by time, so that groups that wait for each other hold packs of like time.
The degree is chosen per batch, not once for a run: the strongest that a static planner could be.
Over several pipeline stages, packs pass by 1F1B; degree and microbatch count are chosen by the pipeline's makespan.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np
import numpy.typing as npt

from rayfcp.config.models import PlanConfig
from rayfcp.cost.model import CostModel
from rayfcp.cost.placement import node_of_ranks, place_groups, ranks_of_nodes
from rayfcp.plan.assembly import Columns, Draft, assemble, best_fit_decreasing, bins_of, columns_of
from rayfcp.plan.strategies.registry import Proposal, StrategyInfo
from rayfcp.plan.strategies.stages import as_if_whole, counts
from rayfcp.values import ClusterSpec, InfeasiblePlanError, MicrobatchPlan, Primitive, SequenceSpec
from rayfcp.values.arrays import Floats


def makespan_s(drafts: Sequence[Draft], *, batch: Columns, cost: CostModel) -> float:
    """Seconds of a microbatch without what shards add, links as the degree has them as a rule."""
    passes_s = [
        cost.passes_s(
            sum(batch.pairs[at] for at in draft.members),
            sum(batch.num_tokens[at] for at in draft.members),
            degree=draft.degree,
            primitive=draft.primitive,
            num_sequences=sum(batch.counts[at] for at in draft.members),
        )
        for draft in drafts
    ]
    return cost.makespan_s(np.transpose(passes_s))


def of_one_degree(
    members: Sequence[int],
    *,
    degree: int,
    primitive: Primitive,
    batch: Columns,
    cluster: ClusterSpec,
    cost: CostModel,
) -> list[list[Draft]]:
    """Up to two ways to run `members` (longest first) in one microbatch on groups of `degree` ranks: longest time first
    to the group with the least, and best-fit decreasing by length; those of them that fit."""
    lengths = [batch.num_tokens[at] for at in members]
    budget_tokens = int(cost.room(cluster.max_tokens_per_rank, degree=degree, primitive=primitive))
    num_groups = cluster.num_ranks // degree
    if not num_groups or max(lengths) > budget_tokens:
        return []
    work_s = [batch.compute_s[at] for at in members]
    order = sorted(range(len(lengths)), key=lambda at: -work_s[at])
    balanced = least_loaded(order, lengths, work_s=work_s, loads_s=[0.0] * num_groups, budget_tokens=budget_tokens)
    owners = best_fit_decreasing(lengths, capacity_tokens=budget_tokens, max_bins=num_groups)
    ways = [balanced, bins_of(owners) if owners is not None else None]
    return [
        [Draft(members=tuple(members[at] for at in each), degree=degree, primitive=primitive) for each in way if each]
        for way in ways
        if way is not None
    ]


def least_loaded(
    order: Iterable[int],
    lengths: Sequence[int],
    *,
    work_s: Sequence[float],
    loads_s: Sequence[float],
    budget_tokens: int,
) -> list[list[int]] | None:
    """Positions in each bin: in `order`, each goes to the bin with the least load (`loads_s` at first) whose budget
    holds it; None if one fits nowhere."""
    heap = [(load_s, index) for index, load_s in enumerate(loads_s)]
    heapify(heap)
    left_tokens = [budget_tokens] * len(heap)
    bins: list[list[int]] = [[] for _ in heap]
    for at in order:
        passed = []
        while heap and left_tokens[heap[0][1]] < lengths[at]:
            passed.append(heappop(heap))
        if not heap:
            return None
        load_s, index = heappop(heap)
        bins[index].append(at)
        left_tokens[index] -= lengths[at]
        if left_tokens[index]:
            passed.append((load_s + work_s[at], index))
        for each in passed:
            heappush(heap, each)
    return bins


Owners = Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Static:
    """The best static plan, and among how many it was found."""

    degree: int
    microbatches: tuple[MicrobatchPlan, ...]
    num_packings: int

    @property
    def predicted_s(self) -> float:
        return sum(microbatch.predicted_s for microbatch in self.microbatches)


def divisors(num_ranks: int) -> tuple[int, ...]:
    """Degrees that cut the ranks into whole groups.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    return tuple(degree for degree in range(1, num_ranks + 1) if num_ranks % degree == 0)


def best_static(
    batch: Columns,
    *,
    degrees: Iterable[int],
    primitive: Primitive,
    cluster: ClusterSpec,
    cost: CostModel,
    options: PlanConfig,
) -> Static | None:
    """The cheapest over all degrees and microbatch counts; None if at no degree a group holds the longest sequence.

    Degrees divide `cluster.num_ranks`. For each, counts go from the fewest that memory permits to
    `options.max_microbatches` above, and stop where the sum of all work and of the fixed costs alone passes
    the best found: no larger count can be better. Sequences are packed by length, best-fit decreasing, at
    the least capacity that needs no more packs than there are places (`options.packing` bfd: the standard); else
    also longest time first into the pack with the least time, and the better of both is taken.
    """
    best: Static | None = None
    num_packings = 0
    for degree in degrees:
        search = _Search(batch, degree=degree, primitive=primitive, cluster=cluster, cost=cost)
        if batch.num_tokens[0] > search.budget_tokens:
            continue
        owners = search.run(options, limit_s=best.predicted_s if best else np.inf)
        num_packings += search.num_packings
        if owners is None:
            continue
        found = Static(degree=degree, microbatches=search.dealt(owners), num_packings=0)
        if best is None or found.predicted_s < best.predicted_s:
            best = found
    if best is None:
        return None
    return Static(degree=best.degree, microbatches=best.microbatches, num_packings=num_packings)


def dealt_into(
    batch: Columns,
    *,
    degree: int,
    primitive: Primitive,
    counts: Iterable[int],
    cluster: ClusterSpec,
    cost: CostModel,
    options: PlanConfig,
) -> Iterator[tuple[MicrobatchPlan, ...]]:
    """Plans of at most so many microbatches at one degree, at which a group holds the longest sequence, packed as
    `best_static` does; where memory does not permit so few, of the fewest."""
    search = _Search(batch, degree=degree, primitive=primitive, cluster=cluster, cost=cost)
    for count in sorted({max(count, search.fewest) for count in counts}):
        for owners in search.packings(count, by_time=options.packing != "bfd"):
            yield search.dealt(owners)


class _Search:
    """Packings of a batch at one degree."""

    def __init__(
        self, batch: Columns, *, degree: int, primitive: Primitive, cluster: ClusterSpec, cost: CostModel
    ) -> None:
        self.batch, self.cluster, self.cost = batch, cluster, cost
        # a group of one rank exchanges nothing: it is a ring of one
        self.degree, self.primitive = degree, primitive if degree > 1 else Primitive.RING
        self.num_groups = cluster.num_ranks // degree
        self.budget_tokens = int(cost.room(cluster.max_tokens_per_rank, degree=degree, primitive=self.primitive))
        self.num_packings = 0
        self._tokens = np.array(batch.num_tokens, np.float64)
        self._pairs = np.array(batch.pairs, np.float64)
        self._counts = np.array(batch.counts, np.float64)
        self._crosses = _crossing(degree, num_groups=self.num_groups, cluster=cluster, cost=cost)
        # of each sequence in a group, without what is fixed and what attention's messages add
        forward, backward = (
            self._pairs * each.attention_s_per_pair
            + self._tokens * (each.attention_s_per_token + each.linear_s_per_token + each.states_s_per_token)
            + self._counts * each.states_s_per_sequence
            for each in cost.terms(degree, primitive=self.primitive)
        )
        self._work_s: Floats = forward + backward

    def run(self, options: PlanConfig, *, limit_s: float) -> Owners | None:
        """The pack of each sequence in the cheapest packing; None if none can be below `limit_s`."""
        best_s, best = limit_s, None
        for count in range(self.fewest, min(self.fewest + options.max_microbatches, len(self.batch.ids)) + 1):
            if self._least_s(count) >= best_s:
                break
            for owners in self.packings(count, by_time=options.packing != "bfd"):
                self.num_packings += 1
                seconds = self._batch_s(owners)
                if seconds < best_s:
                    best_s, best = seconds, owners
        return best

    @functools.cached_property
    def fewest(self) -> int:
        """Microbatches that best-fit decreasing needs."""
        packed = best_fit_decreasing(self.batch.num_tokens, capacity_tokens=self.budget_tokens) or []
        return -(-(max(packed) + 1) // self.num_groups)

    def dealt(self, owners: Owners) -> tuple[MicrobatchPlan, ...]:
        """Packs of like time side by side: the longest of all groups in one microbatch, and so on."""
        packs = bins_of(owners)
        seconds = self._usual_s(self._loads(owners))
        order = sorted(range(len(packs)), key=lambda index: (-seconds[index], packs[index]))
        drafts = [
            Draft(members=tuple(packs[index]), degree=self.degree, primitive=self.primitive)
            for index in order
            if packs[index]
        ]
        dealt = [drafts[start : start + self.num_groups] for start in range(0, len(drafts), self.num_groups)]
        return assemble(dealt, batch=self.batch, cluster=self.cluster, cost=self.cost)

    def packings(self, count: int, *, by_time: bool) -> Iterator[Owners]:
        yield self._by_length(count * self.num_groups)
        balanced = self._by_time(count * self.num_groups) if by_time else None
        if balanced is not None:
            yield balanced

    def _by_length(self, max_packs: int) -> Owners:
        low, high = max(self.batch.num_tokens[0], -(-int(self._tokens.sum()) // max_packs)), self.budget_tokens
        best = best_fit_decreasing(self.batch.num_tokens, capacity_tokens=high, max_bins=max_packs)
        while low < high:
            middle = (low + high) // 2
            owners = best_fit_decreasing(self.batch.num_tokens, capacity_tokens=middle, max_bins=max_packs)
            low, high, best = (middle + 1, high, best) if owners is None else (low, middle, owners)
        return best or []

    def _by_time(self, num_packs: int) -> Owners | None:
        order = np.argsort(-self._work_s, kind="stable").tolist()
        bins = least_loaded(
            order,
            self.batch.num_tokens,
            work_s=self._work_s.tolist(),
            loads_s=[0.0] * num_packs,
            budget_tokens=self.budget_tokens,
        )
        if bins is None:
            return None
        owners = [0] * len(order)
        for index, members in enumerate(bins):
            for at in members:
                owners[at] = index
        return owners

    def _least_s(self, count: int) -> float:
        """At most the seconds of any plan of `count` microbatches at this degree: all groups share all work, and
        one of them works on the longest sequence."""
        cost, batch = self.cost, self.batch
        longest = batch.pairs[0], batch.num_tokens[0], batch.counts[0]
        alone_s = min(self._passes_s(*longest, crosses=each, cost=cost).sum() for each in set(self._crosses))
        work_s = max(float(self._work_s.sum()) / self.num_groups, float(alone_s) - cost.fixed_s)
        exposed_s = count * cost.exposed_s + cost.reduce_exposed_s
        return max(work_s + count * cost.fixed_s + exposed_s, count * cost.shard_s + cost.reduce_s)

    def _batch_s(self, owners: Owners) -> float:
        """Seconds of the microbatches that `dealt` makes, where the longest pack of each gets the first ranks."""
        loads = self._loads(owners)
        order = np.argsort(-self._usual_s(loads), kind="stable")
        crosses = np.resize(self._crosses, len(order))
        first = np.arange(0, len(order), self.num_groups)

        def makespans(*, last: bool) -> list[float]:
            cost = self.cost.in_step(last=last)
            inside_s, across_s = (
                self._passes_s(*loads, crosses=each, cost=cost)[:, order] * (loads[1][order] > 0)
                for each in (False, True)
            )
            placed_s = np.where(crosses, across_s, inside_s)
            found: list[float] = np.maximum.reduceat(placed_s, first, axis=1).sum(axis=0).tolist()
            return found

        last_s = makespans(last=True)
        others_s = sorted(makespans(last=False) if len(last_s) > 1 else [0.0])[:-1]
        return sum(self.cost.microbatch_s(each, last=False) for each in others_s) + (
            self.cost.microbatch_s(max(last_s), last=True)
        )

    def _loads(self, owners: Owners) -> list[Floats]:
        """Pairs, tokens and sequences of each pack."""
        return [np.bincount(owners, each).astype(np.float64) for each in (self._pairs, self._tokens, self._counts)]

    def _usual_s(self, loads: Sequence[Floats]) -> Floats:
        """Seconds of each pack with links as the degree has them as a rule."""
        usual_s = self._passes_s(*loads, crosses=self.degree > self.cost.ranks_per_node, cost=self.cost).sum(axis=0)
        return np.asarray(usual_s * (loads[1] > 0))

    def _passes_s(
        self, pairs: npt.ArrayLike, tokens: npt.ArrayLike, counts: npt.ArrayLike, *, crosses: bool, cost: CostModel
    ) -> Floats:
        """[pass, pack]."""
        passes_s = cost.passes_s(
            pairs, tokens, degree=self.degree, primitive=self.primitive, crosses=crosses, num_sequences=counts
        )
        return np.stack(passes_s)


def _crossing(degree: int, *, num_groups: int, cluster: ClusterSpec, cost: CostModel) -> list[bool]:
    """Whether the first, second, ... group of a microbatch spans nodes."""
    nodes = node_of_ranks(cluster, ranks_per_node=cost.ranks_per_node)
    placed = place_groups([degree] * num_groups, ranks_of_nodes(cluster, ranks_per_node=cost.ranks_per_node))
    return [len({nodes[rank] for rank in ranks}) > 1 for ranks in placed]


def static_proposal(
    sequences: Sequence[SequenceSpec],
    degrees: Sequence[int],
    *,
    primitive: Primitive,
    cluster: ClusterSpec,
    cost: CostModel,
    options: PlanConfig,
    what: str,
) -> Proposal | None:
    """The best over all degrees and, over stages, a few microbatch counts; None if at no degree a group holds the
    longest sequence. `what` describes the degree in the reason.

    As in Megatron-LM one number of layers is recomputed on every stage, the least that memory permits.

    Raises:
        InfeasiblePlanError: No degree fits the memory of all stages.
    """
    given: dict[str, Any] = {"primitive": primitive, "cluster": cluster, "options": options}
    if cluster.num_stages == 1:
        best = best_static(columns_of(sequences, cost=cost), degrees=degrees, cost=cost, **given)
        if best is None:
            return None
        reason = f"degree {best.degree} {what} of {best.num_packings} ways to pack the batch"
        return Proposal(microbatches=best.microbatches, reason=reason)
    from rayfcp.plan.pipeline.batch_level import best_pipeline

    longest = max(sequence.num_tokens for sequence in sequences)
    fitting = [degree for degree in degrees if longest <= degree * cluster.max_tokens_per_rank]
    if not fitting:
        return None
    whole = as_if_whole(cost, num_stages=cluster.num_stages)
    batch, sizes = columns_of(sequences, cost=whole), counts(sequences, cluster=cluster)
    candidates = (
        Proposal(microbatches=microbatches, reason=f"degree {degree} is the best static one")
        for degree in fitting
        for microbatches in dealt_into(batch, degree=degree, counts=sizes, cost=whole, **given)
    )
    return best_pipeline(candidates, sequences, cluster=cluster, cost=cost)


def possible(
    degrees: Iterable[int], *, sequences: Sequence[SequenceSpec], cluster: ClusterSpec, cost: CostModel
) -> list[int]:
    """Degrees that a ring may have where recurrent layers exchange tokens for heads, all others elsewhere.

    Raises:
        InfeasiblePlanError: The largest does not hold the longest sequence.
    """
    found = [degree for degree in degrees if np.isfinite(cost.terms(degree)[0].moved_s)]
    longest, held = max(each.num_tokens for each in sequences), found[-1] * cluster.max_tokens_per_rank
    if longest > held:
        raise InfeasiblePlanError(
            f"the longest sequence has {longest} tokens, the largest group whose degree divides the heads of recurrent "
            f"layers holds {held} ({found[-1]} ranks of {cluster.max_tokens_per_rank} tokens); lower data.max_seqlen, "
            "add memory, or use a strategy that passes states"
        )
    return found


def propose(
    sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> Proposal:
    """The cheapest degree; N itself always holds the longest sequence, where recurrent layers can have it.

    Raises:
        InfeasiblePlanError: Stages do not have the memory, or heads of recurrent layers permit no degree that holds the
            longest sequence.
    """
    degrees = possible(divisors(cluster.num_ranks), sequences=sequences, cluster=cluster, cost=cost)
    found = static_proposal(
        sequences,
        degrees,
        primitive=Primitive.RING,
        cluster=cluster,
        cost=cost,
        options=options,
        what="is the best static one",
    )
    assert found is not None
    return found


INFO = StrategyInfo(name="static-cp", propose=propose, primitive=Primitive.RING, shares_recurrent_heads=True)
