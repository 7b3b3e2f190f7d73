"""Exact degrees of the groups of a microbatch, and their cost where they lie (`rayfcp.cost.placement.place_groups`)."""

import math

import numpy as np

from rayfcp.cost.compiled import compiled, inner, inner_with_arrays
from rayfcp.cost.kernels.loops import argmax
from rayfcp.cost.uplinks import IN_STEP
from rayfcp.plan.groups.kernels.price import (
    PINNED,
    Load,
    Prices,
    _head_s,
    _paced,
    _pass_s,
    _price,
    _queued_pass_s,
    _within,
)
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


@inner
def _record(problem: SearchProblem, group: int) -> int:
    """The first record of `Prices.terms` of a group by its fastest primitive."""
    state, prices = problem.state, problem.prices
    degree, span_kind = state.degree[group], state.span_kind[group]
    primitive = _fastest(prices, _load_of(state, group), degree, span_kind, state.pace[state.home[group]])
    return int(((span_kind * prices.num_primitives + primitive) * prices.num_degrees + degree) * 2)


@inner
def _fill_uplinks(problem: SearchProblem, group: int, held: Ints, fill: Floats) -> float:
    """Seconds in which the group's messages fill the uplink of each node; returns those that they take alone."""
    prices, record = problem.prices, _record(problem, group)
    forward, backward = prices.terms[record], prices.terms[record + 1]
    moved_s = (forward.moved_s_per_token + backward.moved_s_per_token) * problem.state.tokens[group]
    ring = _is_ring(problem, group)
    for node in range(len(held)):
        if held[node] > 0:
            fill[node] = moved_s * (prices.fills[0] if ring else prices.fills[1] * held[node])
    return float(moved_s)


@inner
def _through_s(fill: Floats, at: int) -> float:
    """Seconds after which the messages of a group are through all uplinks, which groups share (`queued_tokens`)."""
    longest_s = 0.0
    for node in range(fill.shape[1]):
        if fill[at, node] > 0.0:
            seconds = 0.0
            for other in range(len(fill)):
                wait_s = min(fill[at, node], fill[other, node])
                seconds += wait_s if other == at else IN_STEP * wait_s
            longest_s = max(longest_s, seconds)
    return longest_s


@inner_with_arrays
def _makespan_s(problem: SearchProblem, microbatch: int, groups: Ints, held: Ints) -> float:
    """Seconds of a microbatch (`CostModel.makespan_s`) whose groups queue for the uplinks of their nodes
    (`rayfcp.cost.uplinks`); `held[at]`: ranks of group `groups[at]` in each node, none where there are no queues."""
    state, prices = problem.state, problem.prices
    moved_s, fill = np.zeros(len(held)), np.zeros(held.shape)
    for at in range(len(held)):
        if state.span_kind[groups[at]] == 1:
            moved_s[at] = _fill_uplinks(problem, groups[at], held[at], fill[at])
    layers_s = outer_s = backward_s = slowest_s = 0.0
    for group in range(state.counts[GROUPS]):
        if state.home[group] != microbatch or (state.span_kind[group] >= PINNED and state.tokens[group] == 0.0):
            continue
        load, moved, record = _load_of(state, group), state.tokens[group], _record(problem, group)
        for at in range(len(held)):
            if groups[at] == group and moved_s[at] > 0.0:
                moved *= max(_through_s(fill, at) / moved_s[at], 1.0)
        first_s = _queued_pass_s(prices, load, record, moved)
        second_s = _queued_pass_s(prices, load, record + 1, moved)
        head = float(_head_s(prices.terms[record], load.tokens))
        layers_s, outer_s = max(layers_s, first_s - head), max(outer_s, head)
        backward_s, slowest_s = max(backward_s, second_s), max(slowest_s, first_s + second_s)
    busiest_s = 0.0
    for node in range(len(problem.nodes) if np.count_nonzero(moved_s) > 1 else 0):
        busiest_s = max(busiest_s, fill[:, node].sum())
    filled_s = prices.fills[2] + busiest_s + outer_s if busiest_s > 0.0 else 0.0
    ahead_s = max(prices.ahead * backward_s - prices.ahead_s, 0.0)
    return max(slowest_s, filled_s, layers_s + outer_s + backward_s - ahead_s)


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
    those larger than all nodes go last, but for groups that share out heads and fill nodes. Groups of one rank always
    find room.
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
    queues = problem.prices.fills[0] > 0.0
    held = np.zeros((count if queues else 0, len(left)), np.int64)
    for turn in range(2):
        for at in range(count):
            if _goes_last(problem, groups[at], largest) == (turn == 1):
                if queues:
                    held[at] = left
                _place_group(problem, groups[at], left)
                if queues:
                    held[at] -= left
    state.counts[MOVES] += 1 + count * len(left) // 4
    seconds = _keep_pace(problem, microbatch, 0)
    return max(seconds, _makespan_s(problem, microbatch, groups[:count], held)) if seconds < np.inf else seconds


@inner
def _goes_last(problem: SearchProblem, group: int, largest: int) -> bool:
    degree = problem.state.degree[group]
    if degree <= largest:
        return False
    return degree % largest != 0 or _is_ring(problem, group)


@inner
def _is_ring(problem: SearchProblem, group: int) -> bool:
    """Gradients come home by a last hop."""
    return bool(problem.prices.terms[_record(problem, group) + 1].tail_s_per_token > 0.0)


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
