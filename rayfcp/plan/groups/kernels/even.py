"""Groups of one degree, for a whole batch or for a microbatch: what mixed degrees have to beat."""

import math
from typing import NamedTuple

import numpy as np

from rayfcp.cost.compiled import compiled, inner
from rayfcp.plan.groups.kernels.cut import _num_bins, _packed
from rayfcp.plan.groups.kernels.price import _price
from rayfcp.plan.groups.kernels.ranks import _allocate, alone_s, place
from rayfcp.plan.groups.kernels.state import GROUPS, MICROBATCHES, World, _forget, _join, _open, _open_seats, _sum_s
from rayfcp.values.arrays import Ints

MORE = 2  # microbatches than the fewest that hold all at a degree
HOPEFUL = 1.03  # times the best found: what is estimated to take more is not tried
FEW_EACH = 8  # sequences a pack in the mean: by length they may be more level than by work


class Way(NamedTuple):
    """Groups of `degree` ranks, none if 0, in so many microbatches, of sequences packed by length, or else by work."""

    degree: int
    microbatches: int
    by_length: bool


@compiled
def even(world: World, fewest: int, most: int) -> tuple[Way, Way]:
    """All groups of one degree: the best way by its seconds once ranks went to the slowest, and the best by those of
    groups that stay alike, where they lie on nodes.

    The most work goes first, to the pack with the least that has room, or sequences go by length where that leaves one
    without room, or where they are few, if that is better; packs of like time are side by side. Of each degree the
    first number of microbatches from `fewest` to `most` that has room for all is tried, and `MORE` above.
    """
    best, least_s = Way(0, 0, False), math.inf
    alike, alike_s = Way(0, 0, False), math.inf
    everyone = np.arange(len(world.state.owner))
    for degree in _degrees(world):
        share_s = _share_s(world, everyone, degree)
        fixed_s = world.prices.fixed_s + world.extra_s
        if share_s == math.inf or share_s + fewest * fixed_s > HOPEFUL * least_s:
            continue
        count = _fewest(world, everyone, degree, fewest)
        last = min(count + MORE, most)
        while count <= last and share_s + count * fixed_s <= HOPEFUL * least_s:
            few = len(everyone) <= FEW_EACH * count * (world.prices.num_ranks // degree)
            for turn in range(1 + few):
                way = Way(degree, count, turn == 1)
                if not _spread(world, way):
                    continue
                if len(world.nodes) > 1:
                    seconds = place(world)
                    alike, alike_s = (way, seconds) if seconds < alike_s else (alike, alike_s)
                    alone_s(world)
                seconds = _settle(world)
                best, least_s = (way, seconds) if seconds < least_s else (best, least_s)
            count += 1
    return best, alike


@compiled
def spread(world: World, way: Way, stay: bool) -> float:
    """That way; seconds of the batch where its groups lie if they are to stay alike, else once ranks went to the
    slowest."""
    if not _spread(world, way):
        return math.inf
    return place(world) if stay else _settle(world)


@inner
def _fewest(world: World, members: Ints, degree: int, fewest: int) -> int:
    """Microbatches of groups of `degree` ranks that hold all by length, at least so many."""
    beside = world.prices.num_ranks // degree
    return max(fewest, math.ceil(_num_bins(world, members, degree) / beside))


@compiled
def _best_even(world: World, members: Ints, microbatch: int) -> tuple[int, float]:
    """The best degree for groups of one degree in a microbatch, and their seconds; (0, infinite) if none has room."""
    first = world.state.counts[GROUPS]
    best, least_s = 0, math.inf
    for degree in _degrees(world):
        if _share_s(world, members, degree) + world.prices.fixed_s <= HOPEFUL * least_s:
            seconds = _even_part(world, members, microbatch, degree)
            if seconds < least_s:
                best, least_s = degree, seconds
            _forget(world, first, microbatch)
    return best, least_s


@inner
def _share_s(world: World, members: Ints, degree: int) -> float:
    """Seconds that each of as many groups of `degree` ranks as there can be takes for its share of the members, about,
    without what is fixed; infinite where no group can hold the longest."""
    batch, prices = world.batch, world.prices
    tokens = cells = longest = 0.0
    for at in members:
        tokens += batch.tokens[at]
        cells += batch.cells[at]
        longest = max(longest, batch.tokens[at])
    if longest > degree * prices.room:
        return math.inf
    whole_s = _price(prices, cells, tokens, degree, 0, 0.0) - prices.fixed_s
    return whole_s / min(prices.num_ranks // degree, len(members))


@compiled
def _degrees(world: World) -> Ints:
    """Powers of two, and these times three, up to all ranks."""
    found = np.zeros(64, np.int64)
    count, degree = 0, 1
    while degree < world.prices.num_ranks:
        found[count] = degree
        count += 1
        degree = degree * 3 // 2 if degree & (degree - 1) == 0 and degree > 1 else max(degree * 4 // 3, degree + 1)
    found[count] = world.prices.num_ranks
    return found[: count + 1]


@compiled
def _spread(world: World, way: Way) -> bool:
    """Whether there is room."""
    state, prices = world.state, world.prices
    beside = prices.num_ranks // way.degree
    packs = _packed(world, np.arange(len(state.owner)), way.degree, beside * way.microbatches, way.by_length)
    if len(packs.owners) == 0:
        return False
    seconds = np.zeros(len(packs.tokens))
    for each in range(len(seconds)):
        if packs.tokens[each] > 0.0:
            seconds[each] = _price(prices, packs.cells[each], packs.tokens[each], way.degree, 0, 0.0)
    homes = np.empty(len(seconds), np.int64)
    homes[np.argsort(-seconds, kind="mergesort")] = np.arange(len(seconds)) // beside
    state.owner[:] = -1
    state.counts[GROUPS], state.counts[MICROBATCHES] = 0, way.microbatches
    for microbatch in range(way.microbatches):
        state.spare[microbatch], state.pace[microbatch] = prices.num_ranks, 0.0
        _open_seats(world, microbatch)
    names = np.full(len(seconds), -1)
    for at in range(len(state.owner)):
        pack = packs.owners[at]
        if names[pack] < 0:
            names[pack] = _open(world, homes[pack], way.degree)
        _join(world, at, names[pack], way.degree)
    return True


@compiled
def _settle(world: World) -> float:
    """Give ranks to the slowest in each microbatch; returns the seconds of the batch."""
    spans = np.zeros(world.state.counts[MICROBATCHES])
    for microbatch in range(len(spans)):
        spans[microbatch] = _allocate(world, microbatch, 0)
    return _sum_s(world, spans)


@compiled
def _even_part(world: World, members: Ints, microbatch: int, degree: int) -> float:
    state, prices = world.state, world.prices
    first, count = state.counts[GROUPS], min(prices.num_ranks // degree, len(members))
    packs = _packed(world, members, degree, count, False)
    if len(packs.owners) == 0:
        return math.inf
    state.spare[microbatch], state.pace[microbatch] = prices.num_ranks, 0.0
    for _ in range(count):
        _open(world, microbatch, degree)
    for number in range(len(members)):
        _join(world, members[number], first + packs.owners[number], degree)
    _open_seats(world, microbatch)
    return _allocate(world, microbatch, first)
