"""Keys and values that travel: the edges of the bipartite graph of ranks, and the attention that they bring."""

from typing import NamedTuple

import numpy as np

from rayfcp.cost.compiled import compiled
from rayfcp.cost.kernels.loops import argmax
from rayfcp.values.arrays import Floats, Ints


class Needs(NamedTuple):
    """Block `block` must go from its rank `source` to `target`, where `queries` tokens attend to all of it."""

    source: Ints
    target: Ints
    block: Ints
    queries: Ints


class Messages(NamedTuple):
    """Needs of one sequence, source and target that travel together: `order[first[p]]` to `order[first[p + 1]]` are
    those of message p. `pairs` and `sides` (tokens of the longer side of each attend) are what its target computes with
    it."""

    order: Ints
    first: Ints
    source: Ints
    target: Ints
    tokens: Ints
    pairs: Floats
    sides: Floats


@compiled
def fill_needs(first: Ints, rank: Ints, size: Ints, needs: Needs) -> int:
    """Every block once to each rank that has later queries of its sequence, by sequence, target, block; returns how
    many. `first[s]`: the first block of sequence s; `rank` and `size`: of each block."""
    num_ranks = rank[argmax(rank)] + 1
    held, seen = np.zeros(num_ranks, np.int64), np.full(num_ranks, -1)
    present = np.zeros(num_ranks, np.int64)
    count = 0
    for sequence in range(len(first) - 1):
        number = 0
        for block in range(first[sequence], first[sequence + 1]):
            if seen[rank[block]] != sequence:
                seen[rank[block]], held[rank[block]], present[number] = sequence, 0, rank[block]
                number += 1
            held[rank[block]] += size[block]
        for at in range(number if number > 1 else 0):
            target = present[at]
            queries = held[target]
            for block in range(first[sequence], first[sequence + 1]):
                if rank[block] == target:
                    queries -= size[block]
                elif queries > 0:
                    needs.source[count], needs.target[count] = rank[block], target
                    needs.block[count], needs.queries[count] = block, queries
                    count += 1
    return count


@compiled
def number_messages(needs: Needs, owner: Ints, size: Ints, num_ranks: int, max_tokens: int) -> Ints:
    """The message of each need: needs of one sequence, source and target are joined while a message stays within
    `max_tokens`. `owner` and `size`: of each block."""
    message_of = np.zeros(len(needs.block), np.int64)
    opened, opened_for, tokens = (
        np.zeros(num_ranks, np.int64),
        np.full(num_ranks, -1),
        np.zeros(num_ranks, np.int64),
    )
    count, visit = 0, 0
    for need in range(len(needs.block)):
        source, block = needs.source[need], needs.block[need]
        if need and (needs.target[need] != needs.target[need - 1] or owner[block] != owner[needs.block[need - 1]]):
            visit += 1  # another sequence or target: open messages stay closed
        if opened_for[source] != visit or tokens[source] + size[block] > max_tokens:
            opened_for[source], opened[source], tokens[source] = visit, count, 0
            count += 1
        tokens[source] += size[block]
        message_of[need] = opened[source]
    return message_of
