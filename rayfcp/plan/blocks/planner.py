"""From a microbatch's sequences to its layout and seconds."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rayfcp.config.plan import BlockOptions
from rayfcp.plan.blocks.distributor import Space, distribute
from rayfcp.plan.blocks.kernels.table import Ints, Pieces, Pool
from rayfcp.plan.blocks.rounds import Schedule, Traffic, schedule, traffic_of
from rayfcp.plan.blocks.size import block_tokens, sizes
from rayfcp.plan.costs.model import CostModel
from rayfcp.plan.placement import node_of_ranks
from rayfcp.values import Block, ClusterSpec, Layout, Round, Transfer

TOO_EXPOSED = 0.01  # of attention: smaller blocks are tried too


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """One microbatch: where its blocks lie, what travels, and when."""

    pieces: Pieces
    traffic: Traffic
    rounds: Schedule
    block_tokens: int

    @property
    def seconds(self) -> float:
        """Of the slowest rank, without the fixed cost."""
        return float(self.rounds.seconds.max())

    @property
    def exposed(self) -> float:
        """By how much communication makes the slowest rank slower, as a share of the mean attention."""
        attention_s = self.traffic.attention_s
        slower_s = self.seconds - float((attention_s + self.traffic.linear_s).max())
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
        blocks = tuple(Block(sequence=owner, start=start, stop=stop, rank=rank) for owner, start, stop, rank in columns)
        carried = self.traffic.needs.block[parcels.order].tolist()
        first, source, target = parcels.first.tolist(), parcels.source.tolist(), parcels.target.tolist()
        transfers = [
            Transfer(blocks=tuple(carried[first[at] : first[at + 1]]), source=source[at], target=target[at])
            for at in self.rounds.order.tolist()
        ]
        bounds = self.rounds.bounds.tolist()
        rounds = tuple(Round(transfers=tuple(transfers[begin:end])) for begin, end in pairwise(bounds))
        return Layout(blocks=blocks, rounds=rounds, pipeline=self.rounds.how if rounds else None)


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


def plan_blocks(pool: Pool, *, cluster: ClusterSpec, cost: CostModel, options: BlockOptions) -> BlockPlan:
    """Place the sequences of a microbatch and schedule what travels, with blocks of the size that takes least.

    All ranks together can hold the sequences.
    """
    node = np.array(node_of_ranks(cluster, ranks_per_node=cost.ranks_per_node), np.int64)
    mean = float(pool.length.sum()) / cluster.num_ranks
    drafter = _Drafter(pool=pool, node=node, max_tokens=cluster.max_tokens_per_rank, cost=cost, options=options)
    if options.block_tokens is not None:
        return drafter.planned(options.block_tokens)
    tried = sizes(block_tokens(cost, tokens_per_rank=mean, crosses=len(np.unique(node)) > 1), tokens_per_rank=mean)
    best = drafter.planned(tried[0])
    for size in tried[1:]:
        best = drafter.planned(size, than=best)
    if best.exposed > TOO_EXPOSED and tried[0] > 1:
        best = drafter.planned(tried[0] // 2, than=best)
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drafter:
    pool: Pool
    node: Ints
    max_tokens: int
    cost: CostModel
    options: BlockOptions

    def planned(self, size: int, *, than: BlockPlan | None = None) -> BlockPlan:
        """With blocks of `size`, with seconds of attention levelled or cells, whichever has the lower floor; or the
        plan that this is no better `than`."""
        space = Space(num_ranks=len(self.node), max_tokens=self.max_tokens, block_tokens=size)
        drafts = []
        for half_tokens in sorted({0.0, self.cost.attention_half_tokens}):
            pieces = distribute(self.pool, space=space, half_tokens=half_tokens, options=self.options)
            traffic = traffic_of(self.pool, pieces, node=self.node, cost=self.cost, parcel_tokens=size)
            drafts.append((traffic.floor_s, pieces, traffic))
            if self.options.placement == "lpt":
                break
        floor_s, pieces, traffic = min(drafts, key=lambda each: each[0])
        if than is not None and floor_s >= than.seconds:
            return than
        mean = int(self.pool.length.sum()) // len(self.node)
        rounds = schedule(traffic, options=self.options, most_coalesced=mean // size)
        found = BlockPlan(pieces=pieces, traffic=traffic, rounds=rounds, block_tokens=size)
        return found if than is None or found.seconds < than.seconds else than
