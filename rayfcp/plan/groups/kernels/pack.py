"""The 2D dynamic programme (Flexible Context Parallelism, Eq. 11, Algorithm 1).

Whole batches: pack a given cut, or fill one microbatch after the other with what is left.

The paper's two stages on a given cut: best-fit decreasing makes groups, exact degrees give them ranks.
"""

import math

import numpy as np

from rayfcp.cost.compiled import compiled, inner
from rayfcp.plan.groups.kernels.cut import Bins, best_fit
from rayfcp.plan.groups.kernels.even import _best_even, _even_part
from rayfcp.plan.groups.kernels.fill import Fill, _fill
from rayfcp.plan.groups.kernels.improve import split_rings
from rayfcp.plan.groups.kernels.price import _pace_of, _price
from rayfcp.plan.groups.kernels.ranks import _allocate
from rayfcp.plan.groups.kernels.state import GROUPS, MICROBATCHES, World, _forget, _join, _open, _open_seats, _sum_s
from rayfcp.values.arrays import Floats, Ints


@compiled
def best_paths(table: Floats) -> tuple[Floats, Ints]:
    """`best[j]`: the least makespan of all groups on exactly j ranks; `path[g, j]`: the degree of group g there."""
    num_groups, num_ranks = table.shape
    best = np.full(num_ranks + 1, np.inf)
    best[0] = -np.inf
    path = np.ones((num_groups, num_ranks + 1), np.int64)
    for group in range(num_groups):
        after = np.full(num_ranks + 1, np.inf)
        for ranks in range(1, num_ranks + 1):
            least_s, choice = math.inf, 1
            for degree in range(1, ranks + 1):
                makespan_s = max(best[ranks - degree], table[group, degree - 1])
                if makespan_s < least_s:
                    least_s, choice = makespan_s, degree
            after[ranks], path[group, ranks] = least_s, choice
        best = after
    return best, path


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
