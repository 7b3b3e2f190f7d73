"""The block planner: block sizes (FCP with blocks, Zhao et al., section 7), microbatches, and from the sequences of a
microbatch to its layout and seconds."""

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from rayfcp.config.models import BlockOptions
from rayfcp.cost.model import CostModel, speeds_of
from rayfcp.cost.placement import node_of_ranks
from rayfcp.plan.assembly import best_fit_decreasing
from rayfcp.plan.blocks.distributor import Pieces, Pool, RankLimits, distribute, weights_of
from rayfcp.plan.blocks.heads import as_runs, permitted, split
from rayfcp.plan.blocks.rounds import BlockTraffic, RoundSchedule, recoalesced, schedule, traffic_of
from rayfcp.values import (
    Block,
    ClusterSpec,
    InfeasiblePlanError,
    LayerKinds,
    Layout,
    Primitive,
    Round,
    SequenceSpec,
    Transfer,
)
from rayfcp.values.arrays import Floats, Ints

KERNEL_SHARE = 0.9
"""Share of the best efficiency that a block's attention reaches: 2K tokens on GPU-X, as the paper has it."""

BLOCKS_PER_RANK = 8
"""Blocks of a rank, at least, so that rounds hide behind attention; 4K tokens at 32K a rank."""

FEWEST_BLOCKS = 4
"""Blocks of a rank of the largest size that is tried."""

TILE = 128
"""Blocks are whole tiles of a kernel."""


def block_tokens(cost: CostModel, *, tokens_per_rank: float, crosses: bool) -> int:
    """Tokens of a block, a power of two of at least `TILE`.

    (1) A kernel over blocks of n tokens reaches n / (n + attention_half_tokens) of its efficiency, at least
    `KERNEL_SHARE`. (2) Attention of n queries to n keys takes as long as these keys and values take to come:
    n >= seconds a token / seconds a pair, over the links between nodes if ranks `crosses` nodes.
    (3) A rank has `BLOCKS_PER_RANK` blocks; this bounds the others.
    """
    saturating = cost.attention_half_tokens * KERNEL_SHARE / (1 - KERNEL_SHARE)
    link_s = cost.ring_inter_s_per_token if crosses else cost.ring_intra_s_per_token
    hiding = link_s / cost.attention_s_per_pair if cost.attention_s_per_pair > 0 else 0.0
    wanted = min(max(saturating, hiding), tokens_per_rank / BLOCKS_PER_RANK)
    size = TILE
    while size * 2 <= wanted * 2**0.5:  # the nearest power of two
        size *= 2
    return size


def sizes(first_tokens: int, *, tokens_per_rank: float) -> tuple[int, ...]:
    """Block sizes to try, from the one that the rules give to the largest of which a rank has `FEWEST_BLOCKS`.

    Larger blocks are better for kernels, smaller ones hide better; planning a batch with each shows which are best.

    >>> sizes(2048, tokens_per_rank=32768.0)
    (2048, 4096, 8192)
    """
    tried = [first_tokens]
    while tried[-1] * 2 * FEWEST_BLOCKS <= tokens_per_rank:
        tried.append(tried[-1] * 2)
    return tuple(tried)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBatch:
    """Sequences with the most pairs per token first, longest first among equals, then by id; their kinds of layers."""

    ids: Ints
    tokens: Ints
    density: Floats
    layer_kinds: LayerKinds

    def pool(self, members: Ints) -> Pool:
        """The sequences at positions `members`, ascending."""
        return Pool(self.tokens[members], self.density[members], self.layer_kinds)


def batch_of(sequences: Sequence[SequenceSpec]) -> BlockBatch:
    """The columns of a batch."""
    ids = np.array([sequence.id for sequence in sequences], np.int64)
    tokens = np.array([sequence.num_tokens for sequence in sequences], np.int64)
    density = np.array([sequence.attention_pairs for sequence in sequences], np.float64) / tokens
    order = np.lexsort((ids, -tokens, -density))
    return BlockBatch(
        ids=ids[order], tokens=tokens[order], density=density[order], layer_kinds=sequences[0].layer_kinds
    )


def microbatches_of(batch: BlockBatch, *, max_tokens: int) -> list[Ints]:
    """Positions in each microbatch, ascending: as few microbatches as memory permits, by pairs.

    `max_tokens`: of a microbatch on all ranks together. Every sequence can be shared by all ranks, so the number of
    microbatches is all that costs: from the fewest that tokens permit on, the sequences go, most pairs first, to the
    one with the fewest pairs that has tokens left; where none has, best-fit decreasing, which always finds a place.
    """
    pairs = batch.tokens * batch.density
    order = np.argsort(-pairs, kind="stable")
    fewest = -(-int(batch.tokens.sum()) // max_tokens)
    by_length = np.argsort(-batch.tokens, kind="stable")
    packed = np.array(best_fit_decreasing(batch.tokens[by_length].tolist(), capacity_tokens=max_tokens), np.int64)
    for count in range(fewest, int(packed.max()) + 1):
        owners = _by_pairs(batch.tokens[order], pairs[order], count=count, max_tokens=max_tokens)
        if owners is not None:
            return _members(order, owners)
    return _members(by_length, packed)


def _by_pairs(tokens: Ints, pairs: Floats, *, count: int, max_tokens: int) -> Ints | None:
    if count == 1:
        return np.zeros(len(tokens), np.int64)
    held, loads = [0] * count, [0.0] * count
    owners = np.zeros(len(tokens), np.int64)
    for at, (size, work) in enumerate(zip(tokens.tolist(), pairs.tolist(), strict=True)):
        fitting = [each for each in range(count) if held[each] + size <= max_tokens]
        if not fitting:
            return None
        owners[at] = best = min(fitting, key=loads.__getitem__)
        held[best] += size
        loads[best] += work
    return owners


def _members(order: Ints, owners: Ints) -> list[Ints]:
    return [np.sort(order[owners == each]) for each in np.unique(owners)]


RINGS = (Primitive.RING,)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """One microbatch: its blocks, messages and rounds. Ranks of pieces and messages are runs of `heads` ranks
    (`rayfcp.plan.blocks.heads`); `exchange_s`: seconds of the fullest run's exchanges of heads."""

    pieces: Pieces
    traffic: BlockTraffic
    rounds: RoundSchedule
    block_tokens: int
    heads: int = 1
    exchange_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of the slowest rank, without the fixed cost."""
        return float(self.rounds.seconds.max()) + self.exchange_s

    def layout(self, ids: Ints) -> Layout:
        """As a value; `ids[s]` names sequence s of the pool."""
        with _uncollected():
            return self._layout(ids)

    def _layout(self, ids: Ints) -> Layout:
        pieces, messages = self.pieces, self.traffic.messages
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
        carried = self.traffic.needs.block[messages.order].tolist()
        first, source, target = messages.first.tolist(), messages.source.tolist(), messages.target.tolist()
        transfers = [
            Transfer(blocks=_named(carried[first[at] : first[at + 1]], became), source=source[at], target=target[at])
            for at in self.rounds.order.tolist()
        ]
        bounds = self.rounds.bounds.tolist()
        rounds = tuple(Round(transfers=tuple(transfers[begin:end])) for begin, end in pairwise(bounds))
        return Layout(
            blocks=tuple(blocks), rounds=rounds, pacing=self.rounds.pacing if rounds else None, heads=self.heads
        )


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
        InfeasiblePlanError: `options.heads` is not permitted, or runs of so many ranks do not hold the sequences.
    """
    best: BlockPlan | None = None
    for heads in permitted(cluster, cost, allowed=allowed, wanted=options.heads):
        planner = _RunPlanner.of(pool, heads=heads, cluster=cluster, cost=cost, options=options)
        if planner.max_tokens * len(planner.node) < pool.length.sum():
            continue  # runs that replicate keys and values hold less
        for size in planner.sizes():
            best = planner.planned(size, best=best)
    if best is None:  # runs of one rank hold the pool
        raise InfeasiblePlanError(
            f"plan.blocks.heads is {options.heads}: so many ranks replicate keys and values, beside which "
            f"{cluster.num_ranks} ranks hold fewer than the {pool.length.sum()} tokens of a sequence; lower it, or add "
            "memory"
        )
    if options.coalesce is not None:
        return best
    planner = _RunPlanner.of(pool, heads=best.heads, cluster=cluster, cost=cost, options=options)
    rounds = recoalesced(best.traffic, best.rounds, node=planner.node, speeds=planner.speeds, cost=planner.cost)
    return replace(best, rounds=rounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunPlanner:
    """A microbatch on runs of `heads` ranks: `node`, `speeds`, `max_tokens`, `cost` of runs; `rank_cost` of ranks."""

    pool: Pool
    node: Ints
    speeds: Floats
    max_tokens: int
    cost: CostModel
    rank_cost: CostModel
    options: BlockOptions
    heads: int

    @classmethod
    def of(
        cls, pool: Pool, *, heads: int, cluster: ClusterSpec, cost: CostModel, options: BlockOptions
    ) -> "_RunPlanner":
        runs, shared = as_runs(cluster, cost, heads=heads)
        return cls(
            pool=pool,
            node=np.array(node_of_ranks(runs, ranks_per_node=cost.ranks_per_node), np.int64),
            speeds=speeds_of(runs),
            max_tokens=runs.max_tokens_per_rank,
            cost=shared,
            rank_cost=cost,
            options=options,
            heads=heads,
        )

    def sizes(self) -> tuple[int, ...]:
        if self.options.block_tokens is not None:
            return (self.options.block_tokens,)
        mean = float(self.pool.length.sum()) / len(self.node)
        first = block_tokens(self.cost, tokens_per_rank=mean, crosses=len(np.unique(self.node)) > 1)
        return sizes(first, tokens_per_rank=mean)

    def planned(self, size: int, *, best: BlockPlan | None) -> BlockPlan:
        """The plan with blocks of `size`, or `best` if that is no slower."""
        num_tokens = int(self.pool.length.sum())
        limits = RankLimits(
            max_tokens=self.max_tokens,
            block_tokens=size,
            weights=weights_of(self.speeds, num_tokens=num_tokens, max_tokens=self.max_tokens),
        )
        pieces = distribute(self.pool, limits=limits, options=self.options)
        traffic = traffic_of(self.pool, pieces, node=self.node, speeds=self.speeds, cost=self.cost, message_tokens=size)
        tokens = np.bincount(pieces.rank, pieces.stop - pieces.start)
        exchange_s = float(self.rank_cost.exchanges_s(tokens.max(), degree=self.heads))
        if best is not None and traffic.floor_s + exchange_s >= best.seconds:
            return best
        found = BlockPlan(
            pieces=pieces,
            traffic=traffic,
            rounds=schedule(traffic, options=self.options, most_coalesced=num_tokens // len(self.node) // size),
            block_tokens=size,
            heads=self.heads,
            exchange_s=exchange_s,
        )
        return found if best is None or found.seconds < best.seconds else best
