"""Seconds of a group, as `CostModel.group_s` has them, for loops over many groups."""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rayfcp.cost.compiled import compiled, inlined, inner
from rayfcp.cost.kernels import group_time
from rayfcp.values.arrays import Floats, Ints

SLACK = 1e-9  # a target that a group meets up to rounding is met
PINNED = 2  # `Load.span_kind` from here on: a pinned group, which always has the same ranks


class Prices(NamedTuple):
    """The cost model of one cluster. `terms` has records of `rayfcp.cost.kernels.group_time.Terms`, [span_kind,
    primitive, degree, pass] in one row; 1 of `span_kind` is a group that spans nodes though it would fit in one,
    `PINNED` and above are pinned groups of some speed. `fixed_s` of both passes; `per_pair`, `per_token`: compute on
    one rank, the least of all primitives; `max_tokens`: tokens per rank; `room`: most tokens of a group by [primitive,
    degree] in one row, where that is less than its ranks hold, infinite elsewhere. `num_ranks`: those that groups share
    out as they like, `num_degrees` in `terms`; `pinned` of every microbatch, beside them: degree and `span_kind` of
    each; `capacity`: ranks that compute as much as all together, `holds`: tokens that these can hold; `ahead`,
    `ahead_s`: as `CostModel` has them; `recurrent`: layers are that pass states or heads; `fills`: those of
    `rayfcp.cost.uplinks.fills_uplink`, and `shards_fill_s`."""

    terms: npt.NDArray[np.void]
    fixed_s: float
    per_pair: float
    per_token: float
    max_tokens: float
    room: Floats
    num_ranks: int
    num_primitives: int
    num_degrees: int
    pinned: Ints
    capacity: float
    holds: float
    ahead: float
    ahead_s: float
    recurrent: bool
    fills: Floats


class Load(NamedTuple):
    """Pairs, tokens and number of the sequences that a group holds."""

    pairs: float
    tokens: float
    sequences: float


@inlined
def _plus(one: Load, other: Load) -> Load:
    return Load(one.pairs + other.pairs, one.tokens + other.tokens, one.sequences + other.sequences)


@inlined
def _minus(one: Load, other: Load) -> Load:
    return Load(one.pairs - other.pairs, one.tokens - other.tokens, one.sequences - other.sequences)


@inlined
def _work_s(prices: Prices, load: Load) -> float:
    """Compute on one rank."""
    return prices.per_pair * load.pairs + prices.per_token * load.tokens


_usual_s = inlined(group_time.pass_s)
_late_s = inlined(group_time.late_s)
_recurrent_s = inlined(group_time.recurrent_s)
_head_s = inlined(group_time.head_s)


@inlined
def _queued_pass_s(prices: Prices, load: Load, at: int, moved_tokens: float) -> float:
    """Seconds of a pass by the record `at` of `Prices.terms`, whose messages take as long as those of `moved_tokens`
    take alone."""
    if prices.recurrent:
        return _beside_s(prices, load, at, moved_tokens)
    return float(_usual_s(prices.terms[at], load.pairs, load.tokens, moved_tokens, 0.0))


@inner
def _beside_s(prices: Prices, load: Load, at: int, moved_tokens: float) -> float:
    """`_queued_pass_s` beside shards, or of recurrent layers."""
    terms = prices.terms[at]
    late_s = _late_s(terms, load.pairs, load.tokens, moved_tokens)
    seconds = _usual_s(terms, load.pairs, load.tokens, moved_tokens, late_s)
    return float(_recurrent_s(terms, seconds, load.tokens, late_s, load.sequences))


@inlined
def _pass_s(prices: Prices, load: Load, degree: int, span_kind: int, primitive: int, each: int) -> float:
    """Seconds of the forward (0) or the backward (1) of a group of so many ranks; `span_kind` is 1 if it spans nodes
    though it would fit in one, or that of a pinned group."""
    at = ((span_kind * prices.num_primitives + primitive) * prices.num_degrees + degree) * 2 + each
    return _queued_pass_s(prices, load, at, load.tokens)


@inlined
def _price(prices: Prices, load: Load, degree: int, span_kind: int, pace: float) -> float:
    """Seconds of a group by its best primitive that has `room`; `max_tokens` is the caller's.

    A microbatch takes its slowest forward and its slowest backward, less what ranks run ahead, but no less than any
    group. With `pace` the share of forward in both, it is the most of its groups' prices; no other pace gives less.
    With 0, what the group takes alone. That layers and head are waited for apart (`CostModel.makespan_s`) counts when
    whole plans are compared (`kernels.ranks.place`): as a share of its own, the head would steer moves as if it bound
    the microbatch, and plans get up to 4 % slower.
    """
    best = math.inf
    for primitive in range(prices.num_primitives):
        if load.tokens > prices.room[primitive * prices.num_degrees + degree]:
            continue
        forward_s = _pass_s(prices, load, degree, span_kind, primitive, 0)
        backward_s = _pass_s(prices, load, degree, span_kind, primitive, 1)
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
def _pace_of(prices: Prices, load: Load) -> float:
    """The share of forward in what a load takes on one rank."""
    forward_s = _pass_s(prices, load, 1, 0, 0, 0)
    return _within(forward_s, forward_s + _pass_s(prices, load, 1, 0, 0, 1))


@inner
def _within(forward_s: float, whole_s: float) -> float:
    """A share that neither pass divides by nothing with."""
    return min(max(forward_s / whole_s, 1e-9), 1.0 - 1e-9) if 0.0 < whole_s < math.inf else 0.5


@inlined
def _least_degree(prices: Prices, load: Load, target_s: float, pace: float) -> int:
    """The fewest ranks that hold the tokens and take at most `target_s`; 0 if there are none."""
    span_s = target_s - prices.fixed_s
    work_s = _work_s(prices, load)
    first = max(math.ceil(load.tokens / prices.max_tokens), 1)
    if work_s > span_s * prices.num_ranks * (1.0 + SLACK):
        return 0
    if work_s > 0.0:
        first = max(first, math.ceil(work_s / span_s - 1e-6))
    for degree in range(first, prices.num_ranks + 1):
        if _price(prices, load, degree, 0, pace) <= target_s:
            return degree
    return 0


@inner
def _best_degree(prices: Prices, load: Load, pace: float) -> int:
    """The fewest ranks that take the least seconds in memory; 0 if all ranks together cannot hold the tokens."""
    best, least_s = 0, math.inf
    for degree in range(max(math.ceil(load.tokens / prices.max_tokens), 1), prices.num_ranks + 1):
        seconds = _price(prices, load, degree, 0, pace)
        if seconds < least_s:
            best, least_s = degree, seconds
    return best


@compiled
def _alone(prices: Prices, tokens: Floats, pairs: Floats, sequences: Floats) -> Floats:
    """Seconds of each sequence, or unit of sequences, alone at its best degree."""
    seconds, last = np.empty(len(tokens)), Load(0.0, 0.0, 0.0)
    for at in range(len(tokens)):
        load = Load(pairs[at], tokens[at], sequences[at])
        if load == last:
            seconds[at] = seconds[at - 1]
        else:
            degree = _best_degree(prices, load, 0.0)
            seconds[at] = _price(prices, load, degree, 0, 0.0) if degree else math.inf
        last = load
    return seconds
