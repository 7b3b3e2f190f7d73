"""Groups of one degree, for a whole batch or for each microbatch of a cut: what mixed degrees have to beat."""

import math
from typing import NamedTuple

import numpy as np

from rayfcp.plan.compiled import compiled, inner
from rayfcp.plan.joint.kernels.allocate import _allocate
from rayfcp.plan.joint.kernels.price import Floats, Ints, _price
from rayfcp.plan.joint.kernels.state import GROUPS, MICROBATCHES, MOVES, World, _forget, _join, _open, _sum_s

HOPEFUL = 1.03  # times the best found: what is estimated to take more is not tried


class Packs(NamedTuple):
    """The pack of each member, and what each pack holds; nothing where some member finds no room."""

    owners: Ints
    tokens: Floats
    cells: Floats


@compiled
def even(world: World, fewest: int, most: int) -> float:
    """All groups of one degree: the best degree, and number of microbatches from `fewest` to `most`, by their seconds.

    For each, the most work goes first, to the pack with the least that has room; packs of like time are side by side.
    Returns the seconds of the batch, infinite where no degree has room for all.
    """
    best, best_count, least_s = 0, 0, math.inf
    for degree in _degrees(world):
        whole_s = _price(world.prices, world.batch.cells.sum(), world.batch.tokens.sum(), degree, 0, 0.0)
        share_s = (whole_s - world.prices.fixed_s) / (world.prices.num_ranks // degree)
        for count in range(fewest, most + 1):
            if share_s + count * (world.prices.fixed_s + world.extra_s) > HOPEFUL * least_s:
                break
            seconds = _even(world, degree, count)
            if seconds < least_s:
                best, best_count, least_s = degree, count, seconds
    return _even(world, best, best_count) if best > 0 else math.inf


@compiled
def even_parts(world: World, part: Ints) -> float:
    """Each microbatch of the cut `part[sequence]` with groups of the degree that is best for it; infinite where one
    has none. Returns the seconds of the batch."""
    state = world.state
    state.owner[:] = -1
    state.counts[GROUPS], state.counts[MICROBATCHES] = 0, part.max() + 1
    spans = np.zeros(state.counts[MICROBATCHES])
    degrees = _degrees(world)
    for microbatch in range(len(spans)):
        members, first = np.flatnonzero(part == microbatch), state.counts[GROUPS]
        best, least_s = 0, math.inf
        for degree in degrees:
            seconds = _even_part(world, members, microbatch, degree)
            if seconds < least_s:
                best, least_s = degree, seconds
            _forget(world, first, microbatch)
        if best == 0:
            return math.inf
        spans[microbatch] = _even_part(world, members, microbatch, best)
    return _sum_s(world, spans)


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


@inner
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
    return _allocate(world, microbatch, first)


@compiled
def _packed(world: World, members: Ints, degree: int, count: int) -> Packs:
    """Into so many packs of `degree` ranks' memory."""
    batch, room = world.batch, world.prices.room * degree
    owners = np.zeros(len(members), np.int64)
    tokens, cells, loads = np.zeros(count), np.zeros(count), np.zeros(count)
    for number in np.argsort(-batch.work_s[members], kind="mergesort"):
        at, best = members[number], -1
        for each in range(count):
            if tokens[each] + batch.tokens[at] <= room and (best < 0 or loads[each] < loads[best]):
                best = each
        if best < 0:
            return Packs(owners[:0], tokens, cells)
        owners[number] = best
        tokens[best] += batch.tokens[at]
        cells[best] += batch.cells[at]
        loads[best] += batch.work_s[at]
    world.state.counts[MOVES] += len(members) * count // 8
    return Packs(owners, tokens, cells)
