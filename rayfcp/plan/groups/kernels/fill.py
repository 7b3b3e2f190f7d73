"""Greedy construction from sequences, longest first, each to where it costs the fewest ranks within a target makespan.

`_fill` constructs one microbatch, `fill_in_turn` the whole batch, one microbatch after the other: each starts from the
longest sequence left and takes what else fits in its time.
"""

import math
from typing import NamedTuple

import numpy as np

from rayfcp.cost.compiled import inlined, inner, inner_with_arrays
from rayfcp.plan.groups.kernels.price import (
    PINNED,
    SLACK,
    Load,
    _best_degree,
    _least_degree,
    _pace_of,
    _plus,
    _price,
    _work_s,
)
from rayfcp.plan.groups.kernels.ranks import _allocate, _place_groups
from rayfcp.plan.groups.kernels.state import (
    GROUPS,
    MICROBATCHES,
    MOVES,
    SearchProblem,
    _beside_s,
    _clear,
    _close,
    _close_from,
    _compact,
    _hold,
    _join,
    _load_of,
    _open,
    _open_pinned,
    _reprice,
    _sequence,
    _span_kind,
    total_s,
)
from rayfcp.values.arrays import Floats, Ints


@inner
def _force(problem: SearchProblem, at: int, microbatch: int, first: int, limit_s: float) -> bool:
    """Into the group, or a new one of all spare ranks, that takes the least time, in memory; False if that
    takes `limit_s`."""
    state, batch, prices = problem.state, problem.batch, problem.prices
    best, best_s, best_degree = -1, math.inf, 0
    spare, own = state.spare[microbatch], _sequence(batch, at)
    for group in range(first, state.counts[GROUPS]):
        degree, load = state.degree[group], _plus(_load_of(state, group), own)
        most = degree + spare if state.span_kind[group] < PINNED else degree
        if state.home[group] != microbatch or load.tokens > most * prices.max_tokens:
            continue
        needed = max(degree, math.ceil(load.tokens / prices.max_tokens))
        for more in (needed, most):
            seconds = _price(prices, load, more, _span_kind(problem, group), state.pace[microbatch])
            if seconds < best_s:
                best, best_s, best_degree = group, seconds, more
    state.counts[MOVES] += 1 + (state.counts[GROUPS] - first) // 2
    if spare * prices.max_tokens >= own.tokens:
        seconds = _price(prices, own, spare, 0, state.pace[microbatch])
        if seconds < best_s:
            best, best_s, best_degree = -2, seconds, spare
    if best == -1:
        return _pool(problem, at, microbatch, first, limit_s)
    if best_s >= limit_s:
        return False
    _join(problem, at, _open(problem, microbatch, spare) if best == -2 else best, best_degree)
    return True


@inner
def _pool(problem: SearchProblem, at: int, microbatch: int, first: int, limit_s: float) -> bool:
    """Unite groups, the emptiest first, until the sequence fits in one of them; the last one left takes the
    spare ranks too."""
    state, batch, prices = problem.state, problem.batch, problem.prices
    while True:
        base = _emptiest(problem, microbatch, first, -1)
        if base < 0:
            return False
        left = prices.max_tokens * state.degree[base] - state.tokens[base]
        best, best_s = -1, math.inf
        for group in range(first, state.counts[GROUPS]):
            free = prices.max_tokens * state.degree[group] - state.tokens[group]
            there = state.home[group] == microbatch and state.span_kind[group] < PINNED
            if group != base and there and left + free >= batch.tokens[at]:
                load, ranks = (
                    _plus(_load_of(state, base), _load_of(state, group)),
                    state.degree[base] + state.degree[group],
                )
                seconds = _price(prices, load, ranks, 0, state.pace[microbatch])
                if seconds < best_s:
                    best, best_s = group, seconds
        other = best if best >= 0 else _emptiest(problem, microbatch, first, base)
        if other >= 0:
            _unite(problem, base, other)
        if best >= 0 or other < 0:
            degree = state.degree[base] + (state.spare[microbatch] if other < 0 else 0)
            _join(problem, at, base, degree)
            return bool(state.tokens[base] <= prices.max_tokens * degree and state.seconds[base] < limit_s)


@inner
def _emptiest(problem: SearchProblem, microbatch: int, first: int, but: int) -> int:
    """The group of a microbatch with the most free memory, other than `but`; -1 if there is none."""
    state, max_tokens = problem.state, problem.prices.max_tokens
    best, most = -1, -1.0
    for group in range(first, state.counts[GROUPS]):
        free = max_tokens * state.degree[group] - state.tokens[group]
        there = state.home[group] == microbatch and state.span_kind[group] < PINNED
        if group != but and there and free > most:
            best, most = group, free
    return best


@inner
def _unite(problem: SearchProblem, base: int, other: int) -> None:
    """All sequences and ranks of `other` go to `base`."""
    state = problem.state
    state.degree[base] += state.degree[other]
    _hold(state, base, _plus(_load_of(state, base), _load_of(state, other)))
    for at in range(len(state.owner)):
        if state.owner[at] == other:
            state.owner[at] = base
    state.home[other], state.degree[other], state.seconds[other] = -1, 0, 0.0
    _hold(state, other, Load(0.0, 0.0, 0.0))
    _reprice(problem, base)


FULL = 0.97  # of the target: no fuller group is looked for


@inner
def _level(problem: SearchProblem, at: int, microbatch: int, first: int, target_s: float) -> bool:
    """Into the emptiest group, if it fits there."""
    state, batch, prices = problem.state, problem.batch, problem.prices
    emptiest, least = -1, math.inf
    for group in range(first, state.counts[GROUPS]):
        if state.home[group] == microbatch:
            used = max(state.seconds[group] / target_s, state.tokens[group] / (state.degree[group] * prices.max_tokens))
            if used < least:
                emptiest, least = group, used
    state.counts[MOVES] += 1 + (state.counts[GROUPS] - first) // 8
    if emptiest < 0:
        return False
    degree = state.degree[emptiest]
    load = _plus(_load_of(state, emptiest), _sequence(batch, at))
    span_kind, pace = _span_kind(problem, emptiest), state.pace[microbatch]
    if load.tokens > degree * prices.max_tokens or _price(prices, load, degree, span_kind, pace) > target_s:
        return False
    _join(problem, at, emptiest, degree)
    return True


@inlined
def _insert(problem: SearchProblem, at: int, microbatch: int, least: int, target_s: float) -> bool:
    """Best fit of any sequence: into the fullest group of the microbatch that needs no rank more, else one grows or
    opens for the fewest ranks more; False if none can."""
    state, batch, prices = problem.state, problem.batch, problem.prices
    fullest, longest_s, own = -1, -1.0, _sequence(batch, at)
    for group in range(state.counts[GROUPS]):
        work_s = _work_s(prices, _plus(_load_of(state, group), own))
        if state.home[group] != microbatch or work_s > (target_s - prices.fixed_s) * state.degree[group]:
            continue
        seconds = _with(problem, group, own, target_s)
        if longest_s < seconds <= target_s:
            fullest, longest_s = group, seconds
            if longest_s > FULL * target_s:
                break
    state.counts[MOVES] += 1 + state.counts[GROUPS] // 4
    if fullest >= 0:
        _join(problem, at, fullest, state.degree[fullest])
        return True
    return _grow(problem, at, microbatch, 0, least, target_s, 0)


@inlined
def _grow(problem: SearchProblem, at: int, microbatch: int, first: int, least: int, target_s: float, node: int) -> bool:
    """The group that needs the fewest ranks more, or a new one; ranks as `_rounded` has them."""
    state, batch, prices = problem.state, problem.batch, problem.prices
    fewest, best, longest_s = min(least - 1, state.spare[microbatch]), -1, -1.0
    span_s = target_s - prices.fixed_s
    for group in range(first, state.counts[GROUPS]):
        degree = state.degree[group]
        if state.home[group] != microbatch or state.span_kind[group] >= PINNED:
            continue
        load = _plus(_load_of(state, group), _sequence(batch, at))
        most, work_s = degree + fewest, _work_s(prices, load)
        if load.tokens > most * prices.max_tokens or work_s > most * span_s:
            continue
        for needed in range(
            max(degree + 1, math.ceil(max(load.tokens / prices.max_tokens, work_s / span_s))), most + 1
        ):
            if _rounded(needed, node) != needed:
                continue
            seconds = _price(prices, load, needed, 0, state.pace[microbatch])
            if seconds <= target_s:
                if needed - degree < fewest or seconds > longest_s:
                    fewest, best, longest_s = needed - degree, group, seconds
                break
    if best >= 0:
        _join(problem, at, best, state.degree[best] + fewest)
        return True
    if least > state.spare[microbatch]:
        return False
    _join(problem, at, _open(problem, microbatch, least), least)
    return True


@inlined
def _rounded(degree: int, node: int) -> int:
    """Up to a power of two where that is at most `node`: groups of such ranks fill nodes of as many without a rest."""
    ranks = 1
    while ranks < degree:
        ranks *= 2
    return ranks if ranks <= node and degree > 0 else degree


class Queue(NamedTuple):
    """Sequences without a group, longest first; `lightest[n]`: the fewest pairs of the first n + 1 of them.
    `fits[group]`: none of them before this one fits in the group as it is, nor when it gets fuller."""

    left: Ints
    lightest: Floats
    fits: Ints


class Fill(NamedTuple):
    """How to fill a microbatch, whose groups start at `first`. A sequence that finds no place within `target_s` is left
    over if `limit_s` is 0, else it goes where it takes the least time below `limit_s`, or ends the construction. Once
    sequences of at most `pool` ranks are reached, all spare ranks become groups of `pool` ranks, of which each sequence
    joins the emptiest; with 0 groups open as they are needed. `node`: degrees of new groups are rounded up to powers of
    two up to that (`_rounded`)."""

    microbatch: int
    first: int
    target_s: float
    limit_s: float
    pool: int
    node: int


@inner
def _fill(problem: SearchProblem, queue: Queue, fill: Fill) -> bool:
    """Construct groups of a microbatch from the sequences of the queue, longest first; False if one that may not be
    left over has no place.

    Groups only get fuller: once no rank is spare, the next sequence that fits is found by binary search.
    """
    state, microbatch, size = problem.state, fill.microbatch, len(queue.left)
    state.spare[microbatch] = problem.prices.num_ranks
    _open_pinned(problem, microbatch)
    queue.fits[fill.first : state.counts[GROUPS]] = 0
    pooled, number, placed = fill.pool == 0, 0, True
    while number < size and placed:
        if fill.limit_s == 0.0 and state.spare[microbatch] == 0:
            number = _next_of_any(problem, queue, number, fill.first)
            if number == size:
                break
        at, least = queue.left[number], 0
        if state.spare[microbatch] > 0 or not pooled:
            least = _fewest(problem, at, fill)
            if not pooled and 0 < least <= fill.pool:
                pooled = True
                for _ in range(min(state.spare[microbatch] // fill.pool, size - number)):
                    queue.fits[_open(problem, microbatch, fill.pool)] = 0
        levelled = pooled and fill.pool > 0 and _level(problem, at, microbatch, fill.first, fill.target_s)
        if not levelled and not _insert_next(problem, queue, number, fill, least) and fill.limit_s > 0.0:
            placed = _force(problem, at, microbatch, fill.first, fill.limit_s)
            if placed:  # its group may have more ranks now
                queue.fits[state.owner[at]] = 0
        number += 1
    _close_unused(problem, fill.first)
    return placed


@inner
def _close_unused(problem: SearchProblem, first: int) -> None:
    """Close groups without sequences, from `first` on."""
    state = problem.state
    for group in range(first, state.counts[GROUPS]):
        if state.home[group] >= 0 and state.tokens[group] == 0.0:
            _close(problem, group)


@inner
def _fewest(problem: SearchProblem, at: int, fill: Fill) -> int:
    """Ranks that a sequence needs within the target, rounded where that is as quick; if none are enough 0, or where it
    must be placed those that take the least time."""
    load, prices, pace = _sequence(problem.batch, at), problem.prices, problem.state.pace[fill.microbatch]
    least = _least_degree(prices, load, fill.target_s, pace)
    if least == 0 and fill.limit_s > 0.0:
        return _best_degree(prices, load, pace)
    rounded = _rounded(least, fill.node)
    return rounded if _price(prices, load, rounded, 0, pace) <= fill.target_s else least


@inner
def _next_of_any(problem: SearchProblem, queue: Queue, number: int, first: int) -> int:
    """The first from `number` on that may fit in some group."""
    after = len(queue.left)
    for group in range(first, problem.state.counts[GROUPS]):
        after = min(after, queue.fits[group])
    return max(after, number)


@inner
def _insert_next(problem: SearchProblem, queue: Queue, number: int, fill: Fill, least: int) -> bool:
    """Best fit of a sequence of the queue: into the fullest group that needs no rank more, else one grows or opens for
    the fewest ranks more; False if none can."""
    state, batch, at = problem.state, problem.batch, queue.left[number]
    fullest, longest_s = -1, -1.0
    state.counts[MOVES] += 1 + (state.counts[GROUPS] - fill.first) // 4
    for group in range(fill.first, state.counts[GROUPS]):
        if queue.fits[group] > number:
            continue
        seconds = _with(problem, group, _sequence(batch, at), fill.target_s)
        if seconds > fill.target_s:
            queue.fits[group] = _next(problem, queue, number, group, fill.target_s)
        elif seconds > longest_s:
            fullest, longest_s = group, seconds
            if longest_s > FULL * fill.target_s:
                break
    if fullest >= 0:
        _join(problem, at, fullest, state.degree[fullest])
        return True
    if least > 0 and _grow(problem, at, fill.microbatch, fill.first, least, fill.target_s, fill.node):
        queue.fits[state.owner[at]] = 0
        return True
    return False


@inner
def _next(problem: SearchProblem, queue: Queue, number: int, group: int, target_s: float) -> int:
    """The first after `number` that may fit in the group."""
    low, step, size = number, 1, len(queue.left)
    while low + step < size and not _may_fit(problem, queue, low + step, group, target_s):
        low += step
        step *= 2
    high = min(low + step, size)
    while high - low > 1:
        middle = (low + high) // 2
        if _may_fit(problem, queue, middle, group, target_s):
            high = middle
        else:
            low = middle
    problem.state.counts[MOVES] += 2
    return high


@inlined
def _may_fit(problem: SearchProblem, queue: Queue, number: int, group: int, target_s: float) -> bool:
    """Whether one of so many tokens, and of the fewest pairs so far, fits."""
    lightest = Load(queue.lightest[number], problem.batch.tokens[queue.left[number]], 1.0)
    return _with(problem, group, lightest, target_s) <= target_s


@inlined
def _with(problem: SearchProblem, group: int, more: Load, target_s: float) -> float:
    """Seconds of the group with so much more; infinite out of memory, or where compute alone exceeds the target: that
    is much cheaper to see than the price."""
    state, prices = problem.state, problem.prices
    degree, load = state.degree[group], _plus(_load_of(state, group), more)
    if load.tokens > degree * prices.max_tokens:
        return float("inf")
    span_kind = _span_kind(problem, group)
    if span_kind < PINNED and _work_s(prices, load) > (target_s - prices.fixed_s) * degree:
        return float("inf")
    return _price(prices, load, degree, span_kind, state.pace[state.home[group]])


TARGETS = 16
POOLS = (2, 6)  # groups of so many ranks pool their memory: fewer sequences fit in nowhere
WORTH = 0.5  # of its ranks' time: the longest sequence is not spread over so many that it uses less
MANY = 2048  # sequences: while more are left every other target is tried
SAME = 1e-3  # of a target: closer ones are tried once


@inner_with_arrays
def fill_in_turn(problem: SearchProblem, node: int) -> float:
    """Groups for the whole batch, priced where they lie; returns its seconds.

    Each microbatch takes, of several ways to fill it, the one that gets most done a second. Ranks are rounded up to
    powers of two up to `node` (`Fill.node`), where that is better.
    """
    state = problem.state
    _clear(problem, 0)
    while True:
        left = np.flatnonzero(state.owner < 0)
        if len(left) == 0:
            return total_s(problem)
        microbatch, first = state.counts[MICROBATCHES], state.counts[GROUPS]
        state.counts[MICROBATCHES] = microbatch + 1
        queue = _queue(problem, left)
        pace = _pace_of(problem.prices, _sequence(problem.batch, left[0]))
        fill = _best_fill(problem, queue, microbatch, pace, node)
        state.pace[microbatch] = pace
        _fill(problem, queue, fill)
        _allocate(problem, microbatch, first)
        _place_groups(problem, microbatch)
        _compact(problem)


@inner_with_arrays
def _best_fill(problem: SearchProblem, queue: Queue, microbatch: int, pace: float, node: int) -> Fill:
    """The best target, then the best pool, then whether to round."""
    targets, first = _targets(problem, queue.left, pace), problem.state.counts[GROUPS]
    best, most = Fill(microbatch, first, targets[0] * (1.0 + SLACK), 0.0, 0, 0), -1.0
    for number in range(0, len(targets), 2 if len(queue.left) > MANY else 1):
        if number > 0 and abs(targets[number] - targets[number - 1]) <= SAME * targets[number]:
            continue
        fill = Fill(microbatch, first, targets[number] * (1.0 + SLACK), 0.0, 0, 0)
        rate = _rate(problem, queue, fill, pace)
        if rate > most:
            best, most = fill, rate
    target_s = best.target_s
    for ranks in POOLS:
        if ranks <= problem.prices.num_ranks:
            fill = Fill(microbatch, first, target_s, 0.0, ranks, 0)
            rate = _rate(problem, queue, fill, pace)
            if rate > most:
                best, most = fill, rate
    rounded = Fill(microbatch, first, target_s, 0.0, best.pool, node)
    return rounded if _rate(problem, queue, rounded, pace) > most else best


@inner_with_arrays
def _queue(problem: SearchProblem, left: Ints) -> Queue:
    lightest = problem.batch.pairs[left]
    for number in range(1, len(left)):
        lightest[number] = min(lightest[number], lightest[number - 1])
    return Queue(left, lightest, np.zeros(len(problem.state.home), np.int64))


@inner
def _rate(problem: SearchProblem, queue: Queue, fill: Fill, pace: float) -> float:
    """Throughput of a microbatch: work a second, with tokens counted as their share of a full microbatch's fixed time.
    The plan stays as it was."""
    state, batch, prices, microbatch, first = problem.state, problem.batch, problem.prices, fill.microbatch, fill.first
    state.pace[microbatch] = pace
    _fill(problem, queue, fill)
    per_token = (prices.fixed_s + problem.extra_s) * prices.capacity / prices.holds
    done_s = span_s = 0.0
    for at in queue.left:
        if state.owner[at] >= 0:
            done_s += batch.work_s[at] + per_token * batch.tokens[at]
    if first < state.counts[GROUPS]:
        span_s = _place_groups(problem, microbatch)
    _close_from(problem, first, microbatch)
    return done_s / (_beside_s(problem, span_s, problem.traffic_s) + problem.extra_s) if span_s > 0.0 else 0.0


@inner_with_arrays
def _targets(problem: SearchProblem, left: Ints, pace: float) -> Floats:
    """What the longest takes at several degrees, and equal shares of all work."""
    batch, prices = problem.batch, problem.prices
    longest = left[0]
    alone = _sequence(batch, longest)
    work_s = batch.work_s[left].sum() / prices.capacity
    tokens = batch.tokens[left].sum()
    targets = np.zeros(TARGETS)
    least = max(math.ceil(alone.tokens / prices.max_tokens), 1)
    best = max(_best_degree(prices, alone, pace), least)
    number = 0
    for step in range(TARGETS - 2):
        degree = round(least * (best / least) ** (step / (TARGETS - 3)))
        target_s = _price(prices, alone, degree, 0, pace)
        while target_s == math.inf and degree < best:  # no group may have so many ranks
            degree += 1
            target_s = _price(prices, alone, degree, 0, pace)
        if step == 0 or batch.work_s[longest] >= WORTH * degree * target_s:
            targets[number] = target_s
            number += 1
    fewest = math.ceil(tokens / prices.holds)
    for more in range(2):
        share_s = work_s / (fewest + more) + prices.fixed_s
        targets[number + more] = max(share_s * 1.01, targets[number - 1])
    return targets[: number + 2]
