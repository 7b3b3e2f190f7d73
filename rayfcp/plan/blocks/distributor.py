"""The block distributor: which tokens lie where (FCP with blocks, Zhao et al., section 4.1)."""

import math
from dataclasses import dataclass

import numpy as np

from rayfcp.config.models import BlockOptions
from rayfcp.plan.blocks.kernels.distribute import (
    Items,
    Pieces,
    Pool,
    Rule,
    Shares,
    Sweep,
    longest_first,
    rows_of,
    slices_of,
    sweep,
)
from rayfcp.plan.blocks.kernels.improve import Placed, Search, improve
from rayfcp.plan.blocks.kernels.traffic import cells_of, loads_of, sides_by_sequence
from rayfcp.values.arrays import Floats, Ints

PARTNERS = 12  # ranks with the least load that the fullest tries
ENOUGH = 1e-3  # imbalance that need not be improved on
CELLS_SHARE = 0.75  # of the tolerance that cells may use up so that seconds are level
WEIGHTS = 3  # that are tried for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Ranks, the most tokens of each, the tokens of a block, and each rank's part of tokens and cells over the mean."""

    num_ranks: int
    max_tokens: int
    block_tokens: int
    weights: Floats


def shares_of(speeds: Floats, *, num_tokens: int, most: int) -> Floats:
    """Parts in proportion to speed, mean 1; ranks that have no memory for theirs are full, and the others have more."""
    room = most * len(speeds) / max(num_tokens, 1)
    full = np.zeros(len(speeds), np.bool_)
    while True:
        left = len(speeds) - room * full.sum()
        weights = np.where(full, room, speeds * (left / speeds[~full].sum()) if not full.all() else room)
        over = (weights > room) & ~full
        if not over.any() or room <= 1.0:
            return weights if room > 1.0 else np.ones(len(speeds))
        full |= over


def distribute(pool: Pool, *, space: Space, half_tokens: float, options: BlockOptions) -> Pieces:
    """Blocks of a microbatch whose tokens all ranks together can hold; no rank holds more than `space.max_tokens`.

    `half_tokens`: attention over pieces of n tokens takes 1 + that / n as long per cell.
    """
    if options.placement == "lpt":
        found = _by_algorithm_1(pool, space=space, options=options)
        if found is not None:
            return found
    return _by_shares(pool, space=space, half_tokens=half_tokens, options=options)


def _by_shares(pool: Pool, *, space: Space, half_tokens: float, options: BlockOptions) -> Pieces:
    """Equal tokens and equal seconds of attention (or in the parts that are due to ranks), as far as cells stay within
    the tolerance.

    Kernels take longer over a sequence that is cut into many pieces: that is counted on a first placement,
    and added to its cells for the next.
    """
    pieces = _shared(pool, space=space, options=options)
    if half_tokens == 0:
        return pieces
    extra = half_tokens * sides_by_sequence(pool, pieces) / pool.length
    weight, most = 1.0, CELLS_SHARE * options.tolerance
    for _ in range(WEIGHTS):
        slowed = pool._replace(density=pool.density + weight * extra)
        found = _shared(slowed, space=space, options=options)
        cells = loads_of(pool, found)[1] / space.weights
        imbalance = 1 - float(cells.mean() / cells.max())
        if imbalance <= most:
            return found
        weight *= most / imbalance
    return pieces


def _shared(pool: Pool, *, space: Space, options: BlockOptions) -> Pieces:
    """Equal tokens and cells; sequences of up to a block are cut only where nothing else keeps to the tolerance."""
    order = _line(pool, num_ranks=space.num_ranks)
    line = pool._replace(length=pool.length[order], density=pool.density[order])
    how = Sweep(
        space.num_ranks,
        space.max_tokens,
        space.block_tokens,
        max(space.block_tokens // 2, 1),
        options.tolerance / 4,
        space.weights,
    )
    at, rank, tokens = rows_of(line, sweep(line, how))
    keys, row = np.unique(order[at] * space.num_ranks + rank, return_inverse=True)
    total = np.bincount(row, tokens, minlength=len(keys)).astype(np.int64)
    shares = Shares(keys // space.num_ranks, keys % space.num_ranks, total, space.num_ranks, space.block_tokens)
    return slices_of(pool, shares)


def _line(pool: Pool, *, num_ranks: int) -> Ints:
    """The order in which sequences are swept: those denser than the mean, then the others, densest first.

    Among the denser ones any order will do, as what is left on that side stays denser than the mean. So those
    that need more than one rank are kept apart by those that do not: a rank that has the end of one and the
    beginning of the next would have to get the keys and values of both.
    """
    cells = pool.length * pool.density
    mean_density, mean_cells = cells.sum() / pool.length.sum(), cells.sum() / num_ranks
    dense = pool.density > mean_density
    long = np.flatnonzero(dense & (cells > mean_cells))
    between = np.flatnonzero(dense & (cells <= mean_cells))
    gap = np.arange(len(between)) % max(len(long), 1)
    key = np.concatenate([np.arange(len(long)), gap + 0.5])
    first = np.concatenate([long, between])[np.argsort(key, kind="stable")]
    return np.concatenate([first, np.flatnonzero(~dense)]).astype(np.int64)


def _by_algorithm_1(pool: Pool, *, space: Space, options: BlockOptions) -> Pieces | None:
    """Blocks of one size, and what is left at the end of a sequence; None if they do not fit in memory."""
    pieces, item_of = _fixed(pool, space.block_tokens, paired=options.pairing == "zigzag")
    items = _items(pool, pieces, item_of, num_ranks=space.num_ranks)
    mean = math.ceil(int(pool.length.sum()) / space.num_ranks * space.weights.max())
    for most in (min(int(mean * (1 + options.tolerance)), space.max_tokens), space.max_tokens):
        rule = Rule(space.num_ranks, options.alpha, options.beta, most, space.weights)
        rank_of = longest_first(items, rule)
        if len(rank_of):
            improve(Placed(items, rank_of), Search(rule, options.search_moves, PARTNERS, ENOUGH))
            return pieces._replace(rank=rank_of[item_of], num_ranks=space.num_ranks)
    return None


def _fixed(pool: Pool, block_tokens: int, *, paired: bool) -> tuple[Pieces, Ints]:
    """Blocks of `block_tokens`, sequences of at most that whole, and the item of each block: itself, or itself and
    its mirror image under a causal mask."""
    count = -(-pool.length // block_tokens)
    first = np.concatenate([[0], np.cumsum(count)]).astype(np.int64)
    owner = np.repeat(np.arange(len(count)), count)
    at = np.arange(len(owner)) - first[owner]
    start = at * block_tokens
    stop = np.minimum(start + block_tokens, pool.length[owner])
    mirrored = np.minimum(at, count[owner] - 1 - at)
    item = np.where(pool.full[owner] | (not paired), at, mirrored)
    _, item_of = np.unique(first[owner] + item, return_inverse=True)
    return Pieces(owner, start, stop, np.zeros(len(owner), np.int64), first, 1), item_of.astype(np.int64)


def _items(pool: Pool, pieces: Pieces, item_of: Ints, *, num_ranks: int) -> Items:
    tokens = np.bincount(item_of, pieces.stop - pieces.start)
    cells = np.bincount(item_of, cells_of(pool, pieces))
    owner = np.zeros(len(tokens), np.int64)
    owner[item_of] = pieces.owner
    several = np.bincount(owner, minlength=len(pool.length)) > 1
    number = np.where(several, np.cumsum(several) - 1, int(several.sum()))
    return Items(
        tokens.astype(np.int64),
        tokens * num_ranks / tokens.sum(),
        cells * num_ranks / cells.sum(),
        number[owner],
        np.where(several, pool.length, 0)[owner],
    )
