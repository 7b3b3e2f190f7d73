"""What to do with a sequence that fits in no group within the target: the way that takes the least time."""

import math

from rayfcp.plan.compiled import inner
from rayfcp.plan.joint.kernels.price import SEAT, _price
from rayfcp.plan.joint.kernels.state import GROUPS, MOVES, World, _far, _join, _open, _reprice


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
