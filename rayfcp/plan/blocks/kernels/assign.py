"""Blocks of one size to ranks: Algorithm 1 of FCP with blocks (Zhao et al., appendix A.1)."""

from typing import NamedTuple

import numpy as np

from rayfcp.plan.blocks.kernels.table import Floats, Ints
from rayfcp.plan.compiled import compiled


class Items(NamedTuple):
    """What goes to a rank as one: a block, or a pair of them. `memory` and `compute` are its tokens and cells in
    shares of a rank's mean; `owner` is its sequence, the last number that of all which are whole; `reach`:
    tokens of keys and values that must come to its rank."""

    tokens: Ints
    memory: Floats
    compute: Floats
    owner: Ints
    reach: Ints


class Rule(NamedTuple):
    """`alpha` weighs memory, `beta` compute; a rank takes at most `most_tokens`, which is M (1 + delta). `weights`:
    what is due to each rank over the mean, of which its loads are shares."""

    num_ranks: int
    alpha: float
    beta: float
    most_tokens: int
    weights: Floats


@compiled
def longest_first(items: Items, rule: Rule) -> Ints:
    """Each item, the largest first, to the rank whose larger weighted share stays least (line 5); no rank at all
    (an empty array) if one finds no room.

    Largest is by max(m / mean, c / mean) (line 2), ties by position.
    """
    order = np.argsort(-np.maximum(items.memory, items.compute), kind="mergesort")
    tokens = np.zeros(rule.num_ranks, np.int64)
    memory, compute = np.zeros(rule.num_ranks), np.zeros(rule.num_ranks)
    rank_of = np.full(len(order), -1)
    for item in order:
        best, least = -1, np.inf
        for rank in range(rule.num_ranks):
            load = max(
                rule.alpha * (memory[rank] + items.memory[item]), rule.beta * (compute[rank] + items.compute[item])
            )
            load /= rule.weights[rank]
            if load < least and tokens[rank] + items.tokens[item] <= rule.most_tokens:
                best, least = rank, load
        if best < 0:
            return np.zeros(0, np.int64)
        rank_of[item] = best
        tokens[best] += items.tokens[item]
        memory[best] += items.memory[item]
        compute[best] += items.compute[item]
    return rank_of
