"""Exact degrees of the groups of one microbatch."""

import math

import numpy as np

from rayfcp.plan.compiled import compiled, inner
from rayfcp.plan.joint.kernels.price import SEAT, Ints, Load, Prices, _paced, _pass_s, _price, _within
from rayfcp.plan.joint.kernels.state import GROUPS, World, _reprice, _span_s


@inner
def _allocate(world: World, microbatch: int, first: int) -> float:
    """Give ranks to the slowest group until none is left or helps; returns the makespan at the pace that then fits.

    Exact, whatever T does with the degree: to get below the makespan the slowest group must have the next
    degree at which it is faster, and no group ever has more ranks than the least makespan asks of it.
    """
    state, prices = world.state, world.prices
    _shrink(world, microbatch, first)
    while True:
        slowest = -1
        for group in range(first, state.counts[GROUPS]):
            if state.home[group] == microbatch and (slowest < 0 or state.seconds[group] > state.seconds[slowest]):
                slowest = group
        if slowest < 0:
            return 0.0
        degree, far = state.degree[slowest], state.far[slowest]
        faster = 0
        most = degree + state.spare[microbatch] if far < SEAT else degree
        for more in range(degree + 1, most + 1):
            seconds = _price(prices, state.cells[slowest], state.tokens[slowest], more, far, state.pace[microbatch])
            if seconds < state.seconds[slowest]:
                faster = more
                state.seconds[slowest] = seconds
                break
        if faster == 0:
            return _keep_pace(world, microbatch, first)
        state.spare[microbatch] -= faster - degree
        state.degree[slowest] = faster


@inner
def _shrink(world: World, microbatch: int, first: int) -> None:
    """The least degree of each group that memory and the present makespan permit."""
    state, prices = world.state, world.prices
    span_s = _span_s(world, microbatch, first)
    for group in range(first, state.counts[GROUPS]):
        if state.home[group] != microbatch or state.far[group] >= SEAT:
            continue
        cells, tokens = state.cells[group], state.tokens[group]
        for degree in range(max(math.ceil(tokens / prices.room), 1), state.degree[group]):
            seconds = _price(prices, cells, tokens, degree, state.far[group], state.pace[microbatch])
            if seconds <= span_s:
                state.spare[microbatch] += state.degree[group] - degree
                state.degree[group] = degree
                state.seconds[group] = seconds
                break


@inner
def _keep_pace(world: World, microbatch: int, first: int) -> float:
    """Price the groups at the pace of the slowest forward and the slowest backward; returns the makespan."""
    state, prices = world.state, world.prices
    forward_s = backward_s = 0.0
    for group in range(first, state.counts[GROUPS]):
        if state.home[group] == microbatch and (state.far[group] < SEAT or state.tokens[group] > 0.0):
            load = Load(state.cells[group], state.tokens[group], state.degree[group], state.far[group])
            best = _fastest(prices, load, state.pace[microbatch])
            forward_s = max(forward_s, _pass_s(prices, load, best, 0))
            backward_s = max(backward_s, _pass_s(prices, load, best, 1))
    state.pace[microbatch] = _within(forward_s, forward_s + backward_s)
    for group in range(first, state.counts[GROUPS]):
        if state.home[group] == microbatch:
            _reprice(world, group)
    return _span_s(world, microbatch, first)


@compiled
def primitives_of(world: World) -> Ints:
    """The fastest primitive of each group at its microbatch's pace, the first among equals."""
    state = world.state
    found = np.zeros(state.counts[GROUPS], np.int64)
    for group in range(len(found)):
        if state.home[group] >= 0 and state.degree[group] > 1:
            load = Load(state.cells[group], state.tokens[group], state.degree[group], state.far[group])
            found[group] = _fastest(world.prices, load, state.pace[state.home[group]])
    return found


@inner
def _fastest(prices: Prices, load: Load, pace: float) -> int:
    best, least_s = 0, math.inf
    for primitive in range(prices.num_primitives):
        forward_s, backward_s = _pass_s(prices, load, primitive, 0), _pass_s(prices, load, primitive, 1)
        seconds = _paced(prices, forward_s, backward_s, pace)
        if seconds < least_s:
            best, least_s = primitive, seconds
    return best
