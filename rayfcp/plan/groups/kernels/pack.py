"""Groups for a given cut into microbatches: by walks, or by the paper's two stages and its dynamic program."""

import math

import numpy as np

from rayfcp.cost.compiled import compiled, inner_with_arrays
from rayfcp.plan.groups.kernels.cut import _floors, best_fit
from rayfcp.plan.groups.kernels.even import _best_even, _even_part
from rayfcp.plan.groups.kernels.fill import Fill, _fill, _queue
from rayfcp.plan.groups.kernels.improve import split_rings
from rayfcp.plan.groups.kernels.price import SLACK, Load, _pace_of, _price
from rayfcp.plan.groups.kernels.ranks import _allocate
from rayfcp.plan.groups.kernels.state import (
    GROUPS,
    SearchProblem,
    _clear,
    _close_from,
    _join,
    _open,
    _open_pinned,
    _sum_s,
)
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


@inner_with_arrays
def pack(problem: SearchProblem, part: Ints, factors: Floats) -> float:
    """Construct groups for the cut `part[sequence]`; returns the seconds of the batch.

    With `factors`, by the paper's two stages: each microbatch has the best of these capacities of bins, in multiples of
    its mean tokens per rank, cut at the memory bound. Without, by walks or with groups of one degree.
    """
    state, floors = problem.state, _floors(problem, part)
    spans = np.zeros(len(floors))
    _clear(problem, len(spans))
    for microbatch in range(len(spans)):
        members, first = np.flatnonzero(part == microbatch), state.counts[GROUPS]
        if len(factors) > 0:
            spans[microbatch] = _stage_one(problem, members, microbatch, factors, floors[microbatch])
            continue
        degree, even_s = _best_even(problem, members, microbatch)
        spans[microbatch] = _pack_one(problem, members, microbatch, floors[microbatch])
        if even_s < spans[microbatch]:
            _close_from(problem, first, microbatch)
            spans[microbatch] = _even_part(problem, members, microbatch, degree)
    if len(factors) == 0 and _sum_s(problem, spans) < np.inf:
        split_rings(problem, spans)
    return _sum_s(problem, spans)


@inner_with_arrays
def _pack_one(problem: SearchProblem, members: Ints, microbatch: int, floor_s: float) -> float:
    """The best of a few walks, or one ring over all ranks, which fits whenever the microbatch does; infinite where that
    needs pinned groups and no walk found how."""
    first, prices = problem.state.counts[GROUPS], problem.prices
    floor_s = max(floor_s, problem.traffic_s)
    tokens = problem.batch.tokens[members].sum()
    tight = tokens > 0.8 * prices.holds
    pools = (8, 0, 1) if tight else (1, 0, 0)
    factors = (1.0, 1.02, 1.0) if tight else (1.0, 1.02, 1.1)
    load = Load(problem.batch.pairs[members].sum(), tokens, problem.batch.sequences[members].sum())
    pace = _pace_of(prices, load)
    queue = _queue(problem, members)
    best, least_s = -1, math.inf
    if tokens <= prices.max_tokens * prices.num_ranks:
        least_s = _price(prices, load, prices.num_ranks, 0, 0.0)
    last = -1
    for walk in range(3):
        if least_s <= FIRST_ENOUGH * floor_s:
            break
        _close_from(problem, first, microbatch)
        problem.state.pace[microbatch] = pace
        limit_s = LIMIT * least_s
        last = walk
        target_s, pool = factors[walk] * floor_s * (1.0 + SLACK), min(pools[walk], prices.num_ranks)
        if _fill(problem, queue, Fill(microbatch, first, target_s, limit_s, pool, 0)):
            span_s = _allocate(problem, microbatch, first)
            if span_s < least_s:
                best, least_s = walk, span_s
        else:
            last = -1
    if best >= 0 and best == last:
        return least_s
    _close_from(problem, first, microbatch)
    if best < 0:
        return _one_ring(problem, members, microbatch)
    problem.state.pace[microbatch] = pace
    target_s, pool = factors[best] * floor_s * (1.0 + SLACK), min(pools[best], prices.num_ranks)
    _fill(problem, queue, Fill(microbatch, first, target_s, math.inf, pool, 0))
    return _allocate(problem, microbatch, first)


@inner_with_arrays
def _one_ring(problem: SearchProblem, members: Ints, microbatch: int) -> float:
    """All sequences in one group; infinite if they do not fit there."""
    first, num_ranks = problem.state.counts[GROUPS], problem.prices.num_ranks
    problem.state.spare[microbatch], problem.state.pace[microbatch] = num_ranks, 0.0
    group = _open(problem, microbatch, num_ranks)
    for at in members:
        _join(problem, at, group, num_ranks)
    if problem.state.tokens[group] > problem.prices.max_tokens * num_ranks:
        return math.inf
    _open_pinned(problem, microbatch)
    return _allocate(problem, microbatch, first)


GOOD_ENOUGH = 1.002  # of a microbatch's own lower bound: no further capacity is tried


@inner_with_arrays
def _stage_one(problem: SearchProblem, members: Ints, microbatch: int, factors: Floats, floor_s: float) -> float:
    """One ring over all ranks comes last: it fits whenever the microbatch does, and moves the most."""
    first, prices = problem.state.counts[GROUPS], problem.prices
    mean = problem.batch.tokens[members].sum() / prices.num_ranks
    enough_s = GOOD_ENOUGH * floor_s
    best, least_s, last = 0.0, math.inf, 0.0
    for factor in factors:
        capacity = float(math.floor(min(mean * factor + 1, prices.max_tokens)))
        if capacity == last:
            continue
        last = capacity
        span_s = _bins(problem, members, microbatch, capacity)
        if span_s < least_s:
            best, least_s = capacity, span_s
        _close_from(problem, first, microbatch)
        if least_s <= enough_s:
            break
    if least_s > enough_s:
        ring_s = _one_ring(problem, members, microbatch)
        if ring_s <= least_s:
            return ring_s
        _close_from(problem, first, microbatch)
    return _bins(problem, members, microbatch, best)


@inner_with_arrays
def _bins(problem: SearchProblem, members: Ints, microbatch: int, capacity: float) -> float:
    """Bins of a capacity as groups with exact degrees; infinite if they need more ranks than there are."""
    state, prices = problem.state, problem.prices
    first = state.counts[GROUPS]
    state.spare[microbatch], state.pace[microbatch] = prices.num_ranks, 0.0  # the paper's T(g, d)
    owners = best_fit(problem.batch.tokens[members], capacity, prices.num_ranks)
    if len(owners) == 0:
        return math.inf
    for number in range(len(owners)):
        if first + owners[number] == state.counts[GROUPS]:
            _open(problem, microbatch, 0)
        group = first + owners[number]
        tokens = state.tokens[group] + problem.batch.tokens[members[number]]
        if tokens > prices.max_tokens * prices.num_ranks:
            return math.inf
        _join(problem, members[number], group, math.ceil(tokens / prices.max_tokens))
    _open_pinned(problem, microbatch)
    return _allocate(problem, microbatch, first) if state.spare[microbatch] >= 0 else math.inf
