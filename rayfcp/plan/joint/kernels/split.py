"""A group in two, on its own ranks: each part pays for fewer ranks, where both fit in memory."""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rayfcp.plan.compiled import compiled, inner
from rayfcp.plan.joint.kernels.allocate import _allocate
from rayfcp.plan.joint.kernels.links import Links, _settle, _shift, links_of
from rayfcp.plan.joint.kernels.price import SEAT, Floats, Ints, _price
from rayfcp.plan.joint.kernels.state import GROUPS, MOVES, World, _open
from rayfcp.plan.joint.kernels.trials import _bottleneck

Marks = npt.NDArray[np.bool_]

SPLIT_ENOUGH = 1e-9  # of the group's seconds: less is no gain
STARTS = 6  # at most: of the longest sequences, which one a full part starts from
LEVELLED = -1  # for a start: both parts are filled evenly


class Split(NamedTuple):
    """The first part gets `ranks`, and is filled from the sequence of number `start` on; the slower of both takes
    `seconds`, infinite where there is none."""

    seconds: float
    ranks: int
    start: int


@compiled
def split_rings(world: World, spans: Floats) -> None:
    """Split every microbatch that is one ring as long as its slowest group gets faster by that; every sequence has a
    group. A ring over all ranks always fits: that walks found nothing else does not show that there is nothing."""
    state = world.state
    groups = np.zeros(len(spans), np.int64)
    for group in range(state.counts[GROUPS]):
        if state.home[group] >= 0 and state.tokens[group] > 0.0:
            groups[state.home[group]] += 1
    if not (groups == 1).any():
        return
    links = links_of(world)
    for microbatch in range(len(spans)):
        if groups[microbatch] == 1:
            while _split(world, links, _bottleneck(world, microbatch).group):
                spans[microbatch] = _allocate(world, microbatch, 0)


@compiled
def _split(world: World, links: Links, group: int) -> bool:
    """Split a group so that the slower part takes less than the whole; False if that cannot be."""
    state = world.state
    size, degree = 0, state.degree[group]
    at = links.head[group]
    while at >= 0:
        size += 1
        at = links.after[at]
    if size < 2 or degree < 2 or state.far[group] >= SEAT or state.counts[GROUPS] >= len(state.home) - 1:
        return False
    members = np.empty(size, np.int64)
    at = links.head[group]
    for number in range(size):
        members[number] = at
        at = links.after[at]
    members.sort()
    first = np.zeros(size, np.bool_)
    best = _best_split(world, group, members, first)
    if best.seconds >= state.seconds[group] * (1.0 - SPLIT_ENOUGH):
        return False
    _part(world, group, members, first, best.ranks, best.start)
    home = state.home[group]
    state.degree[group] -= best.ranks
    state.spare[home] += best.ranks
    other = _open(world, home, best.ranks)
    for number in range(size):
        if first[number]:
            _shift(world, links, members[number], other)
    _settle(world, links, group)
    _settle(world, links, other)
    return True


@inner
def _best_split(world: World, group: int, members: Ints, first: Marks) -> Split:
    """Of several sizes and ways to fill them; the longest sequences come first in `members`."""
    best, degree, ranks = Split(math.inf, 0, 0), world.state.degree[group], 1
    while 2 * ranks <= degree or (ranks < degree <= 4):
        for start in range(LEVELLED, min(STARTS, len(members))):
            seconds = _part(world, group, members, first, ranks, start)
            if seconds < best.seconds:
                best = Split(seconds, ranks, start)
        world.state.counts[MOVES] += len(members)
        ranks += max(ranks // 2, 1)
    return best


@inner
def _part(world: World, group: int, members: Ints, first: Marks, ranks: int, start: int) -> float:
    """Marks the sequences of the first part; returns the seconds of the slower one, infinite out of memory."""
    state, batch, prices = world.state, world.batch, world.prices
    other = state.degree[group] - ranks
    tokens = cells = work_s = rest_tokens = rest_cells = rest_s = 0.0
    for step in range(len(members)):
        number = step if start == LEVELLED else (step + start) % len(members)
        at = members[number]
        fits = tokens + batch.tokens[at] <= ranks * prices.room
        if start == LEVELLED and rest_tokens + batch.tokens[at] <= other * prices.room:
            fits = fits and work_s * other <= rest_s * ranks
        first[number] = fits
        if fits:
            tokens, cells, work_s = tokens + batch.tokens[at], cells + batch.cells[at], work_s + batch.work_s[at]
        else:
            rest_tokens, rest_cells = rest_tokens + batch.tokens[at], rest_cells + batch.cells[at]
            rest_s += batch.work_s[at]
    if rest_tokens > other * prices.room or tokens == 0.0 or rest_tokens == 0.0:
        return math.inf
    pace = state.pace[state.home[group]]
    return max(_price(prices, cells, tokens, ranks, 0, pace), _price(prices, rest_cells, rest_tokens, other, 0, pace))
