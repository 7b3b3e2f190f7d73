"""Flexible groups on ranks of unequal speed.

A ring gives all its ranks equal work, so that a slow one makes all others wait. Ranks of about one speed, the pool, are
shared out by groups of any degree, as if all were as slow as the slowest of them. The others are seats: groups of
fixed ranks in every microbatch, of one rank, or of several for longer sequences, which take what fits in the time. The
search gives them sequences as it does to other groups, at their own speed, or leaves them empty. Sequences that the
pool has no memory for go to microbatches of their own, with all ranks in one pool. Several pools and sizes of seats are
planned, and the best of these plans is taken.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from rayfcp.config.plan import PlanConfig
from rayfcp.plan.assembly import Draft, assemble
from rayfcp.plan.bound import lower_bound
from rayfcp.plan.costs.model import CostModel
from rayfcp.plan.costs.speeds import slowed, speeds_of
from rayfcp.plan.joint.planner import Planner
from rayfcp.plan.joint.world import Seat
from rayfcp.plan.microbatches import Columns, columns_of
from rayfcp.plan.placement import node_of_ranks
from rayfcp.plan.strategies.interface import Proposal
from rayfcp.values import ClusterSpec, Primitive, SequenceSpec

ALIKE = 0.05  # relative difference of speeds in a pool: waiting costs less than what seats cannot share
POOLS = 2  # that are tried beside the one of all ranks
LEAST = 0.5  # of the speeds of the best pool: a smaller one can ring too little
MOST_SEATS = 64
GOOD_ENOUGH = 1.02  # times the lower bound: nothing else is tried


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Ranks that groups share out, the speed of the slowest, and seats, with speeds over that."""

    ranks: tuple[int, ...]
    speed: float
    seats: tuple[Seat, ...] = ()


def propose_unequal(
    sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> Proposal:
    """The best of the plans with each pool.

    Raises:
        InfeasiblePlanError: a sequence that no group of the allowed primitives can hold.
    """
    batch = columns_of(sequences, cost=cost)
    used = tuple(Primitive(name) for name in options.primitives)
    bound_s = lower_bound(sequences, cluster=cluster, cost=cost, primitives=used)
    best, best_s = None, np.inf
    for pool in _pools(cluster, cost=cost):
        if best_s <= GOOD_ENOUGH * bound_s:
            break
        if best is not None and _floor_s(sequences, pool, cluster=cluster, cost=cost, used=used) >= best_s:
            continue
        drafts, reason = _planned(sequences, pool, batch=batch, cluster=cluster, cost=cost, options=options)
        microbatches = assemble(drafts, batch=batch, cluster=cluster, cost=cost)
        seconds = sum(each.predicted_s for each in microbatches)
        if seconds < best_s:
            best, best_s = Proposal(microbatches=microbatches, reason=reason), seconds
    assert best is not None, "a pool of all ranks holds every sequence"
    return best


def _pools(cluster: ClusterSpec, *, cost: CostModel) -> Iterator[Pool]:
    """Those of most speed together first, each with seats of one rank, then larger ones; all ranks in one last."""
    speeds, everyone = speeds_of(cluster), range(cluster.num_ranks)
    nodes = node_of_ranks(cluster, ranks_per_node=cost.ranks_per_node)
    found = []
    for least in sorted(set(speeds.tolist()), reverse=True):
        inside = tuple(rank for rank in everyone if least <= speeds[rank] <= least * (1 + ALIKE))
        found.append((least * len(inside), Pool(ranks=inside, speed=least)))
    found.sort(key=lambda each: -each[0])
    for together, pool in found[:POOLS]:
        outside = sorted(set(everyone) - set(pool.ranks), key=lambda rank: (nodes[rank], -speeds[rank], rank))
        if outside and together >= LEAST * found[0][0]:
            for size in _sizes(len(outside)):
                yield dataclasses.replace(pool, seats=_seats(outside, size, speeds=speeds / pool.speed, nodes=nodes))
    yield Pool(ranks=tuple(everyone), speed=float(speeds.min()))


def _sizes(count: int) -> list[int]:
    """Of seats for so many ranks: powers of two."""
    sizes = [2**each for each in range(count.bit_length())]
    return [size for size in sizes if -(-count // size) <= MOST_SEATS] or [count]


def _seats(ranks: Sequence[int], size: int, *, speeds: np.ndarray, nodes: Sequence[int]) -> tuple[Seat, ...]:
    """Ranks in a row together, the last seat with fewer."""
    parts = [tuple(sorted(ranks[first : first + size])) for first in range(0, len(ranks), size)]
    return tuple(
        Seat(ranks=part, speed=float(speeds[list(part)].min()), crosses=len({nodes[rank] for rank in part}) > 1)
        for part in parts
    )


def _floor_s(
    sequences: Sequence[SequenceSpec],
    pool: Pool,
    *,
    cluster: ClusterSpec,
    cost: CostModel,
    used: tuple[Primitive, ...],
) -> float:
    """No plan with this pool takes less: the bound at the speeds that its ranks are used with."""
    speeds = np.full(cluster.num_ranks, pool.speed)
    for seat in pool.seats:
        speeds[list(seat.ranks)] = pool.speed * seat.speed
    slower = dataclasses.replace(cluster, speed_of_rank=tuple(speeds.tolist()))
    return lower_bound(sequences, cluster=slower, cost=cost, primitives=used)


def _planned(
    sequences: Sequence[SequenceSpec],
    pool: Pool,
    *,
    batch: Columns,
    cluster: ClusterSpec,
    cost: CostModel,
    options: PlanConfig,
) -> tuple[list[list[Draft]], str]:
    """Drafts in the columns of the batch; what the pool cannot hold beside the rest, on all ranks."""
    everyone = Pool(ranks=tuple(range(cluster.num_ranks)), speed=float(speeds_of(cluster).min()))
    room = len(pool.ranks) * cluster.max_tokens_per_rank
    position = {number: at for at, number in enumerate(batch.ids)}
    drafts: list[list[Draft]] = []
    reasons = []
    for part, here in (
        ([each for each in sequences if each.num_tokens <= room], pool),
        ([each for each in sequences if each.num_tokens > room], everyone),
    ):
        if not part:
            continue
        priced = slowed(cost, speed=here.speed)
        columns = columns_of(part, cost=priced)
        sub = _as_cluster(here.ranks, cluster=cluster, cost=cost)
        found, reason = Planner(columns, cluster=sub, cost=priced, options=options, seats=here.seats).run()
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
    return drafts, f"{reasons[0]}, {len(pool.ranks)} ranks shared out beside {len(pool.seats)} others"


def _as_cluster(ranks: Sequence[int], *, cluster: ClusterSpec, cost: CostModel) -> ClusterSpec:
    """These ranks alone, of one speed, each for all stages."""
    nodes = node_of_ranks(cluster, ranks_per_node=cost.ranks_per_node)
    return ClusterSpec(
        num_ranks=len(ranks),
        max_tokens_per_rank=cluster.max_tokens_per_rank,
        node_of_rank=tuple(nodes[rank] for rank in ranks),
    )
