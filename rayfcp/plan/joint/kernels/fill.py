"""All of one microbatch, for a target makespan: sequences from long to short, each where it costs the fewest ranks."""

import math
from typing import NamedTuple

from rayfcp.plan.compiled import inlined, inner
from rayfcp.plan.joint.kernels.merge import _force
from rayfcp.plan.joint.kernels.price import SEAT, SLACK, Ints, _best_degree, _least_degree, _price
from rayfcp.plan.joint.kernels.state import GROUPS, MOVES, World, _empty, _far, _join, _open, _open_seats

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
