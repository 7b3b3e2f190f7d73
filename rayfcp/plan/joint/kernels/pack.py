"""Whole batches: pack a given cut, or fill one microbatch after the other with what is left."""

import math

import numpy as np

from rayfcp.plan.compiled import compiled, inner
from rayfcp.plan.joint.kernels.allocate import _allocate
from rayfcp.plan.joint.kernels.even import _best_even, _even_part
from rayfcp.plan.joint.kernels.fill import Fill, _fill
from rayfcp.plan.joint.kernels.price import Ints, _pace_of, _price
from rayfcp.plan.joint.kernels.split import split_rings
from rayfcp.plan.joint.kernels.state import GROUPS, MICROBATCHES, World, _forget, _join, _open, _open_seats, _sum_s

FIRST_ENOUGH = 1.02  # of its floor: the microbatch gets no more walks
LIMIT = 1.1  # of the makespan to beat: a group that takes so long ends the walk; less may be mended by exact degrees


@compiled
def pack(world: World, part: Ints) -> float:
    """Groups for the cut `part[sequence]`; returns the seconds of the batch."""
    state = world.state
    state.owner[:] = -1
    state.counts[GROUPS] = 0
    state.counts[MICROBATCHES] = part.max() + 1
    spans = np.zeros(state.counts[MICROBATCHES])
    for microbatch in range(state.counts[MICROBATCHES]):
        members, first = np.flatnonzero(part == microbatch), state.counts[GROUPS]
        degree, even_s = _best_even(world, members, microbatch)
        spans[microbatch] = _pack_one(world, members, microbatch)
        if even_s < spans[microbatch]:
            _forget(world, first, microbatch)
            spans[microbatch] = _even_part(world, members, microbatch, degree)
    if np.isfinite(spans).all():
        split_rings(world, spans)
    return _sum_s(world, spans)


@inner
def _floor_s(world: World, members: Ints) -> float:
    """No plan of these sequences in one microbatch takes less."""
    batch, prices = world.batch, world.prices
    work_s = alone_s = 0.0
    for at in members:
        work_s += batch.work_s[at]
        alone_s = max(alone_s, batch.alone_s[at])
    return max(work_s / prices.capacity + prices.fixed_s, alone_s)


@compiled
def _pack_one(world: World, members: Ints, microbatch: int) -> float:
    """The best of a few walks, or one ring over all ranks, which fits whenever the microbatch does; infinite where that
    needs seats and no walk found how."""
    first, prices = world.state.counts[GROUPS], world.prices
    floor_s = max(_floor_s(world, members), world.traffic_s)
    tokens = world.batch.tokens[members].sum()
    tight = tokens > 0.8 * prices.holds
    pools = (8, 0, 1) if tight else (1, 0, 0)
    factors = (1.0, 1.02, 1.0) if tight else (1.0, 1.02, 1.1)
    cells = world.batch.cells[members].sum()
    pace = _pace_of(prices, cells, tokens)
    best, least_s = -1, math.inf
    if tokens <= prices.room * prices.num_ranks:
        least_s = _price(prices, cells, tokens, prices.num_ranks, 0, 0.0)
    last = -1
    for walk in range(3):
        if least_s <= FIRST_ENOUGH * floor_s:
            break
        _forget(world, first, microbatch)
        world.state.pace[microbatch] = pace
        limit_s = LIMIT * least_s
        last = walk
        if _fill(
            world, members, microbatch, Fill(factors[walk] * floor_s, limit_s, min(pools[walk], prices.num_ranks))
        ):
            span_s = _allocate(world, microbatch, first)
            if span_s < least_s:
                best, least_s = walk, span_s
        else:
            last = -1
    if best >= 0 and best == last:
        return least_s
    _forget(world, first, microbatch)
    if best < 0:
        return _one_ring(world, members, microbatch)
    world.state.pace[microbatch] = pace
    _fill(world, members, microbatch, Fill(factors[best] * floor_s, math.inf, min(pools[best], prices.num_ranks)))
    return _allocate(world, microbatch, first)


@compiled
def _one_ring(world: World, members: Ints, microbatch: int) -> float:
    """All sequences in one group; infinite if they do not fit there."""
    first, num_ranks = world.state.counts[GROUPS], world.prices.num_ranks
    world.state.spare[microbatch], world.state.pace[microbatch] = num_ranks, 0.0
    group = _open(world, microbatch, num_ranks)
    for at in members:
        _join(world, at, group, num_ranks)
    if world.state.tokens[group] > world.prices.room * num_ranks:
        return math.inf
    _open_seats(world, microbatch)
    return _allocate(world, microbatch, first)
