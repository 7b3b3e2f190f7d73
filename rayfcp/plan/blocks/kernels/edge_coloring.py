"""Rounds of transfers: a proper edge coloring of a bipartite multigraph in exactly maximum-degree many colors.

Koenig (1916): an edge between u and v takes a color that both ends have free. If they have none in common, u has
a free and v has b; the path from v whose edges alternate between a and b cannot end at u, for it would arrive there by
an edge of color a. Swapping both colors along it frees a at v. Both ends always have a free color, as no more
edges than the maximum degree meet at either. O(E) times the length of such a path, which is short in practice.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rayfcp.cost.compiled import compiled, inner
from rayfcp.cost.kernels.loops import argmax
from rayfcp.values.arrays import Ints

Words = npt.NDArray[np.uint64]
_BITS = 64


class Graph(NamedTuple):
    """Edge e goes from rank `source[e]` to rank `target[e]`."""

    source: Ints
    target: Ints
    num_ranks: int


class Preferences(NamedTuple):
    """Edges in the order in which they choose, and the color that each prefers, in [0, maximum degree)."""

    order: Ints
    wanted: Ints


class _Coloring(NamedTuple):
    """`edge[side, rank, color]`, -1 where free; a set bit of `free[side, rank, word]` is a free color."""

    edge: npt.NDArray[np.int64]
    free: npt.NDArray[np.uint64]
    color: Ints
    path: Ints


@compiled
def max_degree(graph: Graph) -> int:
    """The most edges that one rank sends or receives."""
    sent, received = np.zeros(graph.num_ranks, np.int64), np.zeros(graph.num_ranks, np.int64)
    for edge in range(len(graph.source)):
        sent[graph.source[edge]] += 1
        received[graph.target[edge]] += 1
    return int(max(sent[argmax(sent)], received[argmax(received)]))


@compiled
def edge_coloring(graph: Graph, preferences: Preferences) -> Ints:
    """The color of each edge, in [0, maximum degree); no two edges of one color share a source or a target.

    Each edge gets the free color that is nearest to the one it prefers; swaps for later edges may change it.
    """
    count = max_degree(graph)
    words = -(-count // _BITS)
    free = np.zeros((2, graph.num_ranks, words), np.uint64)
    for color in range(count):
        for rank in range(graph.num_ranks):
            for side in range(2):
                free[side, rank, color // _BITS] |= np.uint64(1) << np.uint64(color % _BITS)
    state = _Coloring(
        np.full((2, graph.num_ranks, count), -1),
        free,
        np.full(len(graph.source), -1),
        np.zeros(2 * graph.num_ranks + 1, np.int64),
    )
    wanted = preferences.wanted
    for edge in preferences.order:
        source, target = graph.source[edge], graph.target[edge]
        color = _nearest(state.free[0, source] & state.free[1, target], wanted[edge])
        if color < 0:
            color = _nearest(state.free[0, source], wanted[edge])
            _swap(graph, state, target, color, _nearest(state.free[1, target], wanted[edge]))
        _set(graph, state, edge, color)
    return state.color


@inner
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


@inner
def _highest(word: np.uint64) -> int:
    """The highest set bit of a word that has one."""
    bit = 0
    for shift in (32, 16, 8, 4, 2, 1):
        if word >> np.uint64(shift):
            word >>= np.uint64(shift)
            bit += shift
    return bit


@inner
def _swap(graph: Graph, state: _Coloring, target: int, first: int, second: int) -> None:
    """Swap both colors along the path that leaves `target` by an edge of color `first`."""
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


@inner
def _set(graph: Graph, state: _Coloring, edge: int, color: int) -> None:
    bit = np.uint64(1) << np.uint64(color % _BITS)
    source, target = graph.source[edge], graph.target[edge]
    state.color[edge] = color
    state.edge[0, source, color] = edge
    state.edge[1, target, color] = edge
    state.free[0, source, color // _BITS] &= ~bit
    state.free[1, target, color // _BITS] &= ~bit


@inner
def _clear(graph: Graph, state: _Coloring, edge: int) -> None:
    color = state.color[edge]
    bit = np.uint64(1) << np.uint64(color % _BITS)
    source, target = graph.source[edge], graph.target[edge]
    state.edge[0, source, color] = -1
    state.edge[1, target, color] = -1
    state.free[0, source, color // _BITS] |= bit
    state.free[1, target, color // _BITS] |= bit
