"""Equal tokens and equal pairs for every rank, with the fewest cuts; and blocks of one size to ranks.

Any two slices of equal width of a causal sequence that mirror each other, [a, a + w) and [L - a - w, L - a), hold
w (L + 1) pairs: a sequence can be shared in any proportion, and its density is the same in each share. Laid end to
end, densest first, a rank takes one interval from the dense end and one from the sparse end. As the first grows at the
cost of the second, its pairs grow without a jump from the least to the most that as many tokens can have, between which
lies the mean: so there is a cut that gives it its mean of both. What is left has the same means, and the next rank goes
on from there. Each rank cuts at most two sequences. Ranks of unequal speeds have parts of both in proportion: what a
rank takes has the mean density still.

Blocks of one size go to ranks by Algorithm 1 of FCP with blocks (Zhao et al., appendix A.1).
"""

import math
from typing import NamedTuple

import numpy as np

from rayfcp.cost.compiled import compiled, inner
from rayfcp.cost.kernels.loops import first_at_least
from rayfcp.values.arrays import Floats, Ints


class Line(NamedTuple):
    """Sequences laid end to end: start of each and the end of all, the pairs before it, its pairs per token."""

    tokens: Ints
    pairs: Floats
    density: Floats


class Sweep(NamedTuple):
    """How ranks take shares: at most `max_tokens`; parts of a sequence under `least_tokens`, and any of one of at
    most `whole_tokens`, are avoided where that moves a rank's tokens and pairs by at most `tolerance` of what is due.
    `weights`: what is due to each rank over the mean, as many tokens as pairs."""

    max_tokens: int
    whole_tokens: int
    least_tokens: int
    tolerance: float
    weights: Floats


class _Step(NamedTuple):
    """One rank: ends of what is left, how many ranks are left, tokens and pairs that are due to it."""

    begin: int
    end: int
    ranks: int
    due_tokens: int
    due_pairs: float


@compiled
def sweep(line: Line, how: Sweep) -> Ints:
    """`bounds[r]` to `bounds[r + 1]` and `bounds[2 N - 1 - r]` to `bounds[2 N - r]` are the tokens of rank r of N on
    the line, which comes densest first. N x `max_tokens` is at least all tokens."""
    num_ranks = len(how.weights)
    bounds = np.zeros(2 * num_ranks + 1, np.int64)
    bounds[-1] = line.tokens[-1]
    for rank in range(num_ranks):
        begin, end, ranks = bounds[rank], bounds[2 * num_ranks - rank], num_ranks - rank
        parts = how.weights[rank:].sum() / how.weights[rank]  # one of so many is due
        due = min(math.ceil((end - begin) / parts), how.max_tokens)
        due = max(due, end - begin - (ranks - 1) * how.max_tokens)
        step = _Step(begin, end, ranks, due, (_pairs(line, end) - _pairs(line, begin)) / parts)
        low, high = 0, due
        while low < high:
            middle = (low + high) // 2
            if _taken(line, step, middle) >= step.due_pairs:
                high = middle
            else:
                low = middle + 1
        first, last = begin + low, end - (due - low)
        near = _snapped(line, step, first, how)
        if near <= last and _fits(step, near, last, how):
            first = near
        near = _snapped(line, step, last, how)
        if near >= first and _fits(step, first, near, how):
            last = near
        bounds[rank + 1], bounds[2 * num_ranks - 1 - rank] = first, last
    return bounds


@inner
def _at(line: Line, token: int) -> int:
    return min(first_at_least(line.tokens, len(line.tokens), token + 1), len(line.density)) - 1


@inner
def _pairs(line: Line, token: int) -> float:
    """Pairs of all tokens before."""
    at = _at(line, token)
    return float(line.pairs[at] + (token - line.tokens[at]) * line.density[at])


@inner
def _taken(line: Line, step: _Step, tokens: int) -> float:
    """Pairs of that many tokens from the dense end, the rest of what is due from the sparse end."""
    dense = _pairs(line, step.begin + tokens) - _pairs(line, step.begin)
    return dense + _pairs(line, step.end) - _pairs(line, step.end - (step.due_tokens - tokens))


@inner
def _snapped(line: Line, step: _Step, cut: int, how: Sweep) -> int:
    """A cut nearby that leaves no sliver and no short sequence in two, within the tolerance; else the cut."""
    if cut <= step.begin or cut >= step.end:
        return cut
    at = _at(line, cut)
    below, above = max(line.tokens[at], step.begin), min(line.tokens[at + 1], step.end)
    if cut in (below, above):
        return cut
    short = line.tokens[at + 1] - line.tokens[at] <= how.whole_tokens
    if not short and cut - below >= how.least_tokens and above - cut >= how.least_tokens:
        return cut
    near = below if cut - below <= above - cut else above
    moved = abs(near - cut)
    pairs = moved * line.density[at]
    if moved <= how.tolerance * step.due_tokens and pairs <= how.tolerance * step.due_pairs:
        return int(near)
    other = below + above - near
    if short and abs(other - cut) * max(line.density[at] / step.due_pairs, 1.0 / step.due_tokens) <= how.tolerance:
        return int(other)
    return cut


@inner
def _fits(step: _Step, first: int, last: int, how: Sweep) -> bool:
    """This rank and those to come stay within memory."""
    taken = first - step.begin + step.end - last
    return taken <= how.max_tokens and (last - first) <= (step.ranks - 1) * how.max_tokens


class Items(NamedTuple):
    """Blocks, or pairs of them, that go to a rank as one: tokens, and tokens and pairs over a rank's mean."""

    tokens: Ints
    memory: Floats
    compute: Floats


class Rule(NamedTuple):
    """`alpha` weighs memory, `beta` compute; a rank takes at most `max_tokens`, which is M (1 + delta). `weights`:
    what is due to each rank over the mean, of which its loads are shares."""

    alpha: float
    beta: float
    max_tokens: int
    weights: Floats


@compiled
def longest_first(items: Items, rule: Rule) -> Ints:
    """Each item, the largest first, to the rank whose larger weighted share stays least (line 5); an empty array if
    one fits on no rank.

    Largest is by max(m / mean, c / mean) (line 2), ties by position.
    """
    order = np.argsort(-np.maximum(items.memory, items.compute), kind="mergesort")
    num_ranks = len(rule.weights)
    tokens = np.zeros(num_ranks, np.int64)
    memory, compute = np.zeros(num_ranks), np.zeros(num_ranks)
    rank_of = np.full(len(order), -1)
    for item in order:
        best, least = -1, np.inf
        for rank in range(num_ranks):
            load = max(
                rule.alpha * (memory[rank] + items.memory[item]), rule.beta * (compute[rank] + items.compute[item])
            )
            load /= rule.weights[rank]
            if load < least and tokens[rank] + items.tokens[item] <= rule.max_tokens:
                best, least = rank, load
        if best < 0:
            return np.zeros(0, np.int64)
        rank_of[item] = best
        tokens[best] += items.tokens[item]
        memory[best] += items.memory[item]
        compute[best] += items.compute[item]
    return rank_of
