"""Local search on the slowest group of each microbatch: moves, swaps, unions, and splits on its own ranks."""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rayfcp.cost.compiled import inner, inner_with_arrays
from rayfcp.plan.groups.kernels.price import PINNED, Load, _minus, _plus, _price
from rayfcp.plan.groups.kernels.ranks import _allocate
from rayfcp.plan.groups.kernels.state import (
    GROUPS,
    MICROBATCHES,
    MOVES,
    Links,
    SearchProblem,
    _beside_s,
    _least_s,
    _load_of,
    _move,
    _open,
    _reprice_or_close,
    _sequence,
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
    mean being that of all ranks, those of pinned groups too."""

    group: int
    span_s: float
    second: int
    second_s: float
    third_s: float
    good_s: float


@inner
def _bottleneck(problem: SearchProblem, microbatch: int) -> Bottleneck:
    state = problem.state
    group, second, ranks = -1, -1, problem.prices.num_ranks
    span_s = second_s = third_s = work_s = 0.0
    for each in range(state.counts[GROUPS]):
        if state.home[each] != microbatch:
            continue
        seconds = state.seconds[each]
        work_s += seconds * state.degree[each]
        ranks += state.degree[each] if state.span_kind[each] >= PINNED else 0
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
def _value_s(problem: SearchProblem, span_s: float) -> float:
    """What a microbatch adds to the batch; without sequences nothing, unless the rule asks for it all the same."""
    if span_s == 0.0:
        return _least_s(problem) if problem.rule.exactly > 0 or problem.rule.multiple > 1 else 0.0
    return _beside_s(problem, span_s, problem.traffic_s) + problem.extra_s


@inner
def _score_s(
    problem: SearchProblem, slow: Bottleneck, spans: Floats, source_s: float, target: int, target_s: float
) -> float:
    """How slow the groups of a change are after it, plus what other microbatches lose; infinite if nothing is
    gained."""
    state = problem.state
    microbatch, there = state.home[slow.group], state.home[target]
    if source_s >= slow.span_s * (1.0 - ENOUGH):
        return math.inf
    if there == microbatch:
        if target_s >= slow.span_s * (1.0 - ENOUGH):
            return math.inf
        return max(source_s, target_s)
    loss_s = _value_s(problem, max(spans[there], target_s)) - _value_s(problem, spans[there])
    if loss_s > 0.0:
        after_s = max(source_s, slow.second_s)
        gain_s = _value_s(problem, slow.span_s) - _value_s(problem, after_s)
        if gain_s <= loss_s + ENOUGH * slow.span_s:
            return math.inf
    return source_s + loss_s


@inner
def _moves(problem: SearchProblem, links: Links, spans: Floats, slow: Bottleneck, best: Change) -> Change:
    """Every sequence of the slowest group to every other group, which may take spare ranks."""
    state, batch, prices = problem.state, problem.batch, problem.prices
    source = slow.group
    pace = state.pace[state.home[source]]
    at = links.head[source]
    while at >= 0 and best.score_s > slow.good_s:
        own = _sequence(batch, at)
        left, left_s = _minus(_load_of(state, source), own), 0.0
        if left.tokens > 0.0:
            left_s = _price(prices, left, state.degree[source], state.span_kind[source], pace)
        for target in range(state.counts[GROUPS]):
            if target == source or state.home[target] < 0:
                continue
            load = _plus(_load_of(state, target), own)
            degree, spare = state.degree[target], state.spare[state.home[target]]
            for more in range(2 if spare > 0 and state.span_kind[target] < PINNED else 1):
                ranks = degree + more * spare
                if load.tokens > ranks * prices.max_tokens:
                    continue
                there = state.pace[state.home[target]]
                seconds = _price(prices, load, ranks, state.span_kind[target], there)
                score_s = _score_s(problem, slow, spans, left_s, target, seconds)
                if score_s < best.score_s:
                    best = Change(score_s, at, target, -1, ranks)
        state.counts[MOVES] += state.counts[GROUPS]
        at = links.after[at]
    return best


@inner
def _swaps(problem: SearchProblem, links: Links, spans: Floats, slow: Bottleneck, best: Change) -> Change:
    """Every sequence of the slowest group against every one of less work in other groups."""
    state, size = problem.state, problem.state.counts[GROUPS]
    for step in range(1, size):
        if best.score_s <= slow.good_s:
            break
        target = (slow.group + step) % size
        if state.home[target] >= 0:
            there = state.home[target] == state.home[slow.group]
            limit_s = slow.span_s if there else spans[state.home[target]] + slow.span_s - slow.second_s
            if state.seconds[target] < limit_s:
                best = _swaps_with(problem, links, spans, slow, best, target, limit_s)
    return best


@inner
def _swaps_with(
    problem: SearchProblem, links: Links, spans: Floats, slow: Bottleneck, best: Change, target: int, limit_s: float
) -> Change:
    state, batch, prices = problem.state, problem.batch, problem.prices
    source, max_tokens = slow.group, prices.max_tokens
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
                more = _minus(_sequence(batch, at), _sequence(batch, other))
                left, held = _minus(_load_of(state, source), more), _plus(_load_of(state, target), more)
                if held.tokens <= ranks * max_tokens and left.tokens <= degree * max_tokens:
                    left_s = _price(prices, left, degree, state.span_kind[source], pace)
                    seconds = _price(prices, held, ranks, state.span_kind[target], there)
                    score_s = _score_s(problem, slow, spans, left_s, target, seconds)
                    if score_s < best.score_s:
                        best = Change(score_s, at, target, other, ranks)
            other = links.after[other]
        if best.score_s <= slow.good_s:
            break
        at = links.after[at]
    return best


@inner
def _unions(problem: SearchProblem, slow: Bottleneck, best: Change) -> Change:
    """The slowest group with every other of its microbatch, on the ranks of both and the spare ones."""
    state, prices = problem.state, problem.prices
    source = slow.group
    if state.span_kind[source] >= PINNED:
        return best
    for target in range(state.counts[GROUPS]):
        if target == source or state.home[target] != state.home[source] or state.span_kind[target] >= PINNED:
            continue
        load = _plus(_load_of(state, source), _load_of(state, target))
        ranks = state.degree[source] + state.degree[target]
        seconds = _price(prices, load, ranks, 0, state.pace[state.home[source]])
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


@inner_with_arrays
def split_rings(problem: SearchProblem, spans: Floats) -> None:
    """Split every microbatch that is one ring as long as its slowest group gets faster by that; every sequence has a
    group. A ring over all ranks always fits: that walks found nothing else does not show that there is nothing."""
    state = problem.state
    groups, rings = np.zeros(len(spans), np.int64), 0
    for group in range(state.counts[GROUPS]):
        if state.home[group] >= 0 and state.tokens[group] > 0.0:
            groups[state.home[group]] += 1
    for count in groups:
        rings += count == 1
    if rings == 0:
        return
    links = links_of(problem)
    for microbatch in range(len(spans)):
        if groups[microbatch] == 1:
            while _split(problem, links, _bottleneck(problem, microbatch).group):
                spans[microbatch] = _allocate(problem, microbatch, 0)


@inner_with_arrays
def _split(problem: SearchProblem, links: Links, group: int) -> bool:
    """Split a group so that the slower part takes less than the whole; False if that cannot be."""
    state = problem.state
    size, degree = 0, state.degree[group]
    at = links.head[group]
    while at >= 0:
        size += 1
        at = links.after[at]
    if size < 2 or degree < 2 or state.span_kind[group] >= PINNED or state.counts[GROUPS] >= len(state.home) - 1:
        return False
    members = np.flatnonzero(state.owner == group)
    first = np.zeros(size, np.bool_)
    best = _best_split(problem, group, members, first)
    if best.seconds >= state.seconds[group] * (1.0 - SPLIT_ENOUGH):
        return False
    _part(problem, group, members, first, best.ranks, best.start)
    home = state.home[group]
    state.degree[group] -= best.ranks
    state.spare[home] += best.ranks
    other = _open(problem, home, best.ranks)
    for number in range(size):
        if first[number]:
            _move(problem, links, members[number], other)
    _reprice_or_close(problem, links, group)
    _reprice_or_close(problem, links, other)
    return True


@inner
def _best_split(problem: SearchProblem, group: int, members: Ints, first: Marks) -> Split:
    """Of several sizes and ways to fill them; the longest sequences come first in `members`."""
    best, degree, ranks = Split(math.inf, 0, 0), problem.state.degree[group], 1
    while 2 * ranks <= degree or (ranks < degree <= 4):
        for start in range(LEVELLED, min(STARTS, len(members))):
            seconds = _part(problem, group, members, first, ranks, start)
            if seconds < best.seconds:
                best = Split(seconds, ranks, start)
        problem.state.counts[MOVES] += len(members)
        ranks += max(ranks // 2, 1)
    return best


@inner
def _part(problem: SearchProblem, group: int, members: Ints, first: Marks, ranks: int, start: int) -> float:
    """Marks the sequences of the first part; returns the seconds of the slower one, infinite out of memory."""
    state, batch, prices = problem.state, problem.batch, problem.prices
    other = state.degree[group] - ranks
    part, rest, work_s, rest_s = Load(0.0, 0.0, 0.0), Load(0.0, 0.0, 0.0), 0.0, 0.0
    for step in range(len(members)):
        number = step if start == LEVELLED else (step + start) % len(members)
        at = members[number]
        fits = part.tokens + batch.tokens[at] <= ranks * prices.max_tokens
        if start == LEVELLED and rest.tokens + batch.tokens[at] <= other * prices.max_tokens:
            fits = fits and work_s * other <= rest_s * ranks
        first[number] = fits
        if fits:
            part, work_s = _plus(part, _sequence(batch, at)), work_s + batch.work_s[at]
        else:
            rest, rest_s = _plus(rest, _sequence(batch, at)), rest_s + batch.work_s[at]
    if rest.tokens > other * prices.max_tokens or part.tokens == 0.0 or rest.tokens == 0.0:
        return math.inf
    pace = state.pace[state.home[group]]
    return max(_price(prices, part, ranks, 0, pace), _price(prices, rest, other, 0, pace))


@inner_with_arrays
def improve(problem: SearchProblem, max_moves: int) -> float:
    """Better the slowest group of every microbatch until none can be, or `GroupState.counts` reaches so many moves.

    Each change makes a slowest group faster and the batch no slower. Returns the seconds of the batch.
    """
    state = problem.state
    links = links_of(problem)
    spans = np.zeros(state.counts[MICROBATCHES])
    for microbatch in range(len(spans)):
        spans[microbatch] = _allocate(problem, microbatch, 0)
    _descend(problem, links, spans, np.zeros(len(spans), np.bool_), max_moves, True)
    return total_s(problem)


@inner
def _descend(problem: SearchProblem, links: Links, spans: Floats, stuck: Marks, max_moves: int, retries: bool) -> None:
    """Improve the slowest microbatch that is not stuck until all are stuck or so many moves are made; with `retries`,
    every improvement gives stuck ones another try."""
    while problem.state.counts[MOVES] < max_moves:
        slowest = -1
        for microbatch in range(len(spans)):
            if not stuck[microbatch] and (slowest < 0 or spans[microbatch] > spans[slowest]):
                slowest = microbatch
        if slowest < 0:
            return
        if not _step(problem, links, spans, slowest):
            stuck[slowest] = True
        elif retries:
            stuck[:] = False


@inner_with_arrays
def _step(problem: SearchProblem, links: Links, spans: Floats, microbatch: int) -> bool:
    """The best change of the slowest group of a microbatch; False if there is none."""
    slow = _bottleneck(problem, microbatch)
    if slow.group < 0:
        return False
    best = _moves(problem, links, spans, slow, Change(math.inf, -1, -1, -1, 0))
    best = _unions(problem, slow, best)
    best = _swaps(problem, links, spans, slow, best)
    if best.target < 0:
        if not _split(problem, links, slow.group):
            return False
        spans[microbatch] = _allocate(problem, microbatch, 0)
        return True
    there = problem.state.home[best.target]
    _apply(problem, links, slow.group, best)
    spans[microbatch] = _allocate(problem, microbatch, 0)
    if there != microbatch:
        spans[there] = _allocate(problem, there, 0)
    return True


@inner
def _apply(problem: SearchProblem, links: Links, source: int, change: Change) -> None:
    state = problem.state
    target = change.target
    if change.at < 0:
        while links.head[source] >= 0:
            _move(problem, links, links.head[source], target)
    else:
        _move(problem, links, change.at, target)
        if change.other >= 0:
            _move(problem, links, change.other, source)
    _reprice_or_close(problem, links, source)
    state.spare[state.home[target]] -= change.degree - state.degree[target]
    state.degree[target] = change.degree
    _reprice_or_close(problem, links, target)
