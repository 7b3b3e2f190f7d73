"""What to do with a sequence that fits in no group within the target: the way that takes the least time.

All of one microbatch, for a target makespan: sequences from long to short, each where it costs the fewest ranks.

As much of what is left as fits in one microbatch within a target: from long to short, each where it costs the fewest
ranks.

One microbatch after the other: each starts from the longest sequence left and takes what else fits in its time.
"""

import math
from typing import NamedTuple

import numpy as np

from rayfcp.cost.compiled import compiled, inlined, inner
from rayfcp.plan.groups.kernels.price import SEAT, SLACK, _best_degree, _least_degree, _pace_of, _price
from rayfcp.plan.groups.kernels.ranks import _allocate, _lay
from rayfcp.plan.groups.kernels.state import (
    GROUPS,
    MICROBATCHES,
    MOVES,
    World,
    _beside_s,
    _compact,
    _empty,
    _far,
    _forget,
    _join,
    _open,
    _open_seats,
    _reprice,
    total_s,
)
from rayfcp.values.arrays import Floats, Ints


@inner
def _force(world: World, at: int, microbatch: int, first: int, limit_s: float) -> bool:
    """Into the group, or a new one of all spare ranks, that takes the least time, in memory; False if that
    takes `limit_s`."""
    state, batch, prices = world.state, world.batch, world.prices
    best, best_s, best_degree = -1, math.inf, 0
    spare = state.spare[microbatch]
    for group in range(first, state.counts[GROUPS]):
        degree, tokens = state.degree[group], state.tokens[group] + batch.tokens[at]
        most = degree + spare if state.far[group] < SEAT else degree
        if state.home[group] != microbatch or tokens > most * prices.room:
            continue
        cells = state.cells[group] + batch.cells[at]
        needed = max(degree, math.ceil(tokens / prices.room))
        for more in (needed, most):
            seconds = _price(prices, cells, tokens, more, _far(world, group), state.pace[microbatch])
            if seconds < best_s:
                best, best_s, best_degree = group, seconds, more
    state.counts[MOVES] += 1 + (state.counts[GROUPS] - first) // 2
    if spare * prices.room >= batch.tokens[at]:
        seconds = _price(prices, batch.cells[at], batch.tokens[at], spare, 0, state.pace[microbatch])
        if seconds < best_s:
            best, best_s, best_degree = -2, seconds, spare
    if best == -1:
        return _pool(world, at, microbatch, first, limit_s)
    if best_s >= limit_s:
        return False
    _join(world, at, _open(world, microbatch, spare) if best == -2 else best, best_degree)
    return True


@inner
def _pool(world: World, at: int, microbatch: int, first: int, limit_s: float) -> bool:
    """Unite groups, the emptiest first, until the sequence fits in one of them; the last one left takes the
    spare ranks too."""
    state, batch, prices = world.state, world.batch, world.prices
    while True:
        base = _emptiest(world, microbatch, first, -1)
        if base < 0:
            return False
        left = prices.room * state.degree[base] - state.tokens[base]
        best, best_s = -1, math.inf
        for group in range(first, state.counts[GROUPS]):
            free = prices.room * state.degree[group] - state.tokens[group]
            there = state.home[group] == microbatch and state.far[group] < SEAT
            if group != base and there and left + free >= batch.tokens[at]:
                cells, tokens = state.cells[base] + state.cells[group], state.tokens[base] + state.tokens[group]
                ranks = state.degree[base] + state.degree[group]
                seconds = _price(prices, cells, tokens, ranks, 0, state.pace[microbatch])
                if seconds < best_s:
                    best, best_s = group, seconds
        other = best if best >= 0 else _emptiest(world, microbatch, first, base)
        if other >= 0:
            _unite(world, base, other)
        if best >= 0 or other < 0:
            degree = state.degree[base] + (state.spare[microbatch] if other < 0 else 0)
            _join(world, at, base, degree)
            return bool(state.tokens[base] <= prices.room * degree and state.seconds[base] < limit_s)


@inner
def _emptiest(world: World, microbatch: int, first: int, but: int) -> int:
    """The group of a microbatch with the most free memory, other than `but`; -1 if there is none."""
    state, room = world.state, world.prices.room
    best, most = -1, -1.0
    for group in range(first, state.counts[GROUPS]):
        free = room * state.degree[group] - state.tokens[group]
        there = state.home[group] == microbatch and state.far[group] < SEAT
        if group != but and there and free > most:
            best, most = group, free
    return best


@inner
def _unite(world: World, base: int, other: int) -> None:
    """All sequences and ranks of `other` go to `base`."""
    state = world.state
    state.degree[base] += state.degree[other]
    state.tokens[base] += state.tokens[other]
    state.cells[base] += state.cells[other]
    for at in range(len(state.owner)):
        if state.owner[at] == other:
            state.owner[at] = base
    state.home[other], state.degree[other] = -1, 0
    state.tokens[other], state.cells[other], state.seconds[other] = 0.0, 0.0, 0.0
    _reprice(world, base)


FULL = 0.97  # of the target: no fuller group is looked for


class Fill(NamedTuple):
    """How to fill. Once only sequences of at most `pool` ranks are left, all spare ranks become groups of
    `pool` ranks, levelled by them; with 0 groups open as they are needed. Sequences go past the target if need be, but
    not past `limit_s`."""

    target_s: float
    limit_s: float
    pool: int


@inner
def _fill(world: World, members: Ints, microbatch: int, how: Fill) -> bool:
    """Place `members` in new groups; False if one does not fit."""
    state, prices = world.state, world.prices
    first = state.counts[GROUPS]
    state.spare[microbatch] = prices.num_ranks
    _open_seats(world, microbatch)
    target_s = how.target_s * (1.0 + SLACK)
    pooled, placed = how.pool == 0, True
    for number in range(len(members)):
        at = members[number]
        least = _needed(world, at, microbatch, target_s)
        if not pooled and 0 < least <= how.pool:
            pooled = True
            for _ in range(min(state.spare[microbatch] // how.pool, len(members) - number)):
                _open(world, microbatch, how.pool)
        level = how.pool > 0 and pooled
        if least == 0 or (level and _level(world, at, microbatch, first, target_s)):
            continue
        if not _place(world, at, microbatch, first, least, target_s) and not _force(
            world, at, microbatch, first, how.limit_s
        ):
            placed = False
            break
    for group in range(first, state.counts[GROUPS]):
        if state.degree[group] and state.tokens[group] == 0.0:
            _empty(world, group)
    return placed


@inlined
def _needed(world: World, at: int, microbatch: int, target_s: float) -> int:
    """The fewest ranks that meet the target; if none do, those that take the least time."""
    cells, tokens = world.batch.cells[at], world.batch.tokens[at]
    pace = world.state.pace[microbatch]
    least = _least_degree(world.prices, cells, tokens, target_s, pace)
    return least if least > 0 else _best_degree(world.prices, cells, tokens, pace)


@inner
def _level(world: World, at: int, microbatch: int, first: int, target_s: float) -> bool:
    """Into the emptiest group, if it fits there."""
    state, batch, prices = world.state, world.batch, world.prices
    emptiest, least = -1, math.inf
    for group in range(first, state.counts[GROUPS]):
        if state.home[group] == microbatch:
            used = max(state.seconds[group] / target_s, state.tokens[group] / (state.degree[group] * prices.room))
            if used < least:
                emptiest, least = group, used
    state.counts[MOVES] += 1 + (state.counts[GROUPS] - first) // 8
    if emptiest < 0:
        return False
    degree = state.degree[emptiest]
    tokens, cells = state.tokens[emptiest] + batch.tokens[at], state.cells[emptiest] + batch.cells[at]
    far, pace = _far(world, emptiest), state.pace[microbatch]
    if tokens > degree * prices.room or _price(prices, cells, tokens, degree, far, pace) > target_s:
        return False
    _join(world, at, emptiest, degree)
    return True


@inlined
def _place(world: World, at: int, microbatch: int, first: int, least: int, target_s: float) -> bool:
    """Join the fullest group that needs no rank more, else grow or open one: the fewest ranks more."""
    state, batch, prices = world.state, world.batch, world.prices
    fullest, longest_s = -1, -1.0
    span_s = target_s - prices.fixed_s
    for group in range(first, state.counts[GROUPS]):
        degree, tokens = state.degree[group], state.tokens[group] + batch.tokens[at]
        if state.home[group] != microbatch or tokens > degree * prices.room:
            continue
        cells = state.cells[group] + batch.cells[at]
        if prices.per_cell * cells + prices.per_token * tokens > span_s * degree:
            continue
        seconds = _price(prices, cells, tokens, degree, _far(world, group), state.pace[microbatch])
        if seconds <= target_s and seconds > longest_s:
            fullest, longest_s = group, seconds
            if longest_s > FULL * target_s:
                break
    state.counts[MOVES] += 1 + (state.counts[GROUPS] - first) // 4
    if fullest >= 0:
        _join(world, at, fullest, state.degree[fullest])
        return True
    if state.spare[microbatch] == 0:
        return False
    return _grow(world, at, microbatch, first, least, target_s, 0)


@inlined
def _grow(world: World, at: int, microbatch: int, first: int, least: int, target_s: float, node: int) -> bool:
    """The group that needs the fewest ranks more, or a new one; ranks as `_rounded` has them."""
    state, batch, prices = world.state, world.batch, world.prices
    fewest, best, longest_s = min(least - 1, state.spare[microbatch]), -1, -1.0
    span_s = target_s - prices.fixed_s
    for group in range(first, state.counts[GROUPS]):
        degree = state.degree[group]
        if state.home[group] != microbatch or state.far[group] >= SEAT:
            continue
        cells, tokens = state.cells[group] + batch.cells[at], state.tokens[group] + batch.tokens[at]
        most, work_s = degree + fewest, prices.per_cell * cells + prices.per_token * tokens
        if tokens > most * prices.room or work_s > most * span_s:
            continue
        for needed in range(max(degree + 1, math.ceil(max(tokens / prices.room, work_s / span_s))), most + 1):
            if _rounded(needed, node) != needed:
                continue
            seconds = _price(prices, cells, tokens, needed, 0, state.pace[microbatch])
            if seconds <= target_s:
                if needed - degree < fewest or seconds > longest_s:
                    fewest, best, longest_s = needed - degree, group, seconds
                break
    if best >= 0:
        _join(world, at, best, state.degree[best] + fewest)
        return True
    if least > state.spare[microbatch]:
        return False
    _join(world, at, _open(world, microbatch, least), least)
    return True


@inlined
def _rounded(degree: int, node: int) -> int:
    """Up to a power of two where that is at most `node`: groups of such ranks fill nodes of as many without a rest."""
    ranks = 1
    while ranks < degree:
        ranks *= 2
    return ranks if ranks <= node and degree > 0 else degree


class Queue(NamedTuple):
    """Sequences without a group, longest first; `lightest[n]`: the fewest cells of the first n + 1 of them.
    `fits[group]`: none of them before this one fits in the group as it is, nor when it gets fuller."""

    left: Ints
    lightest: Floats
    fits: Ints


class Take(NamedTuple):
    """How to fill. Once sequences of at most `pool` ranks are reached, all spare ranks become groups of `pool`
    ranks, levelled by the others; with 0 groups open as they are needed. `node`: ranks of new groups are rounded up to
    powers of two up to that (`fill._rounded`)."""

    target_s: float
    pool: int
    node: int


class Here(NamedTuple):
    """A microbatch, its first group, its target with a little slack, and `Take.node`."""

    microbatch: int
    first: int
    target_s: float
    node: int


@inner
def _take(world: World, queue: Queue, microbatch: int, how: Take) -> None:
    """Place those that fit in new groups of the microbatch. Once no rank is spare, the next that fits is looked for by
    halves: groups only get fuller."""
    state = world.state
    here, size = Here(microbatch, state.counts[GROUPS], how.target_s * (1.0 + SLACK), how.node), len(queue.left)
    _begin(world, queue, here)
    pooled, number = how.pool == 0, 0
    while number < size:
        if state.spare[microbatch] == 0:
            number = _next_of_any(world, queue, number, here.first)
            if number == size:
                break
        at, least = queue.left[number], 0
        if state.spare[microbatch] > 0 or not pooled:
            least = _fewest(world, at, here)
            if not pooled and 0 < least <= how.pool:
                pooled = True
                for _ in range(min(state.spare[microbatch] // how.pool, size - number)):
                    queue.fits[_open(world, microbatch, how.pool)] = 0
        level = how.pool > 0 and pooled
        if not (level and _level(world, at, microbatch, here.first, here.target_s)):
            _settle(world, queue, number, here, least)
        number += 1
    for group in range(here.first, state.counts[GROUPS]):
        if state.tokens[group] == 0.0:
            _empty(world, group)


@inner
def _fewest(world: World, at: int, here: Here) -> int:
    """Ranks that a sequence needs within the target, 0 if none are enough; rounded where that is as quick."""
    batch, prices, pace = world.batch, world.prices, world.state.pace[here.microbatch]
    tokens, cells = batch.tokens[at], batch.cells[at]
    least = _least_degree(prices, cells, tokens, here.target_s, pace)
    rounded = _rounded(least, here.node)
    return rounded if _price(prices, cells, tokens, rounded, 0, pace) <= here.target_s else least


@inner
def _begin(world: World, queue: Queue, here: Here) -> None:
    """All ranks are spare, seats are open."""
    state = world.state
    state.spare[here.microbatch] = world.prices.num_ranks
    _open_seats(world, here.microbatch)
    for group in range(here.first, state.counts[GROUPS]):
        queue.fits[group] = 0


@inner
def _next_of_any(world: World, queue: Queue, number: int, first: int) -> int:
    """The first from `number` on that may fit in some group."""
    after = len(queue.left)
    for group in range(first, world.state.counts[GROUPS]):
        after = min(after, queue.fits[group])
    return max(after, number)


@inner
def _settle(world: World, queue: Queue, number: int, here: Here, least: int) -> None:
    """Into the fullest group that needs no rank more, else one grows or opens for the fewest ranks more, if it can."""
    state, batch, at = world.state, world.batch, queue.left[number]
    fullest, longest_s = -1, -1.0
    state.counts[MOVES] += 1 + (state.counts[GROUPS] - here.first) // 4
    for group in range(here.first, state.counts[GROUPS]):
        if queue.fits[group] > number:
            continue
        seconds = _with(world, group, batch.tokens[at], batch.cells[at])
        if seconds > here.target_s:
            queue.fits[group] = _next(world, queue, number, group, here.target_s)
        elif seconds > longest_s:
            fullest, longest_s = group, seconds
            if longest_s > FULL * here.target_s:
                break
    if fullest >= 0:
        _join(world, at, fullest, state.degree[fullest])
    elif least > 0 and _grow(world, at, here.microbatch, here.first, least, here.target_s, here.node):
        queue.fits[state.owner[at]] = 0


@inner
def _next(world: World, queue: Queue, number: int, group: int, target_s: float) -> int:
    """The first after `number` that may fit in the group."""
    low, step, size = number, 1, len(queue.left)
    while low + step < size and not _may_fit(world, queue, low + step, group, target_s):
        low += step
        step *= 2
    high = min(low + step, size)
    while high - low > 1:
        middle = (low + high) // 2
        if _may_fit(world, queue, middle, group, target_s):
            high = middle
        else:
            low = middle
    world.state.counts[MOVES] += 2
    return high


@inlined
def _may_fit(world: World, queue: Queue, number: int, group: int, target_s: float) -> bool:
    """Whether one of so many tokens, and of the fewest cells so far, fits."""
    return _with(world, group, world.batch.tokens[queue.left[number]], queue.lightest[number]) <= target_s


@inlined
def _with(world: World, group: int, tokens: float, cells: float) -> float:
    """Seconds of the group with so much more; infinite out of memory."""
    state, prices = world.state, world.prices
    degree, held = state.degree[group], state.tokens[group] + tokens
    if held > degree * prices.room:
        return float("inf")
    far = _far(world, group)
    return _price(prices, state.cells[group] + cells, held, degree, far, state.pace[state.home[group]])


TARGETS = 16
POOLS = (2, 6)  # groups of so many ranks pool their memory: fewer sequences fit in nowhere
WORTH = 0.5  # of its ranks' time: the longest sequence is not spread over so many that it uses less
MANY = 2048  # sequences: while more are left every other target is tried
SAME = 1e-3  # of a target: closer ones are tried once


@compiled
def fill_in_turn(world: World, node: int) -> float:
    """Groups for the whole batch, priced where they lie; returns its seconds.

    Each microbatch takes, of several ways to fill it, the one that gets most done a second. Ranks are rounded up to
    powers of two up to `node` (`Take`), where that is better.
    """
    state = world.state
    state.owner[:] = -1
    state.counts[GROUPS] = state.counts[MICROBATCHES] = 0
    while True:
        left = np.flatnonzero(state.owner < 0)
        if len(left) == 0:
            return total_s(world)
        microbatch, first = state.counts[MICROBATCHES], state.counts[GROUPS]
        state.counts[MICROBATCHES] = microbatch + 1
        queue = _queue(world, left)
        pace = _pace_of(world.prices, world.batch.cells[left[0]], world.batch.tokens[left[0]])
        how = _best(world, queue, microbatch, pace, node)
        state.pace[microbatch] = pace
        _take(world, queue, microbatch, how)
        _allocate(world, microbatch, first)
        _lay(world, microbatch)
        _compact(world)


@compiled
def _best(world: World, queue: Queue, microbatch: int, pace: float, node: int) -> Take:
    """The best target, then the best pool, then whether to round."""
    targets = _targets(world, queue.left, pace)
    best, most = Take(targets[0], 0, 0), -1.0
    for number in range(0, len(targets), 2 if len(queue.left) > MANY else 1):
        if number > 0 and abs(targets[number] - targets[number - 1]) <= SAME * targets[number]:
            continue
        rate = _rate(world, queue, microbatch, Take(targets[number], 0, 0), pace)
        if rate > most:
            best, most = Take(targets[number], 0, 0), rate
    target_s = best.target_s
    for ranks in POOLS:
        if ranks <= world.prices.num_ranks:
            rate = _rate(world, queue, microbatch, Take(target_s, ranks, 0), pace)
            if rate > most:
                best, most = Take(target_s, ranks, 0), rate
    rounded = Take(target_s, best.pool, node)
    return rounded if _rate(world, queue, microbatch, rounded, pace) > most else best


@compiled
def _queue(world: World, left: Ints) -> Queue:
    lightest = world.batch.cells[left]
    for number in range(1, len(left)):
        lightest[number] = min(lightest[number], lightest[number - 1])
    return Queue(left, lightest, np.zeros(len(world.state.home), np.int64))


@inner
def _rate(world: World, queue: Queue, microbatch: int, how: Take, pace: float) -> float:
    """What a second gets done: work, and tokens, of which a microbatch has room for so many."""
    state, batch, prices = world.state, world.batch, world.prices
    first = state.counts[GROUPS]
    state.pace[microbatch] = pace
    _take(world, queue, microbatch, how)
    per_token = (prices.fixed_s + world.extra_s) * prices.capacity / prices.holds
    done_s = span_s = 0.0
    for at in queue.left:
        if state.owner[at] >= 0:
            done_s += batch.work_s[at] + per_token * batch.tokens[at]
    if first < state.counts[GROUPS]:
        span_s = _lay(world, microbatch)
    _forget(world, first, microbatch)
    return done_s / (_beside_s(world, span_s, world.traffic_s) + world.extra_s) if span_s > 0.0 else 0.0


@compiled
def _targets(world: World, left: Ints, pace: float) -> Floats:
    """What the longest takes at several degrees, and equal shares of all work."""
    batch, prices = world.batch, world.prices
    longest = left[0]
    work_s = batch.work_s[left].sum() / prices.capacity
    tokens = batch.tokens[left].sum()
    targets = np.zeros(TARGETS)
    least = max(math.ceil(batch.tokens[longest] / prices.room), 1)
    best = max(_best_degree(prices, batch.cells[longest], batch.tokens[longest], pace), least)
    number = 0
    for step in range(TARGETS - 2):
        degree = round(least * (best / least) ** (step / (TARGETS - 3)))
        target_s = _price(prices, batch.cells[longest], batch.tokens[longest], degree, 0, pace)
        if step == 0 or batch.work_s[longest] >= WORTH * degree * target_s:
            targets[number] = target_s
            number += 1
    fewest = math.ceil(tokens / prices.holds)
    for more in range(2):
        share_s = work_s / (fewest + more) + prices.fixed_s
        targets[number + more] = max(share_s * 1.01, targets[number - 1])
    return targets[: number + 2]
