"""The block distributor: which tokens each rank holds (FCP with blocks, Zhao et al., section 4.1)."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rayfcp.config.models import BlockOptions
from rayfcp.plan.blocks.kernels.distribute import Items, Line, Rule, Sweep, longest_first, sweep
from rayfcp.values import LayerKinds
from rayfcp.values.arrays import Bools, Floats, Ints
from rayfcp.values.layers import layers_work


class Pool(NamedTuple):
    """The sequences of a microbatch: tokens, and computed pairs per token in the mean; kinds of the model's layers."""

    length: Ints
    density: Floats
    layer_kinds: LayerKinds = ()


class Pieces(NamedTuple):
    """Blocks, ascending by (sequence, start): `[start, stop)` of sequence `owner` on rank `rank` of `num_ranks`; those
    of sequence s are `first[s]` to `first[s + 1]`."""

    owner: Ints
    start: Ints
    stop: Ints
    rank: Ints
    first: Ints
    num_ranks: int


class Shares(NamedTuple):
    """Ascending by (sequence, rank): `tokens[i]` of sequence `owner[i]` on rank `rank[i]`, each pair once."""

    owner: Ints
    rank: Ints
    tokens: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLimits:
    """The most tokens of a rank, the tokens of a block, and the part of tokens and pairs that is due to each rank over
    the mean."""

    max_tokens: int
    block_tokens: int
    weights: Floats


def weights_of(speeds: Floats, *, num_tokens: int, max_tokens: int) -> Floats:
    """Parts in proportion to speed, mean 1; ranks without memory for theirs are full, and the others get more."""
    most = max_tokens * len(speeds) / max(num_tokens, 1)
    full: Bools = np.zeros(len(speeds), np.bool_)
    while True:
        left = len(speeds) - most * full.sum()
        weights = np.where(full, most, speeds * (left / speeds[~full].sum()) if not full.all() else most)
        over = (weights > most) & ~full
        if not over.any() or most <= 1.0:
            return weights if most > 1.0 else np.ones(len(speeds))
        full |= over


def distribute(pool: Pool, *, limits: RankLimits, options: BlockOptions) -> Pieces:
    """Blocks of a microbatch whose tokens all ranks together can hold; no rank holds more than `limits.max_tokens`."""
    if options.placement == "lpt":
        found = _by_algorithm_1(pool, limits=limits, options=options)
        if found is not None:
            return found
    return cut(pool, _shares(pool, limits=limits, tolerance=options.tolerance), limits=limits)


def piece_pairs(pool: Pool, pieces: Pieces) -> Floats:
    """Pairs of each block's queries with all keys of its sequence, in the mean over layers."""
    return np.asarray(layers_work(pool.layer_kinds, start=pieces.start, stop=pieces.stop).pairs, np.float64)


def loads_of(pool: Pool, pieces: Pieces) -> tuple[Floats, Floats]:
    """Tokens and pairs of each rank."""
    tokens, pairs = (
        np.bincount(pieces.rank, each, minlength=pieces.num_ranks).astype(np.float64)
        for each in (pieces.stop - pieces.start, piece_pairs(pool, pieces))
    )
    return tokens, pairs


def _shares(pool: Pool, *, limits: RankLimits, tolerance: float) -> Shares:
    """Equal tokens and pairs; sequences of up to a block are cut only where nothing else keeps to the tolerance."""
    num_ranks = len(limits.weights)
    order = _line_order(pool, num_ranks=num_ranks)
    length, density = pool.length[order], pool.density[order]
    line = Line(np.append(0, np.cumsum(length)), np.append(0.0, np.cumsum(length * density)), density)
    how = Sweep(limits.max_tokens, limits.block_tokens, max(limits.block_tokens // 2, 1), tolerance / 4, limits.weights)
    bounds = sweep(line, how)
    cuts = np.union1d(bounds, line.tokens)
    at = np.searchsorted(line.tokens, cuts[:-1], side="right") - 1
    interval = np.searchsorted(bounds, cuts[:-1], side="right") - 1
    rank = np.minimum(interval, 2 * num_ranks - 1 - interval)
    keys, row = np.unique(order[at] * num_ranks + rank, return_inverse=True)
    tokens = np.bincount(row, np.diff(cuts), minlength=len(keys)).astype(np.int64)
    return Shares(keys // num_ranks, keys % num_ranks, tokens)


def _line_order(pool: Pool, *, num_ranks: int) -> Ints:
    """The order in which sequences are swept: those denser than the mean, then the others, densest first.

    Among the denser ones any order will do, as what is left on that side stays denser than the mean. So those
    that need more than one rank are kept apart by those that do not: a rank that has the end of one and the
    beginning of the next would have to get the keys and values of both.
    """
    pairs = pool.length * pool.density
    mean_density, mean_pairs = pairs.sum() / pool.length.sum(), pairs.sum() / num_ranks
    dense = pool.density > mean_density
    long = np.flatnonzero(dense & (pairs > mean_pairs))
    between = np.flatnonzero(dense & (pairs <= mean_pairs))
    gap = np.arange(len(between)) % max(len(long), 1)
    key = np.concatenate([np.arange(len(long)), gap + 0.5])
    first = np.concatenate([long, between])[np.argsort(key, kind="stable")]
    return np.concatenate([first, np.flatnonzero(~dense)]).astype(np.int64)


def cut(pool: Pool, shares: Shares, *, limits: RankLimits) -> Pieces:
    """Blocks of the shares. A sequence on several ranks is cut from the outside in: each rank gets the next slice from
    both ends, equal but for an odd token, the last rank the middle. Slices are cut into blocks of about
    `limits.block_tokens`, equal within one token; sequences on one rank stay whole."""
    owner, rank, tokens = shares
    count = np.bincount(owner, minlength=len(pool.length))
    last = np.cumsum(count)[owner] - 1 == np.arange(len(owner))
    before = np.cumsum(tokens) - tokens
    before -= (np.cumsum(pool.length) - pool.length)[owner]
    after, length = before + tokens, pool.length[owner]
    start = np.concatenate([(before + 1) // 2, (length - after // 2)[~last]])
    stop = np.concatenate([np.where(last, length - before // 2, (after + 1) // 2), (length - before // 2)[~last]])
    owner, rank = (np.concatenate([each, each[~last]]) for each in (owner, rank))
    order = np.lexsort((start, owner))
    order = order[stop[order] > start[order]]
    owner, rank, start, size = owner[order], rank[order], start[order], (stop - start)[order]
    blocks = np.maximum((2 * size + limits.block_tokens) // (2 * limits.block_tokens), 1)
    blocks[count[owner] == 1] = 1
    at = np.repeat(np.arange(len(owner)), blocks)
    number = np.arange(len(at)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    owner = owner[at]
    return Pieces(
        owner=owner,
        start=start[at] + size[at] * number // blocks[at],
        stop=start[at] + size[at] * (number + 1) // blocks[at],
        rank=rank[at],
        first=np.searchsorted(owner, np.arange(len(pool.length) + 1)),
        num_ranks=len(limits.weights),
    )


def _by_algorithm_1(pool: Pool, *, limits: RankLimits, options: BlockOptions) -> Pieces | None:
    """Blocks of one size, and what is left at the end of a sequence; None if they do not fit in memory."""
    num_ranks = len(limits.weights)
    pieces, item_of = _of_one_size(pool, limits=limits, mirrored=options.pairing == "zigzag")
    tokens = np.bincount(item_of, pieces.stop - pieces.start)
    pairs = np.bincount(item_of, piece_pairs(pool, pieces))
    items = Items(tokens.astype(np.int64), tokens * num_ranks / tokens.sum(), pairs * num_ranks / pairs.sum())
    mean = math.ceil(int(pool.length.sum()) / num_ranks * limits.weights.max())
    for max_tokens in (min(int(mean * (1 + options.tolerance)), limits.max_tokens), limits.max_tokens):
        rank_of = longest_first(items, Rule(options.alpha, options.beta, max_tokens, limits.weights))
        if len(rank_of):
            return pieces._replace(rank=rank_of[item_of])
    return None


def _of_one_size(pool: Pool, *, limits: RankLimits, mirrored: bool) -> tuple[Pieces, Ints]:
    """Blocks of `limits.block_tokens`, sequences of at most that whole, and the item of each block: itself, or, if
    `mirrored`, itself and its mirror image."""
    count = -(-pool.length // limits.block_tokens)
    first = np.append(0, np.cumsum(count))
    owner = np.repeat(np.arange(len(count)), count)
    at = np.arange(len(owner)) - first[owner]
    start = at * limits.block_tokens
    stop = np.minimum(start + limits.block_tokens, pool.length[owner])
    item = np.minimum(at, count[owner] - 1 - at) if mirrored else at
    _, item_of = np.unique(first[owner] + item, return_inverse=True)
    return Pieces(owner, start, stop, np.zeros(len(owner), np.int64), first, len(limits.weights)), item_of
