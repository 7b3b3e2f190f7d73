"""From a microbatch's sequences to its layout and seconds."""

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from rayfcp.config.plan import BlockOptions
from rayfcp.plan.blocks.distributor import Space, distribute, shares_of
from rayfcp.plan.blocks.heads import as_runs, permitted, split
from rayfcp.plan.blocks.kernels.table import Floats, Ints, Pieces, Pool
from rayfcp.plan.blocks.rounds import Schedule, Traffic, schedule, traffic_of
from rayfcp.plan.blocks.size import block_tokens, sizes
from rayfcp.plan.blocks.stages import restaged
from rayfcp.plan.costs.model import CostModel
from rayfcp.plan.costs.speeds import speeds_of
from rayfcp.plan.placement import node_of_ranks
from rayfcp.values import Block, ClusterSpec, Layout, Primitive, Round, Transfer

RINGS = (Primitive.RING,)
TOO_EXPOSED = 0.01  # of attention: smaller blocks are tried too


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """One microbatch: where its blocks lie, what travels, and when. Ranks of pieces and parcels are runs of `heads`
    ranks (`rayfcp.plan.blocks.heads`); `exchange_s`: what the fullest run exchanges in them."""

    pieces: Pieces
    traffic: Traffic
    rounds: Schedule
    block_tokens: int
    heads: int = 1
    exchange_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Of the slowest rank, without the fixed cost."""
        return float(self.rounds.seconds.max()) + self.exchange_s

    @property
    def exposed(self) -> float:
        """By how much communication makes the slowest rank slower, as a share of the mean attention."""
        attention_s = self.traffic.attention_s
        slower_s = float(self.rounds.seconds.max()) - float((attention_s + self.traffic.linear_s).max())
        return slower_s / float(attention_s.mean()) if attention_s.any() else 0.0

    def layout(self, ids: Ints) -> Layout:
        """As a value; `ids[s]` names sequence s of the pool."""
        with _uncollected():
            return self._layout(ids)

    def _layout(self, ids: Ints) -> Layout:
        pieces, parcels = self.pieces, self.traffic.parcels
        columns = zip(
            ids[pieces.owner].tolist(),
            pieces.start.tolist(),
            pieces.stop.tolist(),
            pieces.rank.tolist(),
            strict=True,
        )
        blocks = [Block(sequence=owner, start=start, stop=stop, rank=rank) for owner, start, stop, rank in columns]
        became = None
        if self.heads > 1:
            blocks, became = split(blocks, num_runs=pieces.num_ranks, heads=self.heads)
        carried = self.traffic.needs.block[parcels.order].tolist()
        first, source, target = parcels.first.tolist(), parcels.source.tolist(), parcels.target.tolist()
        transfers = [
            Transfer(blocks=_named(carried[first[at] : first[at + 1]], became), source=source[at], target=target[at])
            for at in self.rounds.order.tolist()
        ]
        bounds = self.rounds.bounds.tolist()
        rounds = tuple(Round(transfers=tuple(transfers[begin:end])) for begin, end in pairwise(bounds))
        return Layout(blocks=tuple(blocks), rounds=rounds, pacing=self.rounds.how if rounds else None, heads=self.heads)


def _named(carried: list[int], became: list[range] | None) -> tuple[int, ...]:
    """Blocks by their positions, after some were cut."""
    return tuple(carried) if became is None else tuple(part for block in carried for part in became[block])


@contextmanager
def _uncollected() -> Iterator[None]:
    """Tens of thousands of small objects are made, none of them garbage, and looking for it takes longer than that."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def plan_blocks(
    pool: Pool, *, cluster: ClusterSpec, cost: CostModel, options: BlockOptions, allowed: Iterable[Primitive] = RINGS
) -> BlockPlan:
    """Place the sequences of a microbatch and schedule what travels, with runs of ranks that share heads and blocks of
    the sizes that take least.

    All ranks together can hold the sequences.

    Raises:
        InfeasiblePlanError: `options.heads` is not permitted.
    """
    best: BlockPlan | None = None
    for heads in permitted(cluster, cost, allowed=allowed, wanted=options.heads):
        best = _plan_runs(pool, heads=heads, cluster=cluster, cost=cost, options=options, than=best)
    assert best is not None  # runs of one rank, or those that were wanted
    if options.coalesce is not None:
        return best
    runs, shared = as_runs(cluster, cost, heads=best.heads)
    node = np.array(node_of_ranks(runs, ranks_per_node=cost.ranks_per_node), np.int64)
    rounds = restaged(best.traffic, best.rounds, node=node, speeds=speeds_of(runs), cost=shared)
    return replace(best, rounds=rounds)


def _plan_runs(
    pool: Pool,
    *,
    heads: int,
    cluster: ClusterSpec,
    cost: CostModel,
    options: BlockOptions,
    than: BlockPlan | None,
) -> BlockPlan:
    """With blocks of the size that takes least, or the plan that this is no better `than`."""
    runs, shared = as_runs(cluster, cost, heads=heads)
    node = np.array(node_of_ranks(runs, ranks_per_node=cost.ranks_per_node), np.int64)
    mean = float(pool.length.sum()) / runs.num_ranks
    drafter = _Drafter(
        pool=pool,
        node=node,
        speeds=speeds_of(runs),
        max_tokens=runs.max_tokens_per_rank,
        cost=shared,
        options=options,
        heads=heads,
        whole=cost,
    )
    if options.block_tokens is not None:
        return drafter.planned(options.block_tokens, than=than)
    tried = sizes(block_tokens(shared, tokens_per_rank=mean, crosses=len(np.unique(node)) > 1), tokens_per_rank=mean)
    for size in tried:
        than = drafter.planned(size, than=than)
    assert than is not None  # of one size at least
    if than.heads == heads and than.exposed > TOO_EXPOSED and tried[0] > 1:
        than = drafter.planned(tried[0] // 2, than=than)
    return than


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drafter:
    pool: Pool
    node: Ints
    speeds: Floats
    max_tokens: int
    cost: CostModel
    options: BlockOptions
    heads: int
    whole: CostModel

    def planned(self, size: int, *, than: BlockPlan | None = None) -> BlockPlan:
        """With blocks of `size`, with seconds of attention levelled or cells, whichever has the lower floor; or the
        plan that this is no better `than`."""
        weights = shares_of(self.speeds, num_tokens=int(self.pool.length.sum()), most=self.max_tokens)
        space = Space(num_ranks=len(self.node), max_tokens=self.max_tokens, block_tokens=size, weights=weights)
        drafts = []
        for half_tokens in sorted({0.0, self.cost.attention_half_tokens}):
            pieces = distribute(self.pool, space=space, half_tokens=half_tokens, options=self.options)
            traffic = traffic_of(
                self.pool, pieces, node=self.node, speeds=self.speeds, cost=self.cost, parcel_tokens=size
            )
            tokens = np.bincount(pieces.rank, pieces.stop - pieces.start)
            shared_s = float(self.whole.exchanges_s(tokens.max(), degree=self.heads))
            drafts.append((traffic.floor_s + shared_s, pieces, traffic, shared_s))
            if self.options.placement == "lpt":
                break
        floor_s, pieces, traffic, shared_s = min(drafts, key=lambda each: each[0])
        if than is not None and floor_s >= than.seconds:
            return than
        mean = int(self.pool.length.sum()) // len(self.node)
        rounds = schedule(traffic, options=self.options, most_coalesced=mean // size)
        found = BlockPlan(
            pieces=pieces,
            traffic=traffic,
            rounds=rounds,
            block_tokens=size,
            heads=self.heads,
            exchange_s=shared_s,
        )
        return found if than is None or found.seconds < than.seconds else than
