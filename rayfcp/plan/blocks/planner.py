"""How long a block is: the three rules of FCP with blocks (Zhao et al., section 7).

A global batch as columns for the block planner, and its cut into microbatches.

How many rounds run as one: judged by both passes, as gradients go home beside keys and values in the second.

From a microbatch's sequences to its layout and seconds.
"""

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from rayfcp.config.models import BlockOptions
from rayfcp.cost.kernels.flow import Flow, phases_of
from rayfcp.cost.layout import passes_s
from rayfcp.cost.model import CostModel, speeds_of
from rayfcp.cost.placement import node_of_ranks
from rayfcp.cost.work import Rounds
from rayfcp.plan.assembly import best_fit_decreasing
from rayfcp.plan.blocks.distributor import Space, distribute, shares_of
from rayfcp.plan.blocks.heads import as_runs, permitted, split
from rayfcp.plan.blocks.kernels.distribute import Mutual, Pieces, Pool
from rayfcp.plan.blocks.rounds import Schedule, Traffic, schedule, timed, traffic_of
from rayfcp.values import Block, ClusterSpec, Layout, Mask, Pacing, Primitive, Round, SequenceSpec, Transfer
from rayfcp.values.arrays import Bools, Floats, Ints

KERNEL_SHARE = 0.9  # of the best efficiency that a block's attention reaches: 2K on GPU-X, as the paper has it
BLOCKS_PER_RANK = 8  # at least, so that compute and communication can be levelled; 4K at 32K tokens a rank
FEWEST_BLOCKS = 4
TILE = 128  # blocks are whole tiles of a kernel


def block_tokens(cost: CostModel, *, tokens_per_rank: float, crosses: bool) -> int:
    """Tokens of a block, a power of two of at least `TILE`.

    (1) A kernel over blocks of n tokens reaches n / (n + attention_half_tokens) of its efficiency, at least
    `KERNEL_SHARE`. (2) Attention of n queries to n keys takes as long as these keys and values take to come:
    n >= seconds a token / seconds a cell, over the links between nodes if ranks `crosses` nodes.
    (3) A rank has `BLOCKS_PER_RANK` blocks, so that loads can be levelled; this bounds the others.
    """
    saturating = cost.attention_half_tokens * KERNEL_SHARE / (1 - KERNEL_SHARE)
    link_s = cost.ring_inter_s_per_token if crosses else cost.ring_intra_s_per_token
    hiding = link_s / cost.attention_s_per_cell if cost.attention_s_per_cell > 0 else 0.0
    wanted = min(max(saturating, hiding), tokens_per_rank / BLOCKS_PER_RANK)
    size = TILE
    while size * 2 <= wanted * 2**0.5:  # the nearest power of two
        size *= 2
    return size


def sizes(first_tokens: int, *, tokens_per_rank: float) -> tuple[int, ...]:
    """Sizes worth a try, from the one that the rules give to the largest of which a rank has `FEWEST_BLOCKS`.

    Larger blocks are better for kernels, smaller ones hide better; what a given batch wants is seen by planning it.

    >>> sizes(2048, tokens_per_rank=32768.0)
    (2048, 4096, 8192)
    """
    tried = [first_tokens]
    while tried[-1] * 2 * FEWEST_BLOCKS <= tokens_per_rank:
        tried.append(tried[-1] * 2)
    return tuple(tried)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences with the most cells a token first, longest first among equals, then by id. `whole`: themselves."""

    ids: Ints
    tokens: Ints
    full: Bools
    density: Floats
    rising: Floats
    whole: tuple[SequenceSpec, ...]

    def pool(self, members: Ints) -> Pool:
        """Those sequences, `members` ascending."""
        tokens, density, rising = self.tokens[members], self.density[members], self.rising[members]
        mutual = _mutual([self.whole[at] for at in members.tolist()])
        plain = density - np.diff(mutual.cells[mutual.first]) / tokens
        return Pool(tokens, self.full[members], density, plain - rising * (tokens + 1) / 2, rising, mutual)


def batch_of(sequences: Sequence[SequenceSpec]) -> Batch:
    """The columns of a batch."""
    ids = np.array([sequence.id for sequence in sequences], np.int64)
    tokens = np.array([sequence.num_tokens for sequence in sequences], np.int64)
    full = np.array([sequence.mask is Mask.FULL for sequence in sequences], np.bool_)
    cells = np.array([sequence.attention_cells for sequence in sequences], np.float64)
    density, rising = cells / tokens, np.array([_rising(sequence) for sequence in sequences], np.float64)
    order = np.lexsort((ids, -tokens, -density))
    return Batch(
        ids=ids[order],
        tokens=tokens[order],
        full=full[order],
        density=density[order],
        rising=rising[order],
        whole=tuple(sequences[at] for at in order.tolist()),
    )


def _rising(sequence: SequenceSpec) -> float:
    """The share of layers in which a token sees one key more than the one before it."""
    if sequence.mask is Mask.FULL or not sequence.windows:
        return float(sequence.mask is Mask.CAUSAL)
    layers = [(count, window == 0 or window >= sequence.num_tokens) for window, count in sequence.windows]
    return sum(count for count, rises in layers if rises) / sum(count for count, _ in layers)


def _mutual(sequences: Sequence[SequenceSpec]) -> Mutual:
    """What pictures add to a full mask with a window is spread over its tokens."""
    of_each = [
        [span for run in each.mutual for span in run.ranges()] if each.mask is Mask.CAUSAL else [] for each in sequences
    ]
    start, stop = np.array([span for spans in of_each for span in spans], np.int64).reshape(-1, 2).T
    size = stop - start
    first = np.cumsum([0, *map(len, of_each)])
    return Mutual(first, start.copy(), stop.copy(), np.concatenate(([0.0], np.cumsum(size * (size - 1) / 2))))


def microbatches_of(batch: Batch, *, room: int) -> list[Ints]:
    """Positions in each microbatch, ascending: as few microbatches as memory permits, by cells.

    `room`: tokens that all ranks hold together. Every sequence can be shared by all ranks, so the number of
    microbatches is all that costs: from the fewest that tokens permit on, the sequences go, most cells first, to
    the one with the fewest cells that has room; where that finds none, best-fit decreasing, which always does.
    """
    cells = batch.tokens * batch.density
    order = np.argsort(-cells, kind="stable")
    fewest = -(-int(batch.tokens.sum()) // room)
    by_length = np.argsort(-batch.tokens, kind="stable")
    packed = np.array(best_fit_decreasing(batch.tokens[by_length].tolist(), capacity_tokens=room), np.int64)
    for count in range(fewest, int(packed.max()) + 1):
        owners = _by_cells(batch.tokens[order], cells[order], count=count, room=room)
        if owners is not None:
            return _parts(order, owners)
    return _parts(by_length, packed)


def _by_cells(tokens: Ints, cells: Floats, *, count: int, room: int) -> Ints | None:
    if count == 1:
        return np.zeros(len(tokens), np.int64)
    held, loads = [0] * count, [0.0] * count
    owners = np.zeros(len(tokens), np.int64)
    for at, (size, work) in enumerate(zip(tokens.tolist(), cells.tolist(), strict=True)):
        roomy = [each for each in range(count) if held[each] + size <= room]
        if not roomy:
            return None
        part = min(roomy, key=loads.__getitem__)
        owners[at] = part
        held[part] += size
        loads[part] += work
    return owners


def _parts(order: Ints, owners: Ints) -> list[Ints]:
    return [np.sort(order[owners == each]) for each in range(int(owners.max()) + 1) if (owners == each).any()]


TRIED = (1 / 4, 1 / 2, 2.0)  # times as many as hide in a pass without gradients


def restaged(traffic: Traffic, found: Schedule, *, node: Ints, speeds: Floats, cost: CostModel) -> Schedule:
    """The same rounds, those of `found.how` run as one or a few more or fewer, whatever takes least.

    `node`, `speeds`: of each rank; `cost`: of ranks as the traffic has them.
    """
    if not len(found.order):
        return found
    rounds = np.repeat(np.arange(found.num_rounds), np.diff(found.bounds))
    counts = {max(int(found.how.coalesce * times), 1) for times in TRIED}
    hows = [found.how, *(replace(found.how, coalesce=count) for count in sorted(counts - {found.how.coalesce}))]
    linear_s = traffic.linear_s + cost.fixed_s / speeds
    seconds = [_seconds(traffic, found, rounds, how=how, node=node, linear_s=linear_s, cost=cost) for how in hows]
    best = hows[int(np.argmin(seconds))]
    return found if best == found.how else timed(traffic, found.order, rounds=rounds, how=best)


def _seconds(
    traffic: Traffic, found: Schedule, rounds: Ints, *, how: Pacing, node: Ints, linear_s: Floats, cost: CostModel
) -> float:
    """`rayfcp.cost.layout.layout_s` of the schedule, without exchanges of heads."""
    order, parcels = found.order, traffic.parcels
    source, target = parcels.source[order], parcels.target[order]
    stage = rounds // how.coalesce
    flow = Flow(stage, source, target, np.zeros(len(order)), traffic.work_s[order], traffic.own_s, how.num_buffers)
    columns = Rounds(
        work_s=phases_of(flow),
        stage=np.arange(found.num_rounds) // how.coalesce,
        bounds=found.bounds,
        source=source,
        target=target,
        across=(node[source] != node[target]).astype(np.int64),
        moved_s=traffic.moved_s[order] - cost.ring_s_per_round,
        latency_s=float(cost.ring_s_per_round),
        exchange_s=np.zeros(traffic.num_ranks),
        heads=1,
        overlap=float(cost.overlap),
    )
    return sum(passes_s(columns, linear_s, hold=how.num_buffers, cost=cost))


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
