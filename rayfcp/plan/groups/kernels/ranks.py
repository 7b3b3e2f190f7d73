"""Exact degrees of the groups of one microbatch.

What a plan costs where its groups really lie (`rayfcp.cost.placement.place_groups`).
"""

import math

import numpy as np

from rayfcp.cost.compiled import compiled, inner
from rayfcp.plan.groups.kernels.price import SEAT, Load, Prices, _paced, _pass_s, _price, _within
from rayfcp.plan.groups.kernels.state import GROUPS, MICROBATCHES, MOVES, World, _reprice, _span_s, _sum_s, total_s
from rayfcp.values.arrays import Floats, Ints


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


@compiled
def place(world: World) -> float:
    """Mark the groups that span nodes, and price them so; returns the seconds of the batch."""
    spans = np.zeros(world.state.counts[MICROBATCHES])
    _lay_all(world, spans)
    return _sum_s(world, spans)


@compiled
def alone_s(world: World) -> float:
    """Seconds of the batch if each group were alone in its microbatch, inside a node as far as may be."""
    state = world.state
    state.pace[:] = 0.0
    for group in range(state.counts[GROUPS]):
        if state.home[group] >= 0:
            if state.far[group] < SEAT:
                state.far[group] = 0
            _reprice(world, group)
    return total_s(world)


@compiled
def _lay_all(world: World, spans: Floats) -> None:
    for microbatch in range(world.state.counts[MICROBATCHES]):
        spans[microbatch] = _lay(world, microbatch)


@compiled
def _lay(world: World, microbatch: int) -> float:
    """Mark the groups of a microbatch that span nodes; returns its makespan with them priced so.

    The larger and slower go first, each into the node with the least room that holds it, else over the emptiest ones;
    those larger than all nodes go last. Groups of one rank always find room.
    """
    state = world.state
    groups, count = np.empty(world.prices.num_ranks, np.int64), 0
    state.pace[microbatch] = 0.0
    for group in range(state.counts[GROUPS]):
        if state.home[group] != microbatch:
            continue
        if state.far[group] < SEAT:
            state.far[group] = 0
            if state.degree[group] > 1:
                groups[count] = group
                count += 1
        _reprice(world, group)
    _sort(world, groups[:count])
    left, largest = world.nodes.copy(), world.nodes.max()
    for turn in range(2):
        for group in groups[:count]:
            if (state.degree[group] > largest) == (turn == 1):
                _place_one(world, group, left)
    state.counts[MOVES] += 1 + count * len(left) // 4
    return _keep_pace(world, microbatch, 0)


@inner
def _sort(world: World, groups: Ints) -> None:
    """By ranks, then by seconds, most first; stable, and quick for few."""
    degree, seconds = world.state.degree, world.state.seconds
    for number in range(1, len(groups)):
        group, at = groups[number], number
        while at > 0:
            other = groups[at - 1]
            if degree[other] > degree[group] or (degree[other] == degree[group] and seconds[other] >= seconds[group]):
                break
            groups[at] = other
            at -= 1
        groups[at] = group


@inner
def _place_one(world: World, group: int, left: Ints) -> None:
    degree, best = world.state.degree[group], -1
    for node in range(len(left)):
        if left[node] >= degree and (best < 0 or left[node] < left[best]):
            best = node
    if best >= 0:
        left[best] -= degree
        return
    world.state.far[group] = 1
    while degree > 0:
        emptiest = 0
        for node in range(len(left)):
            if left[node] > left[emptiest]:
                emptiest = node
        taken = min(degree, left[emptiest])
        left[emptiest] -= taken
        degree -= taken
