"""Flexible groups on ranks of unequal speed.

A ring gives all its ranks equal work, so that a slow one makes all others wait. Ranks of about one speed, the pool, are
shared out by groups of any degree, as if all were as slow as the slowest of them. The others are in pinned groups: of
fixed ranks in every microbatch, of one rank, or of several for longer sequences, which take what fits in the time. The
search gives them sequences as it does to other groups, at their own speed, or leaves them empty. Sequences that the
pool has no memory for go to microbatches of their own, with a larger pool. Several pools and sizes of pinned groups are
planned, and the best of these plans is taken, then for each of its microbatches the best pool. Plans that do not keep
the constraints are dropped. Where groups must have consecutive ranks, the search gives degrees only, and each group the
best ranks (`assemble`).
"""

import dataclasses
from collections.abc import Iterable, Sequence
from operator import attrgetter

import numpy as np

from rayfcp.config.constraints import HostConstraints
from rayfcp.config.models import PlanConfig
from rayfcp.cost.bound import lower_bound
from rayfcp.cost.model import CostModel, slowed, speeds_of
from rayfcp.cost.placement import node_of_ranks
from rayfcp.plan.assembly import Columns, Draft, assemble, columns_of, exchange_degrees, members_of, united
from rayfcp.plan.constraints import broken_constraint, has_units, is_constrained
from rayfcp.plan.groups.planner import GroupPlanner, PinnedGroup, step_of
from rayfcp.plan.moves import FIRST, moves_of
from rayfcp.plan.strategies.registry import Proposal
from rayfcp.values import ClusterSpec, InfeasiblePlanError, MicrobatchPlan, Primitive, SequenceSpec
from rayfcp.values.arrays import Floats

ALIKE = 0.05  # relative difference of speeds in a pool: waiting costs less than what pinned groups cannot share
POOLS = 2  # of ranks of about one speed that are tried, and as many of all ranks above some speed
LEAST = 0.5  # of the speeds of the best pool: a smaller one can ring too little
LEVELS = 16  # of speeds
MOST_SIZES = 8  # of pinned groups: of more permitted degrees, powers of two are tried
MOST_PINNED = 64
GOOD_ENOUGH = 1.02  # times the lower bound: nothing else is tried
FAR = 1.05  # times the lower bound: each microbatch tries all pools; below, that takes twice as long for 0.1 %


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankPool:
    """Ranks that groups share out, the speed of the slowest, and pinned groups, with speeds over that."""

    ranks: tuple[int, ...]
    speed: float
    pinned: tuple[PinnedGroup, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """A plan with one pool, or with one for each microbatch, as drafts and with named ranks."""

    pool: RankPool
    drafts: list[list[Draft]]
    proposal: Proposal

    @property
    def seconds(self) -> float:
        return self.proposal.predicted_s


def propose_unequal(
    sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> Proposal:
    """Return the best of the plans with each pool, with the first moves; the others go to that pool. A plan that may be
    far from the best gets the best pool for each of its microbatches.

    Raises:
        InfeasiblePlanError: a sequence that no group of the allowed primitives can hold.
    """
    used, constraints = tuple(Primitive(name) for name in options.primitives), options.constraints
    bound_s = lower_bound(sequences, cluster=cluster, cost=cost, primitives=used, constraints=constraints)
    moves = moves_of(options, num_ranks=cluster.num_ranks, num_sequences=len(sequences))
    few = options.model_copy(update={"search_moves": min(moves, FIRST)})
    search = _PoolSearch(columns_of(sequences, cost=cost), cluster=cluster, cost=cost)
    best = search.best(sequences, options=few, enough_s=GOOD_ENOUGH * bound_s)
    if moves > FIRST:
        best = search.planned(sequences, best.pool, options=options)
    if best.seconds > FAR * bound_s:
        best = min(best, search.repooled(best, sequences, options=few), key=attrgetter("seconds"))
    return best.proposal


class _PoolSearch:
    """Plans of one batch, or of some of its sequences, with several pools."""

    def __init__(self, batch: Columns, *, cluster: ClusterSpec, cost: CostModel) -> None:
        self._batch, self._cluster, self._cost = batch, cluster, cost

    def best(
        self,
        sequences: Sequence[SequenceSpec],
        *,
        options: PlanConfig,
        enough_s: float = 0.0,
        first: PoolPlan | None = None,
    ) -> PoolPlan:
        """Return the best of the plans with each pool and of `first`; the first that takes at most `enough_s`.

        Raises:
            InfeasiblePlanError: no pool has a plan.
        """
        best, why = first, InfeasiblePlanError("no pool was tried")
        for pool in _permitted(cluster=self._cluster, cost=self._cost, constraints=options.constraints):
            if best is not None and best.seconds <= enough_s:
                break
            floor_s = 0.0 if best is None else self._floor_s(sequences, pool, options=options)
            if best is not None and floor_s >= best.seconds:
                continue
            try:
                found = self.planned(sequences, pool, options=options)
            except InfeasiblePlanError as error:  # no degree of its ranks shares out the heads or keeps the constraints
                why = error
                continue
            best = found if best is None or found.seconds < best.seconds else best
        if best is None:
            raise why
        return best

    def planned(self, sequences: Sequence[SequenceSpec], pool: RankPool, *, options: PlanConfig) -> PoolPlan:
        """Return the plan of the sequences with a pool.

        Raises:
            InfeasiblePlanError: no plan was found that keeps the constraints.
        """
        drafts, reason = self._drafts(sequences, pool, options=_of_whole(options, cluster=self._cluster))
        plan, constraints = self._assembled(drafts, pool, reason=reason, options=options), options.constraints
        microbatches = plan.proposal.microbatches
        if is_constrained(sequences, constraints):
            if any(_overlap(each) for each in microbatches):  # a pinned group was given more ranks
                raise InfeasiblePlanError(
                    "no plan was found whose groups have the ranks that plan.constraints asks for"
                )
            broken = broken_constraint(microbatches, sequences, cluster=self._cluster, constraints=constraints)
            if broken:
                raise InfeasiblePlanError(f"no plan was found that keeps plan.constraints: {broken}; relax it")
        return plan

    def repooled(self, plan: PoolPlan, sequences: Sequence[SequenceSpec], *, options: PlanConfig) -> PoolPlan:
        """Return the plan with the best pool for each of its microbatches."""
        of_id = {each.id: each for each in sequences}
        moves = max(int(options.search_moves) // len(plan.drafts), 1)
        options = _of_count(options, 1).model_copy(update={"search_moves": moves})
        drafts = []
        for microbatch in plan.drafts:
            members = [of_id[self._batch.ids[at]] for draft in microbatch for at in draft.members]
            first = self._assembled([microbatch], plan.pool, reason="", options=options)
            drafts += self.best(members, options=options, first=first).drafts
        return self._assembled(drafts, plan.pool, reason=plan.proposal.reason, options=options)

    def _drafts(
        self, sequences: Sequence[SequenceSpec], pool: RankPool, *, options: PlanConfig
    ) -> tuple[list[list[Draft]], str]:
        """Return drafts of all microbatches, and why. What no group of the pool holds is beside the rest, in
        microbatches of a larger pool."""
        held = _tokens_held(sequences)
        most = _largest_degree(pool, cost=self._cost, options=options) * self._cluster.max_tokens_per_rank
        short, long = ([each for each in sequences if (held[each.id] > most) == is_long] for is_long in (False, True))
        if not long:
            return self._drafts_of(short, pool, options=options)
        larger = _larger(long, max(held.values()), cluster=self._cluster, cost=self._cost, options=options)
        if not short:
            return self._drafts_of(long, larger, options=options)
        first, _ = self._drafts_of(long, larger, options=_of_count(options, None))
        count = options.constraints.num_microbatches
        if count is None:
            drafts, reason = self._drafts_of(short, pool, options=_of_count(options, None))
            count = options.constraints.least_microbatches(len(first) + len(drafts))
            if count == len(first) + len(drafts):
                return drafts + first, reason
        if count <= len(first):
            raise InfeasiblePlanError(
                f"no plan was found that keeps plan.constraints.num_microbatches {count}: the longest sequences alone "
                f"need {len(first)}; raise it, or add ranks or memory"
            )
        drafts, reason = self._drafts_of(short, pool, options=_of_count(options, count - len(first)))
        return drafts + first, reason

    def _drafts_of(
        self, sequences: Sequence[SequenceSpec], pool: RankPool, *, options: PlanConfig
    ) -> tuple[list[list[Draft]], str]:
        """Return drafts of the sequences on one pool, in the columns of the batch."""
        priced, position = slowed(self._cost, speed=pool.speed), {each: at for at, each in enumerate(self._batch.ids)}
        columns = columns_of(sequences, cost=priced)
        alone = [(at,) for at in range(len(sequences))]
        units, of_unit = united(columns, sequences) if has_units(sequences) else (columns, alone)
        ranks = _as_cluster(pool.ranks, cluster=self._cluster, cost=self._cost)
        found, reason = GroupPlanner(units, cluster=ranks, cost=priced, options=options, pinned=pool.pinned).run()
        drafts = [
            [
                dataclasses.replace(
                    draft,
                    members=tuple(position[columns.ids[at]] for at in members_of(draft, of_unit)),
                    among=(draft.among or pool.ranks) if options.constraints.placement == "nodes" else (),
                )
                for draft in microbatch
            ]
            for microbatch in found
        ]
        return drafts, f"{reason}, {len(pool.ranks)} ranks shared out beside {len(pool.pinned)} others"

    def _assembled(self, drafts: list[list[Draft]], pool: RankPool, *, reason: str, options: PlanConfig) -> PoolPlan:
        microbatches = assemble(
            drafts,
            batch=self._batch,
            cluster=self._cluster,
            cost=self._cost,
            placement=options.constraints.placement,
        )
        return PoolPlan(pool=pool, drafts=drafts, proposal=Proposal(microbatches=microbatches, reason=reason))

    def _floor_s(self, sequences: Sequence[SequenceSpec], pool: RankPool, *, options: PlanConfig) -> float:
        """Return a lower bound on what the search can find, at the speeds that it assumes for the ranks. Groups on
        consecutive ranks may lie on other ranks than those of the pool, which may be faster."""
        if options.constraints.placement != "nodes":
            return 0.0
        speeds = np.full(self._cluster.num_ranks, pool.speed)
        for group in pool.pinned:
            speeds[list(group.ranks)] = pool.speed * group.speed
        slower = dataclasses.replace(self._cluster, speed_of_rank=tuple(speeds.tolist()))
        used = tuple(Primitive(name) for name in options.primitives)
        return lower_bound(sequences, cluster=slower, cost=self._cost, primitives=used, constraints=options.constraints)


def _overlap(microbatch: MicrobatchPlan) -> bool:
    ranks = [rank for group in microbatch.groups for rank in group.ranks]
    return len(set(ranks)) < len(ranks)


def _permitted(*, cluster: ClusterSpec, cost: CostModel, constraints: HostConstraints) -> list[RankPool]:
    """Return the pools to try, each with the pinned groups that the constraints permit. Where groups must have
    consecutive ranks, the longest row of ranks of each speed or faster is one too."""
    if not constraints.bind:
        return _pools(cluster, cost=cost, degrees=())
    degrees = constraints.permitted(cluster.num_ranks)
    pools = _pools(cluster, cost=cost, degrees=degrees)
    if constraints.placement != "nodes":
        pools += _rows(cluster, cost=cost)
    kept = [_beside(pool, degrees) for pool in pools]
    kept += [dataclasses.replace(pool, pinned=()) for pool in kept]
    return list(dict.fromkeys(kept))


def _beside(pool: RankPool, degrees: Sequence[int]) -> RankPool:
    """Return the pool with only those pinned groups that have one of the degrees."""
    return dataclasses.replace(pool, pinned=tuple(group for group in pool.pinned if len(group.ranks) in degrees))


def _pools(cluster: ClusterSpec, *, cost: CostModel, degrees: Sequence[int]) -> list[RankPool]:
    """Return ranks of about one speed, most speed together first, each with pinned groups of the smallest size, then
    larger; then the fastest ranks down to some speed, and all of them last. Of `degrees`, if any, groups have one."""
    speeds, step = _in_steps(cluster, cost=cost, step=step_of(degrees)), step_of(degrees)
    alike = {
        tuple(np.flatnonzero((speeds >= least) & (speeds <= least * (1 + ALIKE))).tolist()): least
        for least in sorted(set(speeds.tolist()))
    }
    together = sorted(alike, key=lambda ranks: -alike[ranks] * len(ranks))
    found = []
    for ranks in together[:POOLS]:
        if alike[ranks] * len(ranks) >= LEAST * alike[together[0]] * len(together[0]):
            sizes = _sizes(cluster.num_ranks - len(ranks), degrees=degrees)
            found += [_pool(ranks, cluster=cluster, cost=cost, size=size) for size in sizes]
    nested = [_pool(ranks, cluster=cluster, cost=cost, size=step) for ranks in _nested(speeds)]
    found += sorted(nested, key=lambda pool: -pool.speed * len(pool.ranks))[:POOLS]
    return list(dict.fromkeys([*found, nested[-1]]))


def _in_steps(cluster: ClusterSpec, *, cost: CostModel, step: int) -> Floats:
    """Return the speed of each rank, or where degrees are multiples of `step`, of the slowest of the `step` ranks that
    it shares a group with: ranks in the order of their speeds."""
    speeds, nodes = speeds_of(cluster), node_of_ranks(cluster, ranks_per_node=cost.ranks_per_node)
    ordered = sorted(range(cluster.num_ranks), key=lambda rank: (-speeds[rank], nodes[rank], rank))
    for first in range(0, cluster.num_ranks, step):
        together = ordered[first : first + step]
        speeds[together] = speeds[together].min()
    return speeds


def _rows(cluster: ClusterSpec, *, cost: CostModel) -> list[RankPool]:
    """Return the longest row of consecutive ranks among those of each pool of the fastest, alone."""
    found = []
    for ranks in _nested(speeds_of(cluster)):
        parts = np.split(np.array(ranks), np.flatnonzero(np.diff(ranks) > 1) + 1)
        row = max(parts, key=len).tolist()
        found.append(dataclasses.replace(_pool(row, cluster=cluster, cost=cost), pinned=()))
    return found


def _nested(speeds: Floats) -> list[list[int]]:
    """Return the fastest ranks down to each speed, the slowest speed last; of very many speeds, some."""
    levels = np.unique(speeds)
    some = np.unique(np.linspace(0, len(levels) - 1, LEVELS).round().astype(np.int64))
    return [np.flatnonzero(speeds >= least).tolist() for least in levels[some][::-1]]


def _pool(ranks: Sequence[int], *, cluster: ClusterSpec, cost: CostModel, size: int = 1) -> RankPool:
    """These ranks, and pinned groups of `size` of the others."""
    speeds, nodes = speeds_of(cluster), node_of_ranks(cluster, ranks_per_node=cost.ranks_per_node)
    speed = float(speeds[list(ranks)].min())
    outside = set(range(cluster.num_ranks)) - set(ranks)
    ordered = sorted(outside, key=lambda rank: (nodes[rank], -speeds[rank], rank))
    size = max(size, -(-len(ordered) // MOST_PINNED))
    return RankPool(ranks=tuple(ranks), speed=speed, pinned=_pinned(ordered, size, speeds=speeds / speed, nodes=nodes))


def _sizes(count: int, *, degrees: Sequence[int]) -> list[int]:
    """Return sizes of pinned groups of `count` ranks: powers of two, or `degrees` if any."""
    powers = [2**each for each in range(max(count, 1).bit_length())]
    return [each for each in degrees if each <= count] or powers[:1] if 0 < len(degrees) < MOST_SIZES else powers


def _pinned(ranks: Sequence[int], size: int, *, speeds: Floats, nodes: Sequence[int]) -> tuple[PinnedGroup, ...]:
    """Ranks in a row together, the last group with fewer."""
    parts = [tuple(sorted(ranks[first : first + size])) for first in range(0, len(ranks), size)]
    return tuple(
        PinnedGroup(ranks=part, speed=float(speeds[list(part)].min()), crosses=len({nodes[rank] for rank in part}) > 1)
        for part in parts
    )


def _largest_degree(pool: RankPool, *, cost: CostModel, options: PlanConfig) -> int:
    """Return the largest degree that groups of the pool may have; 0 if there is none."""
    degrees: Iterable[int] = options.constraints.permitted(len(pool.ranks))
    if Primitive.RING.value not in options.primitives:
        degrees = {1, *exchange_degrees(cost, num_ranks=len(pool.ranks), primitives=options.primitives)} & {*degrees}
    return max(degrees, default=0)


def _of_count(options: PlanConfig, count: int | None) -> PlanConfig:
    """Return the options with a number of microbatches, or any if None."""
    changed = options.constraints.model_copy(update={"microbatch_multiple": 1, "num_microbatches": count})
    return options.model_copy(update={"constraints": changed})


def _of_whole(options: PlanConfig, *, cluster: ClusterSpec) -> PlanConfig:
    """Return the options with the permitted degrees of the whole cluster: fewer ranks have other powers of two."""
    constraints = options.constraints
    if not constraints.bind:
        return options
    degrees = constraints.permitted(cluster.num_ranks)
    return options.model_copy(update={"constraints": constraints.model_copy(update={"degrees": degrees})})


def _tokens_held(sequences: Sequence[SequenceSpec]) -> dict[int, int]:
    """Return the tokens of each sequence's unit, or its own, by id."""
    tokens: dict[int, int] = {}
    for each in sequences:
        if each.unit is not None:
            tokens[each.unit] = tokens.get(each.unit, 0) + each.num_tokens
    return {each.id: each.num_tokens if each.unit is None else tokens[each.unit] for each in sequences}


def _larger(
    sequences: Sequence[SequenceSpec], longest: int, *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> RankPool:
    """Of the pools of the fastest ranks that hold each of the sequences and units, the one with the least bound for
    them; `longest`: tokens of the largest.

    Raises:
        InfeasiblePlanError: no permitted degree holds the largest.
    """
    used = tuple(Primitive(name) for name in options.primitives)
    least, degrees = -(-longest // cluster.max_tokens_per_rank), options.constraints.permitted(cluster.num_ranks)
    degree = min((each for each in degrees if each >= least), default=None)
    if degree is None:
        raise InfeasiblePlanError(
            f"sequences of one unit have {longest} tokens and need {least} ranks or more, plan.constraints.degrees is "
            f"{options.constraints.degrees} on {cluster.num_ranks} ranks; permit a larger degree, or divide the unit"
        )
    step = step_of(degrees)
    pools = [_pool(ranks, cluster=cluster, cost=cost, size=step) for ranks in _nested(speeds_of(cluster))]
    found = [_beside(pool, degrees) for pool in pools if len(pool.ranks) >= degree]
    return min(
        found,
        key=lambda pool: lower_bound(
            sequences,
            cluster=_as_cluster(pool.ranks, cluster=cluster, cost=cost),
            cost=slowed(cost, speed=pool.speed),
            primitives=used,
        ),
    )


def _as_cluster(ranks: Sequence[int], *, cluster: ClusterSpec, cost: CostModel) -> ClusterSpec:
    """These ranks alone, of one speed, each for all stages."""
    nodes = node_of_ranks(cluster, ranks_per_node=cost.ranks_per_node)
    return ClusterSpec(
        num_ranks=len(ranks),
        max_tokens_per_rank=cluster.max_tokens_per_rank,
        node_of_rank=tuple(nodes[rank] for rank in ranks),
    )
