"""Groups of one degree, for a whole batch or for a microbatch: what mixed degrees have to beat."""

import math
from typing import NamedTuple

import numpy as np

from rayfcp.cost.compiled import inner, inner_with_arrays
from rayfcp.cost.kernels.loops import descending
from rayfcp.plan.groups.kernels.cut import _packed
from rayfcp.plan.groups.kernels.price import Load, _plus, _price
from rayfcp.plan.groups.kernels.ranks import _allocate, place
from rayfcp.plan.groups.kernels.state import (
    GROUPS,
    MICROBATCHES,
    SearchProblem,
    _clear,
    _close_from,
    _join,
    _open,
    _open_pinned,
    _sequence,
)
from rayfcp.values.arrays import Ints

MORE = 2  # microbatches than the fewest that hold all at a degree
HOPEFUL = 1.03  # times the best found: degrees that are estimated to take more are not tried
FEW_EACH = 8  # sequences a pack in the mean: by length they may be more level than by work


class Way(NamedTuple):
    """Groups of `degree` ranks, none if 0, in so many microbatches, of sequences packed by length, or else by work."""

    degree: int
    microbatches: int
    by_length: bool


@inner_with_arrays
def even(problem: SearchProblem, fewest: int, most: int) -> float:
    """Groups of the best single degree for the whole batch, ranks then given to the slowest; returns its seconds.

    The most work goes first, to the pack with the least that holds it, or sequences go by length where that leaves one
    without memory, or where they are few, if that is better; packs of like time are side by side. Of each degree the
    first number of microbatches from `fewest` to `most` that holds all sequences is tried, and `MORE` above. Infinite
    where none does.
    """
    best, least_s = Way(0, 0, False), math.inf
    everyone = np.arange(len(problem.state.owner))
    fixed_s = problem.prices.fixed_s + problem.extra_s
    for degree in _degrees(problem):
        share_s, tried = _share_s(problem, everyone, degree), 0
        for count in range(fewest, most + 1):
            if tried > MORE or share_s + count * fixed_s > HOPEFUL * least_s:
                break
            few = len(everyone) <= FEW_EACH * count * (problem.prices.num_ranks // degree)
            for by_length in range(1 + few):
                way = Way(degree, count, by_length == 1)
                if _spread(problem, way):
                    tried += 1 - by_length
                    seconds = _allocate_all(problem)
                    best, least_s = (way, seconds) if seconds < least_s else (best, least_s)
    return _allocate_all(problem) if best.degree and _spread(problem, best) else math.inf


@inner_with_arrays
def _best_even(problem: SearchProblem, members: Ints, microbatch: int) -> tuple[int, float]:
    """The best degree for groups of one degree in a microbatch, and their seconds; (0, infinite) if none has room."""
    first = problem.state.counts[GROUPS]
    best, least_s = 0, math.inf
    for degree in _degrees(problem):
        if _share_s(problem, members, degree) + problem.prices.fixed_s <= HOPEFUL * least_s:
            seconds = _even_part(problem, members, microbatch, degree)
            if seconds < least_s:
                best, least_s = degree, seconds
            _close_from(problem, first, microbatch)
    return best, least_s


@inner
def _share_s(problem: SearchProblem, members: Ints, degree: int) -> float:
    """Seconds that each of as many groups of `degree` ranks as there can be takes for its share of the members, about,
    without what is fixed; infinite where no group can hold the longest."""
    batch, prices = problem.batch, problem.prices
    load, longest = Load(0.0, 0.0, 0.0), 0.0
    for at in members:
        load = _plus(load, _sequence(batch, at))
        longest = max(longest, batch.tokens[at])
    if longest > degree * prices.max_tokens:
        return math.inf
    whole_s = _price(prices, load, degree, 0, 0.0) - prices.fixed_s
    return whole_s / min(prices.num_ranks // degree, len(members))


@inner_with_arrays
def _degrees(problem: SearchProblem) -> Ints:
    """Powers of two, and these times three, up to all ranks."""
    found = np.zeros(64, np.int64)
    count, degree = 0, 1
    while degree < problem.prices.num_ranks:
        found[count] = degree
        count += 1
        degree = degree * 3 // 2 if degree & (degree - 1) == 0 and degree > 1 else max(degree * 4 // 3, degree + 1)
    found[count] = problem.prices.num_ranks
    return found[: count + 1]


@inner_with_arrays
def _even_part(problem: SearchProblem, members: Ints, microbatch: int, degree: int) -> float:
    state, prices = problem.state, problem.prices
    first, count = state.counts[GROUPS], min(prices.num_ranks // degree, len(members))
    packs = _packed(problem, members, degree, count, False)
    if len(packs.owners) == 0:
        return math.inf
    state.spare[microbatch], state.pace[microbatch] = prices.num_ranks, 0.0
    for _ in range(count):
        _open(problem, microbatch, degree)
    for number in range(len(members)):
        _join(problem, members[number], first + packs.owners[number], degree)
    _open_pinned(problem, microbatch)
    return _allocate(problem, microbatch, first)


@inner_with_arrays
def _spread(problem: SearchProblem, way: Way) -> bool:
    """Whether there is room."""
    state, prices = problem.state, problem.prices
    beside = prices.num_ranks // way.degree
    packs = _packed(problem, np.arange(len(state.owner)), way.degree, beside * way.microbatches, way.by_length)
    if len(packs.owners) == 0:
        return False
    seconds = np.zeros(len(packs.tokens))
    for each in range(len(seconds)):
        if packs.tokens[each] > 0.0:
            load = Load(packs.pairs[each], packs.tokens[each], packs.sequences[each])
            seconds[each] = _price(prices, load, way.degree, 0, 0.0)
    homes = np.empty(len(seconds), np.int64)
    for number, pack in enumerate(descending(seconds)):
        homes[pack] = number // beside
    _clear(problem, way.microbatches)
    for microbatch in range(way.microbatches):
        state.spare[microbatch], state.pace[microbatch] = prices.num_ranks, 0.0
        _open_pinned(problem, microbatch)
    names = np.full(len(seconds), -1)
    for at in range(len(state.owner)):
        pack = packs.owners[at]
        if names[pack] < 0:
            names[pack] = _open(problem, homes[pack], way.degree)
        _join(problem, at, names[pack], way.degree)
    return True


@inner_with_arrays
def _allocate_all(problem: SearchProblem) -> float:
    """Give ranks to the slowest in each microbatch; returns the seconds of the batch where its groups lie: degrees that
    tile a node are faster there than others that look better."""
    for microbatch in range(problem.state.counts[MICROBATCHES]):
        _allocate(problem, microbatch, 0)
    return place(problem)
