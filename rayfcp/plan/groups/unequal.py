"""Flexible groups on ranks of unequal speed.

A ring gives all its ranks equal work, so that a slow one makes all others wait. Ranks of about one speed, the pool, are
shared out by groups of any degree, as if all were as slow as the slowest of them. The others are in pinned groups: of
fixed ranks in every microbatch, of one rank, or of several for longer sequences, which take what fits in the time. The
search gives them sequences as it does to other groups, at their own speed, or leaves them empty. Sequences that the
pool has no memory for go to microbatches of their own, with a larger pool. Several pools and sizes of pinned groups are
planned, and the best of these plans is taken.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from rayfcp.config.models import PlanConfig
from rayfcp.cost.bound import lower_bound
from rayfcp.cost.model import CostModel, slowed, speeds_of
from rayfcp.cost.placement import node_of_ranks
from rayfcp.plan.assembly import Columns, Draft, assemble, columns_of
from rayfcp.plan.groups.planner import GroupPlanner, PinnedGroup
from rayfcp.plan.moves import FIRST, moves_of
from rayfcp.plan.strategies.registry import Proposal
from rayfcp.values import ClusterSpec, InfeasiblePlanError, Primitive, SequenceSpec
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
    used = tuple(Primitive(name) for name in options.primitives)
    bound_s = lower_bound(sequences, cluster=cluster, cost=cost, primitives=used)
    moves = moves_of(options, num_ranks=cluster.num_ranks, num_sequences=len(sequences))
    few = options.model_copy(update={"search_moves": min(moves, FIRST)})

    def planned(pool: RankPool, options: PlanConfig) -> Proposal:
        drafts, reason = _planned(sequences, pool, batch=batch, cluster=cluster, cost=cost, options=options)
        return Proposal(microbatches=assemble(drafts, batch=batch, cluster=cluster, cost=cost), reason=reason)

    found: list[tuple[Proposal, RankPool]] = []
    best_s, why = np.inf, InfeasiblePlanError("no pool was tried")
    for pool in _pools(cluster, cost=cost):
        if best_s <= GOOD_ENOUGH * bound_s:
            break
        if found and _floor_s(sequences, pool, cluster=cluster, cost=cost, used=used) >= best_s:
            continue
        try:
            found.append((planned(pool, few), pool))
        except InfeasiblePlanError as error:  # of no number of its ranks that heads can be shared by
            why = error
            continue
        best_s = min(best_s, found[-1][0].predicted_s)
    if not found:
        raise why
    best, pool = min(found, key=lambda each: each[0].predicted_s)
    return best if moves <= FIRST else planned(pool, options)


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
    used: tuple[Primitive, ...],
) -> float:
    """Lower bound on what the search can find, at the speeds that it assumes for the ranks."""
    speeds = np.full(cluster.num_ranks, pool.speed)
    for group in pool.pinned:
        speeds[list(group.ranks)] = pool.speed * group.speed
    slower = dataclasses.replace(cluster, speed_of_rank=tuple(speeds.tolist()))
    return lower_bound(sequences, cluster=slower, cost=cost, primitives=used)


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
    short, long = (
        [each for each in sequences if (each.num_tokens > max_tokens) == is_long] for is_long in (False, True)
    )
    parts = [(short, pool)] if short else []
    if long:
        parts.append((long, _larger(long, cluster=cluster, cost=cost, options=options)))
    for part, here in parts:
        priced = slowed(cost, speed=here.speed)
        columns = columns_of(part, cost=priced)
        sub = _as_cluster(here.ranks, cluster=cluster, cost=cost)
        found, reason = GroupPlanner(columns, cluster=sub, cost=priced, options=options, pinned=here.pinned).run()
        reasons.append(reason)
        drafts += [
            [
                dataclasses.replace(
                    draft,
                    members=tuple(position[columns.ids[at]] for at in draft.members),
                    among=draft.among or here.ranks,
                )
                for draft in microbatch
            ]
            for microbatch in found
        ]
    return drafts, f"{reasons[0]}, {len(pool.ranks)} ranks shared out beside {len(pool.pinned)} others"


def _larger(
    sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> RankPool:
    """Of the pools of the fastest ranks that hold each of the sequences, the one with the least bound for them."""
    used = tuple(Primitive(name) for name in options.primitives)
    longest = max(each.num_tokens for each in sequences)
    found = [pool for pool in _nested(cluster, cost=cost) if len(pool.ranks) * cluster.max_tokens_per_rank >= longest]
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
