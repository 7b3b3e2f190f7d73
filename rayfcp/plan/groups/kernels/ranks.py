"""Exact degrees of the groups of a microbatch, and their cost where they lie (`rayfcp.cost.placement.place_groups`)."""

import math

import numpy as np

from rayfcp.cost.compiled import compiled, inner, inner_with_arrays
from rayfcp.cost.kernels.loops import argmax
from rayfcp.plan.groups.kernels.price import PINNED, Load, Prices, _paced, _pass_s, _price, _within
from rayfcp.plan.groups.kernels.state import (
    GROUPS,
    MICROBATCHES,
    MOVES,
    SearchProblem,
    _load_of,
    _reprice,
    _span_s,
    _sum_s,
)
from rayfcp.values.arrays import Floats, Ints


@inner
def _allocate(problem: SearchProblem, microbatch: int, first: int) -> float:
    """Give ranks to the slowest group until none is left or helps; returns the makespan at the pace that then fits.

    Exact, whatever T does with the degree: to get below the makespan the slowest group must have the next
    degree at which it is faster, and no group ever has more ranks than the least makespan asks of it.
    """
    state, prices = problem.state, problem.prices
    _shrink(problem, microbatch, first)
    while True:
        slowest = -1
        for group in range(first, state.counts[GROUPS]):
            if state.home[group] == microbatch and (slowest < 0 or state.seconds[group] > state.seconds[slowest]):
                slowest = group
        if slowest < 0:
            return 0.0
        degree, span_kind = state.degree[slowest], state.span_kind[slowest]
        faster = 0
        most = degree + state.spare[microbatch] if span_kind < PINNED else degree
        for more in range(degree + 1, most + 1):
            seconds = _price(prices, _load_of(state, slowest), more, span_kind, state.pace[microbatch])
            if seconds < state.seconds[slowest]:
                faster = more
                state.seconds[slowest] = seconds
                break
        if faster == 0:
            return _keep_pace(problem, microbatch, first)
        state.spare[microbatch] -= faster - degree
        state.degree[slowest] = faster


@inner
def _shrink(problem: SearchProblem, microbatch: int, first: int) -> None:
    """The least degree of each group that memory and the present makespan permit."""
    state, prices = problem.state, problem.prices
    span_s = _span_s(problem, microbatch, first)
    for group in range(first, state.counts[GROUPS]):
        if state.home[group] != microbatch or state.span_kind[group] >= PINNED:
            continue
        load = _load_of(state, group)
        for degree in range(max(math.ceil(load.tokens / prices.max_tokens), 1), state.degree[group]):
            seconds = _price(prices, load, degree, state.span_kind[group], state.pace[microbatch])
            if seconds <= span_s:
                state.spare[microbatch] += state.degree[group] - degree
                state.degree[group] = degree
                state.seconds[group] = seconds
                break


@inner
def _keep_pace(problem: SearchProblem, microbatch: int, first: int) -> float:
    """Price the groups at the pace of the slowest forward and the slowest backward; returns the makespan."""
    state, prices = problem.state, problem.prices
    forward_s = backward_s = 0.0
    for group in range(first, state.counts[GROUPS]):
        if state.home[group] == microbatch and (state.span_kind[group] < PINNED or state.tokens[group] > 0.0):
            load, degree, span_kind = _load_of(state, group), state.degree[group], state.span_kind[group]
            best = _fastest(prices, load, degree, span_kind, state.pace[microbatch])
            forward_s = max(forward_s, _pass_s(prices, load, degree, span_kind, best, 0))
            backward_s = max(backward_s, _pass_s(prices, load, degree, span_kind, best, 1))
    state.pace[microbatch] = _within(forward_s, forward_s + backward_s)
    for group in range(first, state.counts[GROUPS]):
        if state.home[group] == microbatch:
            _reprice(problem, group)
    return _span_s(problem, microbatch, first)


@compiled
def primitives_of(problem: SearchProblem) -> Ints:
    """The fastest primitive of each group at its microbatch's pace, the first among equals."""
    state = problem.state
    found = np.zeros(state.counts[GROUPS], np.int64)
    for group in range(len(found)):
        if state.home[group] >= 0:
            found[group] = _fastest(
                problem.prices,
                _load_of(state, group),
                state.degree[group],
                state.span_kind[group],
                state.pace[state.home[group]],
            )
    return found


@inner
def _fastest(prices: Prices, load: Load, degree: int, span_kind: int, pace: float) -> int:
    best, least_s = 0, math.inf
    for primitive in range(prices.num_primitives):
        if load.tokens > prices.room[primitive * prices.num_degrees + degree]:
            continue
        forward_s = _pass_s(prices, load, degree, span_kind, primitive, 0)
        backward_s = _pass_s(prices, load, degree, span_kind, primitive, 1)
        seconds = _paced(prices, forward_s, backward_s, pace)
        if seconds < least_s:
            best, least_s = primitive, seconds
    return best


@inner_with_arrays
def place(problem: SearchProblem) -> float:
    """Mark the groups that span nodes, and price them so; returns the seconds of the batch."""
    spans = np.zeros(problem.state.counts[MICROBATCHES])
    _place_all_groups(problem, spans)
    return _sum_s(problem, spans)


@inner_with_arrays
def _place_all_groups(problem: SearchProblem, spans: Floats) -> None:
    for microbatch in range(problem.state.counts[MICROBATCHES]):
        spans[microbatch] = _place_groups(problem, microbatch)


@inner_with_arrays
def _place_groups(problem: SearchProblem, microbatch: int) -> float:
    """Mark the groups of a microbatch that span nodes; returns its makespan with them priced so.

    The larger and slower go first, each into the node with the least room that holds it, else over the emptiest ones;
    those larger than all nodes go last. Groups of one rank always find room.
    """
    state = problem.state
    groups, count = np.empty(problem.prices.num_ranks, np.int64), 0
    state.pace[microbatch] = 0.0
    for group in range(state.counts[GROUPS]):
        if state.home[group] != microbatch:
            continue
        if state.span_kind[group] < PINNED:
            state.span_kind[group] = 0
            if state.degree[group] > 1:
                groups[count] = group
                count += 1
        _reprice(problem, group)
    _sort(problem, groups[:count])
    left, largest = problem.nodes.copy(), problem.nodes[argmax(problem.nodes)]
    for turn in range(2):
        for group in groups[:count]:
            if (state.degree[group] > largest) == (turn == 1):
                _place_group(problem, group, left)
    state.counts[MOVES] += 1 + count * len(left) // 4
    return _keep_pace(problem, microbatch, 0)


@inner
def _sort(problem: SearchProblem, groups: Ints) -> None:
    """By ranks, then by seconds, most first; stable, and quick for few."""
    degree, seconds = problem.state.degree, problem.state.seconds
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
def _place_group(problem: SearchProblem, group: int, left: Ints) -> None:
    degree, best = problem.state.degree[group], -1
    for node in range(len(left)):
        if left[node] >= degree and (best < 0 or left[node] < left[best]):
            best = node
    if best >= 0:
        left[best] -= degree
        return
    problem.state.span_kind[group] = 1
    while degree > 0:
        emptiest = 0
        for node in range(len(left)):
            if left[node] > left[emptiest]:
                emptiest = node
        taken = min(degree, left[emptiest])
        left[emptiest] -= taken
        degree -= taken
