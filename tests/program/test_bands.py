"""Decomposition of rectangles cut by bands, against the cells one by one."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.program.attends import Edges, Side, decomposed
from rayfcp.program.columns import CAUSAL, FLIPPED, WHOLE
from rayfcp.values import Band, Edge

Pair = tuple[int, int, int, int, int, int, Band]
"""Query start, stop and row; key start, stop and row; the band of the queries."""


@st.composite
def bands(draw: st.DrawFn) -> Band:
    slides, also = draw(st.booleans()), draw(st.booleans())
    low = draw(st.integers(-9, 20 if not slides else 3))
    at_least = low + 1 if slides and also else -9
    high = Edge(at=draw(st.integers(at_least, max(at_least, 24))), slides=also)
    return Band(start=0, stop=100, low=Edge(at=low, slides=slides), high=high)


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    query, key = draw(st.integers(0, 15)), draw(st.integers(0, 15))
    queries, keys = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    rows = draw(st.tuples(st.integers(0, 9), st.integers(0, 9)))
    return query, query + queries, rows[0], key, key + keys, rows[1], draw(bands())


def cells_of(part: list[int]) -> list[tuple[int, int]]:
    start, stop, low, high, kind, _ = part
    assert kind == WHOLE or stop - start == high - low
    offsets = [(row, key) for row in range(stop - start) for key in range(high - low)]
    wanted = {WHOLE: lambda _row, _key: True, CAUSAL: lambda row, key: key <= row, FLIPPED: lambda row, key: key >= row}
    return [(start + row, low + key) for row, key in offsets if wanted[kind](row, key)]


@given(st.lists(pairs(), max_size=4))
def test_each_visible_cell_is_in_one_part(found: list[Pair]) -> None:
    columns = np.array([each[:6] for each in found], np.int64).reshape(-1, 6).T
    edges = [(each[6].low.at, int(each[6].low.slides), each[6].high.at, int(each[6].high.slides)) for each in found]
    parts = decomposed(
        Side(*columns[[0, 1, 2]]),
        Side(*columns[[3, 4, 5]]),
        edges=Edges(*np.array(edges, np.int64).reshape(-1, 4).T),
    ).tolist()

    assert all(part[0] < part[1] and part[2] < part[3] for part in parts)
    for number, (start, stop, row, low, high, key_row, band) in enumerate(found):
        computed = Counter(cell for part in parts if part[5] == number for cell in cells_of(part))
        due = Counter(
            (query - start + row, key - low + key_row)
            for query in range(start, stop)
            for key in range(low, high)
            if band.low.of(query) <= key < band.high.of(query)
        )
        assert computed == due


@pytest.mark.parametrize(("length", "window", "parts"), [(8, 8, 1), (8, 20, 1), (8, 2, 7), (64, 16, 7)])
def test_a_window_over_a_sequence_takes_two_squares_for_each_run_of_as_many_rows(
    length: int, window: int, parts: int
) -> None:
    side = Side(*np.array([[0], [length], [0]], np.int64))
    edges = Edges(*np.array([[1 - window], [1], [1], [1]], np.int64))
    assert len(decomposed(side, side, edges=edges)) == parts
