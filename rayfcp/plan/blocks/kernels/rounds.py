"""Rounds of transfers: a proper edge colouring of a bipartite multigraph in exactly maximum-degree many colours.

Koenig (1916): an edge between u and v takes a colour that both ends have free. If they have none in common, u has
a free and v has b; the path from v whose edges alternate between a and b cannot end at u, for it would arrive there by
an edge of colour a. Swapping both colours along it frees a at v. Both ends always have a free colour, as no more
edges than the maximum degree meet at either. O(E) times the length of such a path, which is short in practice.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rayfcp.cost.compiled import compiled
from rayfcp.values.arrays import Ints

Words = npt.NDArray[np.uint64]
_BITS = 64


class Graph(NamedTuple):
    """Edge e goes from rank `source[e]` to rank `target[e]`."""

    source: Ints
    target: Ints
    num_ranks: int


class Wishes(NamedTuple):
    """The edge that chooses first, and so on; the colour that each wants, in [0, maximum degree)."""

    order: Ints
    wanted: Ints


class _State(NamedTuple):
    """`edge[side, rank, colour]`, -1 where free; a set bit of `free[side, rank, word]` is a free colour."""

    edge: npt.NDArray[np.int64]
    free: npt.NDArray[np.uint64]
    colour: Ints
    path: Ints


@compiled
def max_degree(graph: Graph) -> int:
    """The most edges that one rank sends or receives."""
    sent, received = np.zeros(graph.num_ranks, np.int64), np.zeros(graph.num_ranks, np.int64)
    for edge in range(len(graph.source)):
        sent[graph.source[edge]] += 1
        received[graph.target[edge]] += 1
    return int(max(sent.max(), received.max()))


@compiled
def colours_of(graph: Graph, wishes: Wishes) -> Ints:
    """The colour of each edge, in [0, maximum degree); no two edges of one colour share a source or a target.

    Each edge gets the free colour that is nearest to the one it wants; swaps for later edges may take it from there.
    """
    count = max_degree(graph)
    words = -(-count // _BITS)
    free = np.zeros((2, graph.num_ranks, words), np.uint64)
    for colour in range(count):
        free[:, :, colour // _BITS] |= np.uint64(1) << np.uint64(colour % _BITS)
    state = _State(
        np.full((2, graph.num_ranks, count), -1),
        free,
        np.full(len(graph.source), -1),
        np.zeros(2 * graph.num_ranks + 1, np.int64),
    )
    wanted = wishes.wanted
    for edge in wishes.order:
        source, target = graph.source[edge], graph.target[edge]
        colour = _nearest(state.free[0, source] & state.free[1, target], wanted[edge])
        if colour < 0:
            colour = _nearest(state.free[0, source], wanted[edge])
            _swap(graph, state, target, colour, _nearest(state.free[1, target], wanted[edge]))
        _set(graph, state, edge, colour)
    return state.colour


@compiled
def _nearest(words: Words, wanted: int) -> int:
    """The set bit that is nearest to bit `wanted`, the higher of two; -1 if none is set."""
    all_ones = ~np.uint64(0)
    first, bit = wanted // _BITS, np.uint64(wanted % _BITS)
    above, below = -1, -1
    for at in range(first, len(words)):
        word = words[at] & (all_ones << bit) if at == first else words[at]
        if word:
            above = at * _BITS + _highest(word & (~word + np.uint64(1)))
            break
    for at in range(first, -1, -1):
        word = words[at] & (all_ones >> (np.uint64(_BITS - 1) - bit)) if at == first else words[at]
        if word:
            below = at * _BITS + _highest(word)
            break
    if above < 0 or (below >= 0 and wanted - below < above - wanted):
        return below
    return above


@compiled
def _highest(word: np.uint64) -> int:
    """The highest set bit of a word that has one."""
    bit = 0
    for shift in (32, 16, 8, 4, 2, 1):
        if word >> np.uint64(shift):
            word >>= np.uint64(shift)
            bit += shift
    return bit


@compiled
def _swap(graph: Graph, state: _State, target: int, first: int, second: int) -> None:
    """Swap both colours along the path that leaves `target` by an edge of colour `first`."""
    rank, side, wanted, length = target, 1, first, 0
    while state.edge[side, rank, wanted] >= 0:
        edge = state.edge[side, rank, wanted]
        state.path[length] = edge
        length += 1
        rank = graph.target[edge] if side == 0 else graph.source[edge]
        side, wanted = 1 - side, first + second - wanted
    for edge in state.path[:length]:
        _clear(graph, state, edge)
    wanted = second
    for edge in state.path[:length]:
        _set(graph, state, edge, wanted)
        wanted = first + second - wanted


@compiled
def _set(graph: Graph, state: _State, edge: int, colour: int) -> None:
    bit = np.uint64(1) << np.uint64(colour % _BITS)
    source, target = graph.source[edge], graph.target[edge]
    state.colour[edge] = colour
    state.edge[0, source, colour] = edge
    state.edge[1, target, colour] = edge
    state.free[0, source, colour // _BITS] &= ~bit
    state.free[1, target, colour // _BITS] &= ~bit


@compiled
def _clear(graph: Graph, state: _State, edge: int) -> None:
    colour = state.colour[edge]
    bit = np.uint64(1) << np.uint64(colour % _BITS)
    source, target = graph.source[edge], graph.target[edge]
    state.edge[0, source, colour] = -1
    state.edge[1, target, colour] = -1
    state.free[0, source, colour // _BITS] |= bit
    state.free[1, target, colour // _BITS] |= bit
