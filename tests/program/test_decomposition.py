"""Decomposition of what queries of a window see of a piece of keys, against the pairs one by one."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.program.instructions import CAUSAL, FLIPPED, WHOLE
from rayfcp.program.windows import Pieces, decomposed
from rayfcp.values import LayerKind
from tests.masks import sees

Pair = tuple[int, int, int, int, int, int]
"""Query start, stop and row; key start, stop and row."""


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    query, key = draw(st.integers(0, 15)), draw(st.integers(0, 15))
    queries, keys = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    rows = draw(st.tuples(st.integers(0, 9), st.integers(0, 9)))
    return query, query + queries, rows[0], key, key + keys, rows[1]


SIZES = st.integers(1, 20)
KINDS = st.builds(LayerKind, window=SIZES) | st.builds(LayerKind, chunk=SIZES)


def pairs_of(part: list[int]) -> list[tuple[int, int]]:
    start, stop, low, high, kind, _ = part
    assert kind == WHOLE or stop - start == high - low
    offsets = [(row, key) for row in range(stop - start) for key in range(high - low)]
    wanted = {WHOLE: lambda _row, _key: True, CAUSAL: lambda row, key: key <= row, FLIPPED: lambda row, key: key >= row}
    return [(start + row, low + key) for row, key in offsets if wanted[kind](row, key)]


def pieces(columns: np.ndarray) -> Pieces:
    return Pieces(np.zeros(len(columns[0]), np.int64), *columns)


@given(st.lists(pairs(), max_size=4), KINDS)
def test_each_visible_pair_is_in_one_part(found: list[Pair], kind: LayerKind) -> None:
    columns = np.array(found, np.int64).reshape(-1, 6).T
    parts = decomposed(pieces(columns[[0, 1, 2]]), pieces(columns[[3, 4, 5]]), kind=kind).tolist()

    assert all(part[0] < part[1] and part[2] < part[3] for part in parts)
    for number, (start, stop, row, low, high, key_row) in enumerate(found):
        computed = Counter(pair for part in parts if part[5] == number for pair in pairs_of(part))
        due = Counter(
            (query - start + row, key - low + key_row)
            for query in range(start, stop)
            for key in range(low, high)
            if sees(query, key, window=kind.window, chunk=kind.chunk)
        )
        assert computed == due


@pytest.mark.parametrize(("length", "window", "parts"), [(8, 8, 1), (8, 20, 1), (8, 2, 7), (64, 16, 7)])
def test_a_window_over_a_sequence_takes_two_squares_for_each_run_of_as_many_rows(
    length: int, window: int, parts: int
) -> None:
    side = pieces(np.array([[0], [length], [0]], np.int64))
    assert len(decomposed(side, side, kind=LayerKind(window=window))) == parts
