"""Congestion-free rounds: matchings, exactly as many as the busiest rank has transfers."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.plan.blocks.kernels.edge_coloring import Graph, Preferences, edge_coloring, max_degree
from tests.examples import examples

Edge = tuple[int, int]


def graph_of(edges: Sequence[Edge], *, num_ranks: int) -> Graph:
    ends = np.array(edges, np.int64).reshape(-1, 2)
    return Graph(ends[:, 0].copy(), ends[:, 1].copy(), num_ranks)


def edges_of(num_ranks: int) -> st.SearchStrategy[list[Edge]]:
    one = st.tuples(st.integers(0, num_ranks - 1), st.integers(0, num_ranks - 1)).filter(
        lambda pair: pair[0] != pair[1]
    )
    return st.lists(one, min_size=1, max_size=150)


@examples(200)
@given(st.integers(2, 9).flatmap(lambda n: st.tuples(st.just(n), edges_of(n))), st.randoms(use_true_random=False))
def test_every_round_is_a_matching_and_there_are_as_many_as_the_degree(
    case: tuple[int, list[Edge]], random: st.DrawFn
) -> None:
    num_ranks, edges = case
    graph = graph_of(edges, num_ranks=num_ranks)
    sent, received = (np.bincount(np.array(edges)[:, side], minlength=num_ranks) for side in (0, 1))
    degree = max(sent.max(), received.max())
    assert max_degree(graph) == degree
    order = np.array(random.sample(range(len(edges)), len(edges)))
    wanted = np.array([random.randrange(degree) for _ in edges])
    color = edge_coloring(graph, Preferences(order, wanted))
    assert set(color.tolist()) == set(range(degree))
    for side in (0, 1):
        at = {(edge[side], each) for edge, each in zip(edges, color.tolist(), strict=True)}
        assert len(at) == len(edges)


def fewest_matchings(edges: list[Edge]) -> int:
    """Fewest rounds, found by trying all ways to remove one matching, largest first."""
    if not edges:
        return 0
    best = len(edges)
    first, rest = edges[0], list(range(1, len(edges)))
    for size in range(len(rest), -1, -1):
        for chosen in combinations(rest, size):
            taken = [first, *(edges[at] for at in chosen)]
            if len({a for a, _ in taken}) == len(taken) == len({b for _, b in taken}):
                left = [edge for at, edge in enumerate(edges[1:], start=1) if at not in chosen]
                best = min(best, 1 + fewest_matchings(left))
    return best


@examples(60)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=6))
def test_no_fewer_rounds_are_possible(edges: list[Edge]) -> None:
    graph = graph_of(edges, num_ranks=3)
    color = edge_coloring(graph, Preferences(np.arange(len(edges)), np.zeros(len(edges), np.int64)))
    assert int(color.max()) + 1 == fewest_matchings(edges)


@given(st.permutations(range(100)))
def test_preferences_are_met_where_rounds_are_free(wanted: list[int]) -> None:
    """One pair of ranks, a hundred transfers, each with a round of its own."""
    graph = graph_of([(0, 1)] * 100, num_ranks=2)
    assert edge_coloring(graph, Preferences(np.arange(100), np.array(wanted))).tolist() == wanted


def test_the_nearest_free_round_is_taken() -> None:
    graph = graph_of([(0, 1)] * 70, num_ranks=2)
    wanted = np.full(70, 66)
    color = edge_coloring(graph, Preferences(np.arange(70), wanted))
    assert color[:7].tolist() == [66, 67, 65, 68, 64, 69, 63]
    assert sorted(color.tolist()) == list(range(70))
