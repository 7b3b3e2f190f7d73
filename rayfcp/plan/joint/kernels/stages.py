"""The paper's two stages on a given cut: best-fit decreasing makes groups, exact degrees give them ranks."""

import math

import numpy as np

from rayfcp.plan.compiled import compiled
from rayfcp.plan.joint.kernels.allocate import _allocate
from rayfcp.plan.joint.kernels.cut import Bins, best_fit
from rayfcp.plan.joint.kernels.pack import _floor_s, _one_ring
from rayfcp.plan.joint.kernels.price import Floats, Ints
from rayfcp.plan.joint.kernels.state import GROUPS, MICROBATCHES, World, _forget, _join, _open, _open_seats, _sum_s

GOOD_ENOUGH = 1.002  # of a microbatch's own lower bound: no further capacity is tried


@compiled
def stage(world: World, part: Ints, factors: Floats) -> float:
    """Groups for the cut, each microbatch with the best of several capacities of bins, in multiples of its mean
    tokens per rank, cut at the memory bound; returns the seconds of the batch."""
    state = world.state
    state.owner[:] = -1
    state.counts[GROUPS] = 0
    state.counts[MICROBATCHES] = part.max() + 1
    spans = np.zeros(state.counts[MICROBATCHES])
    for microbatch in range(len(spans)):
        spans[microbatch] = _stage_one(world, np.flatnonzero(part == microbatch), microbatch, factors)
    return _sum_s(world, spans)


@compiled
def _stage_one(world: World, members: Ints, microbatch: int, factors: Floats) -> float:
    """One ring over all ranks comes last: it fits whenever the microbatch does, and moves the most."""
    first, prices = world.state.counts[GROUPS], world.prices
    mean = world.batch.tokens[members].sum() / prices.num_ranks
    enough_s = GOOD_ENOUGH * _floor_s(world, members)
    best, least_s, last = 0.0, math.inf, 0.0
    for factor in factors:
        capacity = math.floor(min(mean * factor + 1, prices.room))
        if capacity == last:
            continue
        last = capacity
        span_s = _bins(world, members, microbatch, capacity)
        if span_s < least_s:
            best, least_s = capacity, span_s
        _forget(world, first, microbatch)
        if least_s <= enough_s:
            break
    if least_s > enough_s:
        ring_s = _one_ring(world, members, microbatch)
        if ring_s <= least_s:
            return ring_s
        _forget(world, first, microbatch)
    return _bins(world, members, microbatch, best)


@compiled
def _bins(world: World, members: Ints, microbatch: int, capacity: float) -> float:
    """Bins of a capacity as groups with exact degrees; infinite if they need more ranks than there are."""
    state, prices = world.state, world.prices
    first = state.counts[GROUPS]
    state.spare[microbatch], state.pace[microbatch] = prices.num_ranks, 0.0  # the paper's T(g, d)
    owners = best_fit(world.batch.tokens[members], Bins(capacity, prices.num_ranks))
    if len(owners) == 0:
        return math.inf
    for number in range(len(owners)):
        if first + owners[number] == state.counts[GROUPS]:
            _open(world, microbatch, 0)
        group = first + owners[number]
        tokens = state.tokens[group] + world.batch.tokens[members[number]]
        if tokens > prices.room * prices.num_ranks:
            return math.inf
        _join(world, members[number], group, math.ceil(tokens / prices.room))
    _open_seats(world, microbatch)
    return _allocate(world, microbatch, first) if state.spare[microbatch] >= 0 else math.inf
