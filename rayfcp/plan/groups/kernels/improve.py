"""What a change to the slowest group of a microbatch would bring: moves, swaps and unions.

A group in two, on its own ranks: each part pays for fewer ranks, where both fit in memory.

Local search: sequences move between groups and microbatches, or change places, while that helps.
"""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rayfcp.cost.compiled import compiled, inner
from rayfcp.plan.groups.kernels.price import SEAT, _price
from rayfcp.plan.groups.kernels.ranks import _allocate
from rayfcp.plan.groups.kernels.state import (
    GROUPS,
    MICROBATCHES,
    MOVES,
    Links,
    World,
    _beside_s,
    _open,
    _settle,
    _shift,
    links_of,
    total_s,
)
from rayfcp.values.arrays import Floats, Ints

ENOUGH = 1e-9  # of a makespan: less is no gain
GOOD = 0.5  # of how far the slowest group is above the mean: a change that gets it so far down is taken at once


class Change(NamedTuple):
    """Sequence `at` goes to group `target` of `degree` ranks then, `other` comes back (-1: none); `at` -1: the whole
    group goes. Less `score_s` is better; infinite is no change."""

    score_s: float
    at: int
    target: int
    other: int
    degree: int


class Bottleneck(NamedTuple):
    """The slowest group of a microbatch, its seconds, and those of the next two; `good_s` is a score that is good, the
    mean being that of all ranks, those of seats too."""

    group: int
    span_s: float
    second: int
    second_s: float
    third_s: float
    good_s: float


@inner
def _bottleneck(world: World, microbatch: int) -> Bottleneck:
    state = world.state
    group, second, ranks = -1, -1, world.prices.num_ranks
    span_s = second_s = third_s = work_s = 0.0
    for each in range(state.counts[GROUPS]):
        if state.home[each] != microbatch:
            continue
        seconds = state.seconds[each]
        work_s += seconds * state.degree[each]
        ranks += state.degree[each] if state.far[each] >= SEAT else 0
        if group < 0 or seconds > span_s:
            group, second = each, group
            span_s, second_s, third_s = seconds, span_s, second_s
        elif second < 0 or seconds > second_s:
            second = each
            second_s, third_s = seconds, second_s
        elif seconds > third_s:
            third_s = seconds
    return Bottleneck(group, span_s, second, second_s, third_s, span_s - GOOD * (span_s - work_s / ranks))


@inner
def _value_s(world: World, span_s: float) -> float:
    """What a microbatch adds to the batch; nothing without sequences."""
    return _beside_s(world, span_s, world.traffic_s) + world.extra_s if span_s > 0.0 else 0.0


@inner
def _score_s(world: World, slow: Bottleneck, spans: Floats, source_s: float, target: int, target_s: float) -> float:
    """How slow the groups of a change are after it, plus what other microbatches lose; infinite if nothing is
    gained."""
    state = world.state
    microbatch, there = state.home[slow.group], state.home[target]
    if source_s >= slow.span_s * (1.0 - ENOUGH):
        return math.inf
    if there == microbatch:
        if target_s >= slow.span_s * (1.0 - ENOUGH):
            return math.inf
        return max(source_s, target_s)
    loss_s = _value_s(world, max(spans[there], target_s)) - _value_s(world, spans[there])
    if loss_s > 0.0:
        after_s = max(source_s, slow.second_s)
        gain_s = _value_s(world, slow.span_s) - _value_s(world, after_s)
        if gain_s <= loss_s + ENOUGH * slow.span_s:
            return math.inf
    return source_s + loss_s


@inner
def _moves(world: World, links: Links, spans: Floats, slow: Bottleneck, best: Change) -> Change:
    """Every sequence of the slowest group to every other group, which may take spare ranks."""
    state, batch, prices = world.state, world.batch, world.prices
    source = slow.group
    pace = state.pace[state.home[source]]
    at = links.head[source]
    while at >= 0 and best.score_s > slow.good_s:
        tokens, cells = state.tokens[source] - batch.tokens[at], state.cells[source] - batch.cells[at]
        left_s = 0.0
        if tokens > 0.0:
            left_s = _price(prices, cells, tokens, state.degree[source], state.far[source], pace)
        for target in range(state.counts[GROUPS]):
            if target == source or state.home[target] < 0:
                continue
            tokens, cells = state.tokens[target] + batch.tokens[at], state.cells[target] + batch.cells[at]
            degree, spare = state.degree[target], state.spare[state.home[target]]
            for more in range(2 if spare > 0 and state.far[target] < SEAT else 1):
                ranks = degree + more * spare
                if tokens > ranks * prices.room:
                    continue
                there = state.pace[state.home[target]]
                seconds = _price(prices, cells, tokens, ranks, state.far[target], there)
                score_s = _score_s(world, slow, spans, left_s, target, seconds)
                if score_s < best.score_s:
                    best = Change(score_s, at, target, -1, ranks)
        state.counts[MOVES] += state.counts[GROUPS]
        at = links.after[at]
    return best


@inner
def _swaps(world: World, links: Links, spans: Floats, slow: Bottleneck, best: Change) -> Change:
    """Every sequence of the slowest group against every one of less work in other groups."""
    state, size = world.state, world.state.counts[GROUPS]
    for step in range(1, size):
        if best.score_s <= slow.good_s:
            break
        target = (slow.group + step) % size
        if state.home[target] >= 0:
            there = state.home[target] == state.home[slow.group]
            limit_s = slow.span_s if there else spans[state.home[target]] + slow.span_s - slow.second_s
            if state.seconds[target] < limit_s:
                best = _swaps_with(world, links, spans, slow, best, target, limit_s)
    return best


@inner
def _swaps_with(
    world: World, links: Links, spans: Floats, slow: Bottleneck, best: Change, target: int, limit_s: float
) -> Change:
    state, batch, prices = world.state, world.batch, world.prices
    source, room = slow.group, prices.room
    degree, ranks = state.degree[source], state.degree[target]
    pace, there = state.pace[state.home[source]], state.pace[state.home[target]]
    slack_s = (limit_s - state.seconds[target]) * ranks
    at = links.head[source]
    while at >= 0:
        other = links.head[target]
        while other >= 0:
            more_s = batch.work_s[at] - batch.work_s[other]
            state.counts[MOVES] += 1
            if 0.0 < more_s < slack_s:
                tokens = batch.tokens[at] - batch.tokens[other]
                cells = batch.cells[at] - batch.cells[other]
                held = state.tokens[target] + tokens
                if held <= ranks * room and state.tokens[source] - tokens <= degree * room:
                    left_s = _price(
                        prices,
                        state.cells[source] - cells,
                        state.tokens[source] - tokens,
                        degree,
                        state.far[source],
                        pace,
                    )
                    seconds = _price(prices, state.cells[target] + cells, held, ranks, state.far[target], there)
                    score_s = _score_s(world, slow, spans, left_s, target, seconds)
                    if score_s < best.score_s:
                        best = Change(score_s, at, target, other, ranks)
            other = links.after[other]
        if best.score_s <= slow.good_s:
            break
        at = links.after[at]
    return best


@inner
def _unions(world: World, slow: Bottleneck, best: Change) -> Change:
    """The slowest group with every other of its microbatch, on the ranks of both and the spare ones."""
    state, prices = world.state, world.prices
    source = slow.group
    if state.far[source] >= SEAT:
        return best
    for target in range(state.counts[GROUPS]):
        if target == source or state.home[target] != state.home[source] or state.far[target] >= SEAT:
            continue
        tokens, cells = state.tokens[source] + state.tokens[target], state.cells[source] + state.cells[target]
        ranks = state.degree[source] + state.degree[target]
        seconds = _price(prices, cells, tokens, ranks, 0, state.pace[state.home[source]])
        if seconds < slow.span_s * (1.0 - ENOUGH) and seconds < best.score_s:
            best = Change(seconds, -1, target, -1, ranks)
    state.counts[MOVES] += state.counts[GROUPS]
    return best


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


@compiled
def improve(world: World, max_moves: int) -> float:
    """Better the slowest group of every microbatch until none can be, or `State.counts` reaches so many moves.

    Each change makes a slowest group faster and the batch no slower. Returns the seconds of the batch.
    """
    state = world.state
    links = links_of(world)
    spans = np.zeros(state.counts[MICROBATCHES])
    for microbatch in range(len(spans)):
        spans[microbatch] = _allocate(world, microbatch, 0)
    stuck = np.zeros(len(spans), np.bool_)
    while state.counts[MOVES] < max_moves:
        slowest = -1
        for microbatch in range(len(spans)):
            if not stuck[microbatch] and (slowest < 0 or spans[microbatch] > spans[slowest]):
                slowest = microbatch
        if slowest < 0:
            break
        if _step(world, links, spans, slowest):
            stuck[:] = False
        else:
            stuck[slowest] = True
    return total_s(world)


@compiled
def _step(world: World, links: Links, spans: Floats, microbatch: int) -> bool:
    """The best change of the slowest group of a microbatch; False if there is none."""
    slow = _bottleneck(world, microbatch)
    if slow.group < 0:
        return False
    best = _moves(world, links, spans, slow, Change(math.inf, -1, -1, -1, 0))
    best = _unions(world, slow, best)
    best = _swaps(world, links, spans, slow, best)
    if best.target < 0:
        if not _split(world, links, slow.group):
            return False
        spans[microbatch] = _allocate(world, microbatch, 0)
        return True
    there = world.state.home[best.target]
    _apply(world, links, slow.group, best)
    spans[microbatch] = _allocate(world, microbatch, 0)
    if there != microbatch:
        spans[there] = _allocate(world, there, 0)
    return True


@inner
def _apply(world: World, links: Links, source: int, change: Change) -> None:
    state = world.state
    target = change.target
    if change.at < 0:
        while links.head[source] >= 0:
            _shift(world, links, links.head[source], target)
    else:
        _shift(world, links, change.at, target)
        if change.other >= 0:
            _shift(world, links, change.other, source)
    _settle(world, links, source)
    state.spare[state.home[target]] -= change.degree - state.degree[target]
    state.degree[target] = change.degree
    _settle(world, links, target)
