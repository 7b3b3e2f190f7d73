"""Seconds of a group, as `CostModel.group_s` has them, for loops over many groups."""

import math
from typing import NamedTuple

import numpy as np

from rayfcp.cost.compiled import compiled, inlined, inner
from rayfcp.values.arrays import Floats, Ints

COLUMNS = 15
SLACK = 1e-9  # a target that a group meets up to rounding is met
SEAT = 2  # `Load.far` from here on: a seat, a group that always has the same ranks


class Prices(NamedTuple):
    """The cost model of one cluster. `terms` is [far, primitive, degree, pass, column] in one row: attention per cell
    and per token, linear per token, moved per token, moved, tail per token, tail, cover, busy, before per token, first
    per token, steady, edges per token, edges, last per token (`plan.costs.terms.Terms`);
    1 of `far` is a group that spans nodes though it would fit in one, `SEAT` and above are seats of some speed.
    `hidden[primitive]`; `fixed_s` of both passes, `passes_fixed_s[far, pass]` of each in one row; `per_cell`,
    `per_token`: compute on one rank, the least of all primitives; `room`: tokens per rank. `num_ranks`: those that
    groups share out as they like, `num_degrees` in `terms`; `seats` of every microbatch, beside them: degree and `far`
    of each; `capacity`: ranks that compute as much as all together, `holds`: tokens that these have room for;
    `ahead`, `ahead_s`: as `CostModel` has them."""

    terms: Floats
    hidden: Floats
    fixed_s: float
    passes_fixed_s: Floats
    per_cell: float
    per_token: float
    room: float
    num_ranks: int
    num_primitives: int
    num_degrees: int
    seats: Ints
    capacity: float
    holds: float
    ahead: float
    ahead_s: float


class Load(NamedTuple):
    """What a group holds, its ranks, and whether it spans nodes though it would fit in one, or which seat it is."""

    cells: float
    tokens: float
    degree: int
    far: int


@inlined
def _pass_s(prices: Prices, load: Load, primitive: int, each: int) -> float:
    """Seconds of the forward (0) or the backward (1) of a group."""
    terms, tokens = prices.terms, load.tokens
    at = (((load.far * prices.num_primitives + primitive) * prices.num_degrees + load.degree) * 2 + each) * COLUMNS
    attention = terms[at] * load.cells + terms[at + 1] * tokens
    seconds = attention + terms[at + 2] * tokens + prices.passes_fixed_s[2 * load.far + each]
    if load.degree > 1:
        moved = terms[at + 3] * tokens + terms[at + 4]
        left = terms[at + 8] - terms[at + 9] * tokens
        if left > 0.0:
            first = terms[at + 10] * tokens
            moved += min(left, first) + max(min(left - first - attention, terms[at + 14] * tokens), 0.0)
        seconds += moved
        if prices.hidden[primitive] > 0.0:
            tail = terms[at + 5] * tokens + terms[at + 6]
            steady = terms[at + 11] * attention + terms[at + 12] * tokens + terms[at + 13]
            seconds -= prices.hidden[primitive] * min(moved - tail, terms[at + 7] * attention, steady)
    return float(seconds)


@inlined
def _price(prices: Prices, cells: float, tokens: float, degree: int, far: int, pace: float) -> float:
    """Seconds of a group by its best primitive; memory is the caller's.

    A microbatch takes its slowest forward and its slowest backward, less what ranks run ahead, but no less than any
    group (`CostModel.makespan_s`). With `pace` the share of forward in both, it is the most of its groups' prices; no
    other pace gives less. With 0, what the group takes alone.
    """
    load = Load(cells, tokens, degree, far)
    best = math.inf
    for primitive in range(prices.num_primitives):
        forward_s, backward_s = _pass_s(prices, load, primitive, 0), _pass_s(prices, load, primitive, 1)
        best = min(best, _paced(prices, forward_s, backward_s, pace))
    return best


@inlined
def _paced(prices: Prices, forward_s: float, backward_s: float, pace: float) -> float:
    """Seconds of a group that is as slow forward or backward as its microbatch, if its pace is above 0."""
    seconds = forward_s + backward_s
    if pace > 0.0:
        slower_s = forward_s / pace if forward_s * (1.0 - pace) > backward_s * pace else backward_s / (1.0 - pace)
        seconds = max(seconds, slower_s - max(prices.ahead * (1.0 - pace) * slower_s - prices.ahead_s, 0.0))
    return seconds


@inner
def _pace_of(prices: Prices, cells: float, tokens: float) -> float:
    """The share of forward in what so many cells and tokens take on one rank."""
    load = Load(cells, tokens, 1, 0)
    forward_s = _pass_s(prices, load, 0, 0)
    return _within(forward_s, forward_s + _pass_s(prices, load, 0, 1))


@inner
def _within(forward_s: float, whole_s: float) -> float:
    """A share that neither pass divides by nothing with."""
    return min(max(forward_s / whole_s, 1e-9), 1.0 - 1e-9) if 0.0 < whole_s < math.inf else 0.5


@inlined
def _least_degree(prices: Prices, cells: float, tokens: float, target_s: float, pace: float) -> int:
    """The fewest ranks that hold the tokens and take at most `target_s`; 0 if there are none."""
    span_s = target_s - prices.fixed_s
    work_s = prices.per_cell * cells + prices.per_token * tokens
    first = max(math.ceil(tokens / prices.room), 1)
    if work_s > span_s * prices.num_ranks * (1.0 + SLACK):
        return 0
    if work_s > 0.0:
        first = max(first, math.ceil(work_s / span_s - 1e-6))
    for degree in range(first, prices.num_ranks + 1):
        if _price(prices, cells, tokens, degree, 0, pace) <= target_s:
            return degree
    return 0


@inner
def _best_degree(prices: Prices, cells: float, tokens: float, pace: float) -> int:
    """The fewest ranks that take the least seconds in memory; 0 if all ranks together cannot hold the tokens."""
    best, least_s = 0, math.inf
    for degree in range(max(math.ceil(tokens / prices.room), 1), prices.num_ranks + 1):
        seconds = _price(prices, cells, tokens, degree, 0, pace)
        if seconds < least_s:
            best, least_s = degree, seconds
    return best


@compiled
def _alone(prices: Prices, tokens: Floats, cells: Floats) -> Floats:
    """Seconds of each sequence alone at its best degree."""
    seconds = np.empty(len(tokens))
    for at in range(len(tokens)):
        if at > 0 and tokens[at] == tokens[at - 1] and cells[at] == cells[at - 1]:
            seconds[at] = seconds[at - 1]
        else:
            degree = _best_degree(prices, cells[at], tokens[at], 0.0)
            seconds[at] = _price(prices, cells[at], tokens[at], degree, 0, 0.0) if degree else math.inf
    return seconds
