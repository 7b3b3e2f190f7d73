"""Groups of one degree, for a whole batch or for a microbatch: what mixed degrees have to beat."""

import math

import numpy as np

from rayfcp.plan.compiled import compiled, inner
from rayfcp.plan.joint.kernels.allocate import _allocate
from rayfcp.plan.joint.kernels.bins import _packed
from rayfcp.plan.joint.kernels.price import Ints, _price
from rayfcp.plan.joint.kernels.state import (
    GROUPS,
    MICROBATCHES,
    World,
    _forget,
    _join,
    _open,
    _open_seats,
    _sum_s,
)

HOPEFUL = 1.03  # times the best found: what is estimated to take more is not tried


@compiled
def even(world: World, fewest: int, most: int) -> float:
    """All groups of one degree: the best degree, and number of microbatches from `fewest` to `most`, by their seconds.

    For each, the most work goes first, to the pack with the least that has room, or sequences go by length where that
    leaves one without room; packs of like time are side by side.
    Returns the seconds of the batch, infinite where no degree has room for all.
    """
    best, best_count, least_s = 0, 0, math.inf
    everyone = np.arange(len(world.state.owner))
    for degree in _degrees(world):
        share_s = _share_s(world, everyone, degree)
        if share_s == math.inf:
            continue
        for count in range(fewest, most + 1):
            if share_s + count * (world.prices.fixed_s + world.extra_s) > HOPEFUL * least_s:
                break
            seconds = _even(world, degree, count)
            if seconds < least_s:
                best, best_count, least_s = degree, count, seconds
    return _even(world, best, best_count) if best > 0 else math.inf


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
def _even(world: World, degree: int, count: int) -> float:
    state, prices = world.state, world.prices
    beside = prices.num_ranks // degree
    packs = _packed(world, np.arange(len(state.owner)), degree, beside * count)
    if len(packs.owners) == 0:
        return math.inf
    seconds = np.zeros(len(packs.tokens))
    for each in range(len(seconds)):
        if packs.tokens[each] > 0.0:
            seconds[each] = _price(prices, packs.cells[each], packs.tokens[each], degree, 0, 0.0)
    homes = np.empty(len(seconds), np.int64)
    homes[np.argsort(-seconds, kind="mergesort")] = np.arange(len(seconds)) // beside
    state.owner[:] = -1
    state.counts[GROUPS], state.counts[MICROBATCHES] = 0, count
    for microbatch in range(count):
        state.spare[microbatch], state.pace[microbatch] = prices.num_ranks, 0.0
        _open_seats(world, microbatch)
    names = np.full(len(seconds), -1)
    for at in range(len(state.owner)):
        pack = packs.owners[at]
        if names[pack] < 0:
            names[pack] = _open(world, homes[pack], degree)
        _join(world, at, names[pack], degree)
    spans = np.zeros(count)
    for microbatch in range(count):
        spans[microbatch] = _allocate(world, microbatch, 0)
    return _sum_s(world, spans)


@compiled
def _even_part(world: World, members: Ints, microbatch: int, degree: int) -> float:
    state, prices = world.state, world.prices
    first, count = state.counts[GROUPS], min(prices.num_ranks // degree, len(members))
    packs = _packed(world, members, degree, count)
    if len(packs.owners) == 0:
        return math.inf
    state.spare[microbatch], state.pace[microbatch] = prices.num_ranks, 0.0
    for _ in range(count):
        _open(world, microbatch, degree)
    for number in range(len(members)):
        _join(world, members[number], first + packs.owners[number], degree)
    _open_seats(world, microbatch)
    return _allocate(world, microbatch, first)
