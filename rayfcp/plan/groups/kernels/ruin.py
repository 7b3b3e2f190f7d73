"""Ruin and recreate: take a few groups apart and place their sequences anew for a shorter makespan; or dissolve a
microbatch into another, whose groups unite where memory asks for it.
"""

from typing import NamedTuple

import numpy as np

from rayfcp.cost.compiled import inner, inner_with_arrays
from rayfcp.cost.kernels.loops import argmax
from rayfcp.plan.groups.kernels.fill import _force, _insert, _level
from rayfcp.plan.groups.kernels.improve import _descend
from rayfcp.plan.groups.kernels.price import PINNED, SLACK, _least_degree
from rayfcp.plan.groups.kernels.ranks import _allocate, _place_all_groups, _place_groups
from rayfcp.plan.groups.kernels.state import (
    GROUPS,
    MICROBATCHES,
    MOVES,
    GroupState,
    Links,
    SearchProblem,
    _close,
    _compact,
    _copy,
    _join,
    _move,
    _open,
    _open_pinned,
    _reprice_or_close,
    _sequence,
    _sum_s,
    links_of,
)
from rayfcp.values.arrays import Floats, Ints

SHORTER = np.array((1e-6, 1e-3, 4e-3, 1e-2, 3e-2, 6e-2))  # by how much of its makespan a microbatch is to get shorter
SHARED = np.array((0.0, 0.0, 0.5, 0.8))  # of that, what the other microbatch may take longer
SPLITS = 8
UNIONS = 2  # pairs of microbatches that are to become one, each with
HOPES = np.array((0.3, 0.6, 0.95))  # of what that would save with all ranks busy to be given up
MAX_SLOW, ANY = 16, 1 << 30
STRIDE = 7919  # between the first numbers of sequences, a prime
MAX_RUINED = 4  # groups of a microbatch, beside those that are slower than its new makespan


class Aim(NamedTuple):
    """Microbatches to be rebuilt (the same twice: only one) and what each may take; `max_slow`: how many groups may
    be too slow for that, more are left as they are."""

    one: int
    other: int
    one_s: float
    other_s: float
    max_slow: int


@inner_with_arrays
def ruin(problem: SearchProblem, max_moves: int, saved: GroupState, seed: int) -> float:
    """Try again and again, first whether two microbatches may be one, groups priced where they lie; a try that does not
    make the batch faster is undone.

    Tries follow the sequence of pseudo-random numbers of the `seed`: the same input gives the same plan. The last one
    is not cut short: what so many moves find is found on the way by more of them. Returns the seconds of the batch.
    """
    state = problem.state
    spans = np.zeros(len(state.spare))
    _place_all_groups(problem, spans)
    _compact(problem)
    total_s = _sum_s(problem, spans)
    dice, number = np.array([12345 + seed * STRIDE]), 0
    while state.counts[MOVES] < max_moves:
        empty = _first_empty(spans)
        aim = _aim(problem, spans[: state.counts[MICROBATCHES]], empty, dice, number)
        number += 1
        state.spare[empty], state.pace[empty] = problem.prices.num_ranks, state.pace[aim.one]
        state.counts[MOVES] += 10 + (len(state.owner) + state.counts[GROUPS]) // 8
        _copy(state, saved)
        if aim.other >= state.counts[MICROBATCHES]:
            _open_pinned(problem, aim.other)
        if _rebuild(problem, aim, dice):
            before = spans[aim.one], spans[aim.other]
            for microbatch in (aim.one, aim.other):
                _allocate(problem, microbatch, 0)
                spans[microbatch] = _place_groups(problem, microbatch)
            after_s = _sum_s(problem, spans)
            if after_s < total_s * (1.0 - SLACK):
                total_s = after_s
                _compact(problem)
                state.counts[MICROBATCHES] = max(state.counts[MICROBATCHES], aim.other + 1)
                continue
            spans[aim.one], spans[aim.other] = before
        _copy(saved, state)
    return total_s


@inner
def _roll(dice: Ints, sides: int) -> int:
    """The next pseudo-random number below `sides`."""
    dice[0] = (1103515245 * dice[0] + 12345) & 0x7FFFFFFF
    return int((dice[0] >> 12) % sides)


@inner
def _first_empty(spans: Floats) -> int:
    """There is one: more microbatches than sequences never have any."""
    for microbatch in range(len(spans) - 1):
        if spans[microbatch] == 0.0:
            return microbatch
    return len(spans) - 1


@inner_with_arrays
def _aim(problem: SearchProblem, spans: Floats, empty: int, dice: Ints, number: int) -> Aim:
    """Of the first numbers the unions that may save the most, then any change."""
    if number < UNIONS * len(HOPES):
        aim = _union(problem, spans, number // len(HOPES), HOPES[number % len(HOPES)])
        if aim.one_s > 0.0:
            return aim
    return _any(spans, empty, dice)


@inner_with_arrays
def _union(problem: SearchProblem, spans: Floats, better: int, hope: float) -> Aim:
    """One microbatch of two that one has room for, of the pair than which so many may save more; of 0 seconds if there
    is none."""
    state, count = problem.state, len(spans)
    tokens, least_s = np.zeros(count), np.zeros(count)
    for at in range(len(state.owner)):
        home = state.home[state.owner[at]]
        tokens[home] += problem.batch.tokens[at]
        least_s[home] += problem.batch.work_s[at] / problem.prices.capacity
    saved = np.zeros(count * count)
    for one in range(count):
        for other in range(count):
            fits = tokens[one] + tokens[other] <= problem.prices.holds
            if fits and one != other and spans[one] >= spans[other] > 0.0:
                most_s = spans[one] + spans[other] + problem.extra_s - problem.prices.fixed_s
                saved[one * count + other] = most_s - least_s[one] - least_s[other]
    for _ in range(better):
        saved[argmax(saved)] = 0.0
    best = argmax(saved)
    if saved[best] <= 0.0:
        return Aim(0, 0, 0.0, 0.0, 0)
    one, other = best // count, best % count
    both_s = least_s[one] + least_s[other] + problem.prices.fixed_s
    return Aim(one, other, both_s + hope * saved[best], 0.0, ANY)


@inner_with_arrays
def _any(spans: Floats, empty: int, dice: Ints) -> Aim:
    """A little shorter for one microbatch, or any other split of the time of two, of which the second may be empty."""
    one, other = _roll(dice, len(spans)), _roll(dice, len(spans) + 1)
    other_s = 0.0 if other == len(spans) else spans[other]
    other = empty if other == len(spans) else other
    shorter = SHORTER[_roll(dice, len(SHORTER))]
    if one == other:
        both_s = spans[one] * (1.0 - shorter)
        return Aim(one, one, both_s, both_s, MAX_SLOW)
    if other_s > 0.0 and _roll(dice, 3) > 0:
        shared_s = spans[one] * shorter * SHARED[_roll(dice, len(SHARED))]
        return Aim(one, other, spans[one] * (1.0 - shorter), other_s + shared_s, MAX_SLOW)
    both_s = (spans[one] + other_s) * (1.0 - shorter)
    one_s = both_s * _roll(dice, SPLITS + 1) / SPLITS
    return Aim(one, other, one_s, both_s - one_s, ANY)


@inner_with_arrays
def _rebuild(problem: SearchProblem, aim: Aim, dice: Ints) -> bool:
    """False if some sequence found no place, or if too much would have to be taken apart."""
    state = problem.state
    if aim.other_s == 0.0 and _tokens(problem, aim) > problem.prices.holds:
        return False
    ruined = _ruined(problem, aim, dice)
    if len(ruined) == 0:
        return False
    for at in range(len(state.owner)):
        if state.owner[at] >= 0 and ruined[state.owner[at]] > 0.0:
            state.owner[at] = -1
    fixed, first, loose = _roll(dice, 2) == 0, _roll(dice, 2), _roll(dice, 3) == 0
    for at in range(len(state.owner)):
        if state.owner[at] >= 0:
            continue
        turn = first if fixed else _roll(dice, 2)
        level = loose and _roll(dice, 2) == 0
        if not _reinsert(problem, at, aim, turn, level):
            return False
    return True


@inner
def _tokens(problem: SearchProblem, aim: Aim) -> float:
    """Of both microbatches."""
    state, tokens = problem.state, 0.0
    for group in range(state.counts[GROUPS]):
        if state.home[group] in (aim.one, aim.other):
            tokens += state.tokens[group]
    return tokens


@inner
def _reinsert(problem: SearchProblem, at: int, aim: Aim, turn: int, level: bool) -> bool:
    """Into the first microbatch (turn 0) or the other, else into the one that is left; in what takes another in,
    groups unite for it."""
    here, here_s, there, there_s = aim.one, aim.one_s, aim.other, aim.other_s
    if turn == 1:
        here, here_s, there, there_s = there, there_s, here, here_s
    placed = _reinsert_in(problem, at, here, here_s, level)
    if not placed and aim.one != aim.other:
        placed = _reinsert_in(problem, at, there, there_s, level)
        if not placed and aim.other_s == 0.0:
            placed = _force(problem, at, aim.one, 0, aim.one_s)
    return placed


@inner
def _reinsert_in(problem: SearchProblem, at: int, microbatch: int, target_s: float, level: bool) -> bool:
    """Into a group of a microbatch within the target: the emptiest or a new one, or as walks do."""
    own, pace = _sequence(problem.batch, at), problem.state.pace[microbatch]
    least = _least_degree(problem.prices, own, target_s, pace)
    if least == 0:
        return False
    if level:
        if least <= problem.state.spare[microbatch]:
            _join(problem, at, _open(problem, microbatch, least), least)
            return True
        if _level(problem, at, microbatch, 0, target_s):
            return True
    return _insert(problem, at, microbatch, least, target_s)


@inner_with_arrays
def _ruined(problem: SearchProblem, aim: Aim, dice: Ints) -> Floats:
    """Marks the groups that are too slow, and a few others, and gives their ranks back; empty if they are too many."""
    state = problem.state
    marks = np.zeros(state.counts[GROUPS])
    slow, ones, others = 0, 0, 0
    for group in range(len(marks)):
        home = state.home[group]
        if home in (aim.one, aim.other):
            ones += home == aim.one
            others += home == aim.other
            if state.seconds[group] > (aim.one_s if home == aim.one else aim.other_s):
                marks[group] = 1.0
                slow += 1
    state.counts[MOVES] += len(marks)
    if slow > aim.max_slow:
        return np.zeros(0)
    more = 1 + _roll(dice, MAX_RUINED)
    for group in range(len(marks)):
        home = state.home[group]
        if home in (aim.one, aim.other):
            if _roll(dice, ones if home == aim.one else others) < more:
                marks[group] = 1.0
            if marks[group] > 0.0:
                _close(problem, group)
    return marks


MAX_PERTURBED = 3  # sequences moved at random before local search
DESCENT = 100  # moves for each sequence and group, at most, after a change: local search need not end by itself
TRIES = 8  # draws of a sequence and a group that may take it


@inner_with_arrays
def perturb(problem: SearchProblem, max_moves: int, saved: GroupState, seed: int) -> float:
    """Iterated local search: move a few sequences at random, improve the microbatches that this touched, undo what does
    not make the batch faster.

    Tries are as of `ruin`. Returns the seconds of the batch.
    """
    state = problem.state
    count = state.counts[MICROBATCHES]
    spans, before = np.zeros(count), np.zeros(count)
    _place_all_groups(problem, spans)
    total_s = _sum_s(problem, spans)
    dice, stuck = np.array([54321 + seed * STRIDE]), np.zeros(count, np.bool_)
    while state.counts[MOVES] < max_moves:
        _compact(problem)
        _copy(state, saved)
        for microbatch in range(count):
            before[microbatch] = spans[microbatch]
        links, descent = links_of(problem), DESCENT * (len(state.owner) + state.counts[GROUPS])
        state.counts[MOVES] += 10 + (len(state.owner) + state.counts[GROUPS]) // 4
        stuck[:] = True
        for _ in range(1 + _roll(dice, MAX_PERTURBED)):
            _perturb_one(problem, links, stuck, dice)
        for microbatch in range(count):
            if not stuck[microbatch]:
                spans[microbatch] = _allocate(problem, microbatch, 0)
        _descend(problem, links, spans, stuck, state.counts[MOVES] + descent, False)
        _place_all_groups(problem, spans)
        after_s = _sum_s(problem, spans)
        if after_s < total_s * (1.0 - SLACK):
            total_s = after_s
        else:
            _copy(saved, state)
            for microbatch in range(count):
                spans[microbatch] = before[microbatch]
    return total_s


@inner
def _perturb_one(problem: SearchProblem, links: Links, stuck: Ints, dice: Ints) -> None:
    """Move a sequence to another group or to a new one, which takes ranks from its group."""
    state, batch, max_tokens = problem.state, problem.batch, problem.prices.max_tokens
    for _ in range(TRIES):
        at = _roll(dice, len(state.owner))
        source = state.owner[at]
        home = state.home[source]
        if _roll(dice, 3) == 0:
            ranks = state.degree[source] - 1
            if (
                state.span_kind[source] >= PINNED
                or ranks < 1
                or state.spare[home] + ranks < 1
                or state.counts[GROUPS] >= len(state.home) - 1
            ):
                continue
            ranks = 1 + _roll(dice, ranks)
            if state.tokens[source] - batch.tokens[at] > (state.degree[source] - ranks) * max_tokens:
                continue
            if batch.tokens[at] > ranks * max_tokens:
                continue
            state.degree[source] -= ranks
            state.spare[home] += ranks
            target = _open(problem, home, ranks)
        else:
            target = _roll(dice, state.counts[GROUPS])
            if target == source or state.home[target] < 0:
                continue
            if state.tokens[target] + batch.tokens[at] > state.degree[target] * max_tokens:
                continue
        _move(problem, links, at, target)
        stuck[home] = False
        stuck[state.home[target]] = False
        _reprice_or_close(problem, links, source)
        _reprice_or_close(problem, links, target)
        return
