"""Flexible groups on ranks of unequal speed.

A ring gives all its ranks equal work, so that a slow one makes all others wait. Ranks of about one speed, the pool, are
shared out by groups of any degree, as if all were as slow as the slowest of them. The others are in pinned groups: of
fixed ranks in every microbatch, of one rank, or of several for longer sequences, which take what fits in the time. The
search gives them sequences as it does to other groups, at their own speed, or leaves them empty. Sequences that the
pool has no memory for go to microbatches of their own, with a larger pool. Several pools and sizes of pinned groups are
planned, and the best of these plans is taken. Plans that do not keep the constraints are dropped. Where
groups must have consecutive ranks, the search gives degrees only, and each group the best ranks (`assemble`).
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from rayfcp.config.models import PlanConfig
from rayfcp.cost.bound import lower_bound
from rayfcp.cost.model import CostModel, slowed, speeds_of
from rayfcp.cost.placement import node_of_ranks
from rayfcp.plan.assembly import Columns, Draft, assemble, columns_of, members_of, united
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
MOST_PINNED = 64
GOOD_ENOUGH = 1.02  # times the lower bound: nothing else is tried


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankPool:
    """Ranks that groups share out, the speed of the slowest, and pinned groups, with speeds over that."""

    ranks: tuple[int, ...]
    speed: float
    pinned: tuple[PinnedGroup, ...] = ()


def propose_unequal(
    sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> Proposal:
    """The best of the plans with each pool, with the first moves; the others go to that pool.

    Raises:
        InfeasiblePlanError: a sequence that no group of the allowed primitives can hold.
    """
    batch = columns_of(sequences, cost=cost)
    used, constraints = tuple(Primitive(name) for name in options.primitives), options.constraints
    bound_s = lower_bound(sequences, cluster=cluster, cost=cost, primitives=used, constraints=constraints)
    moves = moves_of(options, num_ranks=cluster.num_ranks, num_sequences=len(sequences))
    few = options.model_copy(update={"search_moves": min(moves, FIRST)})
    binds = is_constrained(sequences, constraints)

    def planned(pool: RankPool, options: PlanConfig) -> Proposal:
        drafts, reason = _planned(sequences, pool, batch=batch, cluster=cluster, cost=cost, options=options)
        microbatches = assemble(
            drafts, batch=batch, cluster=cluster, cost=cost, placement=options.constraints.placement
        )
        if binds and any(_overlap(each) for each in microbatches):  # a pinned group was given more ranks
            raise InfeasiblePlanError("no plan was found whose groups have the ranks that plan.constraints asks for")
        if binds and (broken := broken_constraint(microbatches, sequences, cluster=cluster, constraints=constraints)):
            raise InfeasiblePlanError(f"no plan was found that keeps plan.constraints: {broken}; relax it")
        return Proposal(microbatches=microbatches, reason=reason)

    found: list[tuple[Proposal, RankPool]] = []
    best_s, why = np.inf, InfeasiblePlanError("no pool was tried")
    for pool in _permitted(_pools(cluster, cost=cost), cluster=cluster, cost=cost, options=options):
        if best_s <= GOOD_ENOUGH * bound_s:
            break
        if found and _floor_s(sequences, pool, cluster=cluster, cost=cost, options=options) >= best_s:
            continue
        try:
            found.append((planned(pool, few), pool))
        except InfeasiblePlanError as error:  # no degree of its ranks shares out the heads or keeps the constraints
            why = error
            continue
        best_s = min(best_s, found[-1][0].predicted_s)
    if not found:
        raise why
    best, pool = min(found, key=lambda each: each[0].predicted_s)
    return best if moves <= FIRST else planned(pool, options)


def _overlap(microbatch: MicrobatchPlan) -> bool:
    ranks = [rank for group in microbatch.groups for rank in group.ranks]
    return len(set(ranks)) < len(ranks)


def _pools(cluster: ClusterSpec, *, cost: CostModel) -> list[RankPool]:
    """Ranks of about one speed, most speed together first, each with pinned groups of one rank, then larger; then the
    fastest ranks down to some speed, and all of them last."""
    speeds = speeds_of(cluster)
    alike = {
        tuple(np.flatnonzero((speeds >= least) & (speeds <= least * (1 + ALIKE))).tolist()): least
        for least in sorted(set(speeds.tolist()))
    }
    together = sorted(alike, key=lambda ranks: -alike[ranks] * len(ranks))
    found = []
    for ranks in together[:POOLS]:
        if alike[ranks] * len(ranks) >= LEAST * alike[together[0]] * len(together[0]):
            sizes = _sizes(cluster.num_ranks - len(ranks))
            found += [_pool(ranks, cluster=cluster, cost=cost, size=size) for size in sizes]
    nested = _nested(cluster, cost=cost)
    found += sorted(nested, key=lambda pool: -pool.speed * len(pool.ranks))[:POOLS]
    return list(dict.fromkeys([*found, nested[-1]]))


def _permitted(
    pools: Sequence[RankPool], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> list[RankPool]:
    """Return the pools, each with the pinned groups that the constraints permit. Where groups must have consecutive
    ranks, the longest row of ranks of each speed or faster is one too."""
    constraints = options.constraints
    if not constraints.bind:
        return list(pools)
    degrees = constraints.permitted(cluster.num_ranks)
    degrees = degrees if step_of(degrees) == 1 else ()
    rows = [] if constraints.placement == "nodes" else _rows(cluster, cost=cost)
    kept = [
        dataclasses.replace(pool, pinned=tuple(group for group in pool.pinned if len(group.ranks) in degrees))
        for pool in (*pools, *rows)
    ]
    kept += [dataclasses.replace(pool, pinned=()) for pool in kept]
    return list(dict.fromkeys(kept))


def _rows(cluster: ClusterSpec, *, cost: CostModel) -> list[RankPool]:
    """The longest row of consecutive ranks among those of each pool of the fastest, alone."""
    found = []
    for pool in _nested(cluster, cost=cost):
        parts = np.split(np.array(pool.ranks), np.flatnonzero(np.diff(pool.ranks) > 1) + 1)
        row = max(parts, key=len).tolist()
        found.append(dataclasses.replace(_pool(row, cluster=cluster, cost=cost), pinned=()))
    return found


def _nested(cluster: ClusterSpec, *, cost: CostModel) -> list[RankPool]:
    """The fastest ranks down to each speed, the slowest speed last; of very many speeds, some."""
    speeds = speeds_of(cluster)
    levels = np.unique(speeds)
    some = np.unique(np.linspace(0, len(levels) - 1, LEVELS).round().astype(np.int64))
    return [_pool(np.flatnonzero(speeds >= least).tolist(), cluster=cluster, cost=cost) for least in levels[some][::-1]]


def _pool(ranks: Sequence[int], *, cluster: ClusterSpec, cost: CostModel, size: int = 1) -> RankPool:
    """These ranks, and pinned groups of `size` of the others."""
    speeds, nodes = speeds_of(cluster), node_of_ranks(cluster, ranks_per_node=cost.ranks_per_node)
    speed = float(speeds[list(ranks)].min())
    outside = set(range(cluster.num_ranks)) - set(ranks)
    ordered = sorted(outside, key=lambda rank: (nodes[rank], -speeds[rank], rank))
    size = max(size, -(-len(ordered) // MOST_PINNED))
    return RankPool(ranks=tuple(ranks), speed=speed, pinned=_pinned(ordered, size, speeds=speeds / speed, nodes=nodes))


def _sizes(count: int) -> list[int]:
    """Sizes of pinned groups of so many ranks: powers of two."""
    return [2**each for each in range(max(count, 1).bit_length())]


def _pinned(ranks: Sequence[int], size: int, *, speeds: Floats, nodes: Sequence[int]) -> tuple[PinnedGroup, ...]:
    """Ranks in a row together, the last group with fewer."""
    parts = [tuple(sorted(ranks[first : first + size])) for first in range(0, len(ranks), size)]
    return tuple(
        PinnedGroup(ranks=part, speed=float(speeds[list(part)].min()), crosses=len({nodes[rank] for rank in part}) > 1)
        for part in parts
    )


def _floor_s(
    sequences: Sequence[SequenceSpec],
    pool: RankPool,
    *,
    cluster: ClusterSpec,
    cost: CostModel,
    options: PlanConfig,
) -> float:
    """Lower bound on what the search can find, at the speeds that it assumes for the ranks. Groups on consecutive ranks
    may lie on other ranks than those of the pool, which may be faster."""
    if options.constraints.placement != "nodes":
        return 0.0
    speeds = np.full(cluster.num_ranks, pool.speed)
    for group in pool.pinned:
        speeds[list(group.ranks)] = pool.speed * group.speed
    slower = dataclasses.replace(cluster, speed_of_rank=tuple(speeds.tolist()))
    used = tuple(Primitive(name) for name in options.primitives)
    return lower_bound(sequences, cluster=slower, cost=cost, primitives=used, constraints=options.constraints)


def _planned(
    sequences: Sequence[SequenceSpec],
    pool: RankPool,
    *,
    batch: Columns,
    cluster: ClusterSpec,
    cost: CostModel,
    options: PlanConfig,
) -> tuple[list[list[Draft]], str]:
    """Drafts in the columns of the batch; what the pool cannot hold beside the rest, in another."""
    max_tokens = len(pool.ranks) * cluster.max_tokens_per_rank
    position = {number: at for at, number in enumerate(batch.ids)}
    drafts: list[list[Draft]] = []
    reasons = []
    held = _tokens_held(sequences)
    short, long = ([each for each in sequences if (held[each.id] > max_tokens) == is_long] for is_long in (False, True))
    parts = [(short, pool)] if short else []
    if long:
        longest = max(held.values())
        parts.append((long, _larger(long, longest, cluster=cluster, cost=cost, options=options)))
    options, in_place = _of_whole(options, cluster=cluster), options.constraints.placement == "nodes"
    for part, here in parts:
        priced = slowed(cost, speed=here.speed)
        columns = columns_of(part, cost=priced)
        units, of_unit = united(columns, part) if has_units(part) else (columns, [(at,) for at in range(len(part))])
        sub = _as_cluster(here.ranks, cluster=cluster, cost=cost)
        found, reason = GroupPlanner(units, cluster=sub, cost=priced, options=options, pinned=here.pinned).run()
        reasons.append(reason)
        drafts += [
            [
                dataclasses.replace(
                    draft,
                    members=tuple(position[columns.ids[at]] for at in members_of(draft, of_unit)),
                    among=(draft.among or here.ranks) if in_place else (),
                )
                for draft in microbatch
            ]
            for microbatch in found
        ]
    return drafts, f"{reasons[0]}, {len(pool.ranks)} ranks shared out beside {len(pool.pinned)} others"


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
    least = -(-longest // cluster.max_tokens_per_rank)
    degree = min((each for each in options.constraints.permitted(cluster.num_ranks) if each >= least), default=None)
    if degree is None:
        raise InfeasiblePlanError(
            f"sequences of one unit have {longest} tokens and need {least} ranks or more, plan.constraints.degrees is "
            f"{options.constraints.degrees} on {cluster.num_ranks} ranks; permit a larger degree, or divide the unit"
        )
    found = [pool for pool in _nested(cluster, cost=cost) if len(pool.ranks) >= degree]
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
