"""FlexSP (Wang et al., ASPLOS 2025): Ulysses groups whose degrees are powers of two, mixed in each microbatch.

Source: arXiv 2412.01523, section 4, and the published solver. Sequences, sorted by length, are cut into microbatches
of consecutive ones with about equal tokens; in each, lengths become buckets (16, by dynamic programming), and a
mixed-integer linear program puts the buckets' sequences onto groups of degrees 1, 2, 4, ..., for the least makespan;
several numbers of microbatches are tried. Solver: HiGHS on one thread with a budget of nodes, so that plans
do not depend on the clock (theirs: SCIP, many threads, a limit in seconds).

It starts from the best homogeneous plan, as theirs: one degree for all; and no plan is worse than the best one for the
whole batch, whatever its microbatches. Seconds of a bucket are those of its mean, not of its upper limit as there,
which on short sequences overstates them by a tenth; its memory is that of the upper limit. Numbers of
microbatches beyond the two that look best homogeneously are dropped, microbatches that one degree runs within 1 % of
the mean are left as they are, and the solver stops within 2 % of its bound. The paper is silent on which sequences of
a bucket a group gets: the longest goes to the group that has the least time so far.

Degrees divide heads. Where plan.primitives allow rings only, groups are rings of such degrees, which FlexSP itself does
not have. A group of one rank exchanges nothing.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from rayfcp.baselines.dynamic_cp import powers_of_two
from rayfcp.baselines.milp import Assignment, Bucket, Counts, Slot, buckets_of, makespan_of, slots_of
from rayfcp.baselines.static_cp import best_static, makespan_s, of_one_degree
from rayfcp.config.models import PlanConfig
from rayfcp.cost.model import CostModel
from rayfcp.plan.assembly import Columns, Draft, assemble, columns_of
from rayfcp.plan.strategies.registry import Proposal, StrategyInfo
from rayfcp.plan.strategies.stages import in_stages
from rayfcp.values import ClusterSpec, InfeasiblePlanError, Primitive, SequenceSpec

NUM_BUCKETS, MAX_BUCKETS = 16, 32
NUM_COUNTS = 2
"""Numbers of microbatches that are solved: those whose homogeneous plans are fastest."""
GOOD = 1.01
"""Times the mean work of a rank: a homogeneous microbatch that takes less is not solved."""

Kinds = Sequence[tuple[int, Primitive]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HomogeneousMicrobatch:
    """A microbatch, the best homogeneous way to run it, and its makespan."""

    members: list[int]
    drafts: list[Draft]
    makespan_s: float


class Blaster:
    """Plans of one batch by numbers of microbatches. `kinds`: degrees, ascending, each with its primitive.

    `gap` is the mean over the MILPs solved last of how far the model's makespan is above its bound.
    """

    def __init__(self, batch: Columns, *, kinds: Kinds, cluster: ClusterSpec, cost: CostModel) -> None:
        self.gap = 0.0
        self._batch, self._kinds, self._cluster, self._cost = batch, kinds, cluster, cost.in_step()
        self._alone = cost

    def run(self, *, max_more: int, num_nodes: int) -> Iterator[list[list[Draft]]]:
        """Drafts for the most promising numbers of microbatches, from the fewest to `max_more` above."""
        cuts: list[list[HomogeneousMicrobatch]] = []
        budget_tokens = self._cluster.num_ranks * self._cluster.max_tokens_per_rank
        first = -(-sum(self._batch.num_tokens) // budget_tokens)
        for count in range(first, len(self._batch.ids) + 1):
            runs = consecutive(self._batch.num_tokens, count)
            found = [part for part in map(self._part, runs) if part is not None]
            if len(found) == len(runs):
                cuts.append(found)
            if cuts and count >= len(cuts[0]) + max_more:
                break
        cuts.sort(key=lambda parts: self._cost.batch_s([part.makespan_s for part in parts]))
        num_parts = sum(len(parts) for parts in cuts[:NUM_COUNTS])
        for parts in cuts[:NUM_COUNTS]:
            gaps: list[float] = []
            drafts = [self._solved(part, num_nodes=max(num_nodes // num_parts, 1), gaps=gaps) for part in parts]
            self.gap = sum(gaps) / len(gaps) if gaps else 0.0
            yield drafts

    def _part(self, members: list[int]) -> HomogeneousMicrobatch | None:
        ways = list(self._ways(members, batch=self._batch))
        timed = [(makespan_s(way, batch=self._batch, cost=self._cost), at) for at, way in enumerate(ways)]
        return (
            HomogeneousMicrobatch(members=members, drafts=ways[min(timed)[1]], makespan_s=min(timed)[0])
            if timed
            else None
        )

    def _ways(self, members: list[int], *, batch: Columns) -> Iterator[list[Draft]]:
        for degree, primitive in self._kinds:
            yield from of_one_degree(
                members, degree=degree, primitive=primitive, batch=batch, cluster=self._cluster, cost=self._cost
            )

    def _solved(self, part: HomogeneousMicrobatch, *, num_nodes: int, gaps: list[float]) -> list[Draft]:
        budget_tokens, num_ranks = self._cluster.max_tokens_per_rank, self._cluster.num_ranks
        work_s = sum(self._batch.compute_s[at] for at in part.members)
        if part.makespan_s <= GOOD * (work_s / num_ranks + self._cost.fixed_s):
            return part.drafts
        lengths = [self._batch.num_tokens[at] for at in part.members]
        buckets = buckets_of(
            lengths,
            [self._batch.pairs[at] for at in part.members],
            num_buckets=NUM_BUCKETS,
            max_buckets=MAX_BUCKETS,
            # half of the free memory, as the published solver has it
            max_rounded_tokens=(sum(lengths) + num_ranks * budget_tokens) / 2,
        )
        slots = slots_of(
            buckets, degrees=self._kinds, num_ranks=num_ranks, budget_tokens=budget_tokens, cost=self._alone
        )
        start = self._start(part, buckets, slots)
        if start is None:
            return part.drafts
        limit_s = makespan_of(slots, start) * (1 + 1e-9)
        solved = Assignment(buckets, slots, num_ranks=num_ranks, limit_s=limit_s).solve(
            start=start, num_nodes=num_nodes
        )
        if solved is None:
            return part.drafts
        gaps.append(solved.gap)
        dealt = self._deal(part, buckets, slots=slots, counts=solved.counts)
        return dealt if makespan_s(dealt, batch=self._batch, cost=self._cost) < part.makespan_s else part.drafts

    def _start(self, part: HomogeneousMicrobatch, buckets: Sequence[Bucket], slots: Sequence[Slot]) -> Counts | None:
        """The best homogeneous counts by the model's seconds and memory; None if none fit upper limits of buckets.
        What is balanced sequence by sequence may not be by means of buckets: they are packed anew too."""
        bucket_of = {part.members[at]: index for index, bucket in enumerate(buckets) for at in bucket.members}
        rounded = dataclasses.replace(
            self._batch, num_tokens=[*self._batch.num_tokens], compute_s=[*self._batch.compute_s]
        )
        for at, index in bucket_of.items():
            rounded.num_tokens[at] = buckets[index].upper_tokens
            rounded.compute_s[at] = self._cost.compute_s(buckets[index].mean_pairs, buckets[index].mean_tokens)
        ways = [*self._ways(part.members, batch=rounded)]
        room = {slot.degree: slot.room for slot in slots}
        if all(sum(rounded.num_tokens[at] for at in each.members) <= room[each.degree] for each in part.drafts):
            ways.append(part.drafts)
        starts = [_counts(way, bucket_of, slots) for way in ways]
        return min(starts, key=lambda counts: makespan_of(slots, counts), default=None)

    def _deal(
        self, part: HomogeneousMicrobatch, buckets: Sequence[Bucket], *, slots: Sequence[Slot], counts: Counts
    ) -> list[Draft]:
        """Which sequence goes where: the most work first, to the group with the least time that its bucket has left."""
        primitives = dict(self._kinds)
        left = counts.copy()
        groups: list[list[int]] = [[] for _ in slots]
        load_s = np.array([float(slot.fixed_s[:, 0].sum()) for slot in slots])
        where = [(at, index) for index, bucket in enumerate(buckets) for at in bucket.members]
        for at, index in sorted(where, key=lambda each: (-self._batch.compute_s[part.members[each[0]]], each)):
            slot = int(np.where(left[:, index] > 0, load_s, np.inf).argmin())
            left[slot, index] -= 1
            groups[slot].append(part.members[at])
            load_s[slot] += self._batch.compute_s[part.members[at]] / slots[slot].degree
        return [
            Draft(members=tuple(sorted(members)), degree=slot.degree, primitive=primitives[slot.degree])
            for slot, members in zip(slots, groups, strict=True)
            if members
        ]


def consecutive(num_tokens: Sequence[int], count: int) -> list[list[int]]:
    """At most `count` runs of consecutive positions with the least largest sum of tokens.

    >>> consecutive([5, 4, 3, 2, 1], 2)
    [[0, 1], [2, 3, 4]]
    """
    low, high = max(*num_tokens, -(-sum(num_tokens) // count)), sum(num_tokens)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_runs(num_tokens, middle)) <= count else (middle + 1, high)
    return _runs(num_tokens, low)


def _runs(num_tokens: Sequence[int], capacity: int) -> list[list[int]]:
    runs: list[list[int]] = []
    free = 0
    for at, tokens in enumerate(num_tokens):
        if not runs or tokens > free:
            runs.append([])
            free = capacity
        runs[-1].append(at)
        free -= tokens
    return runs


def _counts(drafts: Sequence[Draft], bucket_of: dict[int, int], slots: Sequence[Slot]) -> Counts:
    """Groups of one degree in the slots of that degree."""
    counts = np.zeros((len(slots), max(bucket_of.values()) + 1), np.int64)
    first = next(number for number, slot in enumerate(slots) if slot.degree == drafts[0].degree)
    for number, draft in enumerate(drafts):
        for at in draft.members:
            counts[first + number, bucket_of[at]] += 1
    return counts


NUM_NODES = 400
"""Of all MILPs of one batch; about 10 s for 512 sequences on 64 ranks."""


def propose(
    sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> Proposal:
    """The fastest plan found, or the best homogeneous one.

    Raises:
        InfeasiblePlanError: the longest sequence does not fit the largest group that ranks and heads permit.
    """
    batch = columns_of(sequences, cost=cost)
    primitive = Primitive.ULYSSES if Primitive.ULYSSES.value in options.primitives else Primitive.RING
    degrees = [
        degree
        for degree in powers_of_two(cluster.num_ranks)
        if np.isfinite(cost.group_s(1, 1, degree=degree, primitive=primitive))
    ]
    seed = best_static(batch, degrees=degrees, primitive=primitive, cluster=cluster, cost=cost, options=options)
    if seed is None:
        raise _infeasible(batch, degree=degrees[-1], primitive=primitive, cluster=cluster, cost=cost)
    kinds = [(degree, primitive if degree > 1 else Primitive.RING) for degree in degrees]
    blaster = Blaster(batch, kinds=kinds, cluster=cluster, cost=cost)
    best, seconds, reason = seed.microbatches, seed.predicted_s, f"degree {seed.degree} for all was not improved on"
    for drafts in blaster.run(max_more=options.max_microbatches, num_nodes=NUM_NODES):
        mixed = assemble(drafts, batch=batch, cluster=cluster, cost=cost)
        mixed_s = sum(microbatch.predicted_s for microbatch in mixed)
        if mixed_s < seconds:
            best, seconds, reason = mixed, mixed_s, _reason(drafts, blaster)
    return Proposal(microbatches=best, reason=f"{reason}; {primitive.value} groups of powers of two")


def _reason(drafts: Sequence[Sequence[Draft]], blaster: Blaster) -> str:
    return f"mixed degrees in {len(drafts)} microbatches, solved to {100 * blaster.gap:.1f} % of the bound"


def _infeasible(
    batch: Columns, *, degree: int, primitive: Primitive, cluster: ClusterSpec, cost: CostModel
) -> InfeasiblePlanError:
    room = int(cost.room(cluster.max_tokens_per_rank, degree=degree, primitive=primitive))
    heads = (
        f", must divide {cost.num_heads} heads and agree with {cost.num_kv_heads} key/value heads"
        if primitive is Primitive.ULYSSES
        else ""
    )
    return InfeasiblePlanError(
        f"sequence {batch.ids[0]} has {batch.num_tokens[0]} tokens, the largest group of flexsp holds "
        f"{room} ({degree} ranks of {room // degree} tokens: the degree is a power of two, at most "
        f"{cluster.num_ranks} ranks{heads}); lower data.max_seqlen, add memory, or use another strategy"
    )


INFO = StrategyInfo(
    name="flexsp",
    propose=in_stages(propose),
    is_slow=True,
    is_slow_in_stages=True,
    settings_from=("ulysses",),
)
