"""Rectangles cut by the bands of a mask, as attends that kernels know: rectangles and triangles.

Over the keys of a piece the rows of a band see [low, high), each edge at rest or sliding by a key a row. Where only the
upper edge slides rows see a rectangle and a causal square, where only the lower one does a flipped causal square and
a rectangle; where both do they see a parallelogram, cut into runs of as many rows as a row sees keys: of each the
flipped square of its first keys, and the causal square of those that its later rows see beyond.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rayfcp.program.table import CAUSAL, FLIPPED, WHOLE, Column
from rayfcp.program.tokens import expanded
from rayfcp.values.sequence import POSITIONS


class Side(NamedTuple):
    """Positions `[start, stop)` of a sequence, which lie in a slot from row `begin` on. Columns, one entry a pair."""

    start: Column
    stop: Column
    begin: Column


class Edges(NamedTuple):
    """Rows see keys from `low` to `high`, where an edge `slides` (1) from as many after their own (`Band`). Columns."""

    low: Column
    low_slides: Column
    high: Column
    high_slides: Column


def decomposed(queries: Side, keys: Side, *, edges: Edges) -> Column:
    """What the queries of each pair see of its keys, each (query, key) cell once.

    `[parts, 6]`: query start and stop and key start and stop in rows of their slots, kind as in `Attends`, and the
    number of the pair; squares first, by kind, then query. No part is empty.
    """
    low, slides_from = _low(keys, edges)
    high, slides_until = _high(keys, edges)
    begin = np.where(edges.high_slides == 1, np.maximum(queries.start, low - edges.high + 1), queries.start)
    end = np.where(edges.low_slides == 1, np.minimum(queries.stop, high - edges.low), queries.stop)
    end = np.where(low < high, np.maximum(end, begin), begin)
    first = np.clip(np.minimum(slides_from, slides_until), begin, end)
    second = np.clip(np.maximum(slides_from, slides_until), begin, end)
    both, pair = slides_from < slides_until, np.arange(len(begin))
    return _in_rows(
        (
            *_growing(begin, first, low, edges.high, pair),
            *_sliding(first, np.where(both, second, first), edges, pair),
            _parts(first, np.where(both, first, second), low, high, kind=WHOLE, pair=pair),
            *_shrinking(second, end, edges.low, high, pair),
        ),
        queries=queries,
        keys=keys,
    )


def _low(keys: Side, edges: Edges) -> tuple[Column, Column]:
    """Where the lower edge rests on the keys of a pair, and the row from which it slides over them."""
    slides = edges.low_slides == 1
    rests = np.where(slides, keys.start, np.maximum(keys.start, edges.low))
    return rests, np.where(slides, keys.start - edges.low + 1, POSITIONS)


def _high(keys: Side, edges: Edges) -> tuple[Column, Column]:
    """Where the upper edge rests on the keys of a pair, and the row until which it slides over them."""
    slides = edges.high_slides == 1
    rests = np.where(slides, keys.stop, np.minimum(keys.stop, edges.high))
    return rests, np.where(slides, keys.stop - edges.high + 1, -POSITIONS)


def _growing(start: Column, stop: Column, low: Column, ahead: Column, pair: Column) -> tuple[Column, Column]:
    """Row q sees [low, q + ahead)."""
    last = start + ahead - 1
    return (
        _parts(start, stop, last, last + stop - start, kind=CAUSAL, pair=pair),
        _parts(start, stop, low, last, kind=WHOLE, pair=pair),
    )


def _shrinking(start: Column, stop: Column, behind: Column, high: Column, pair: Column) -> tuple[Column, Column]:
    """Row q sees [q + behind, high)."""
    first = start + behind
    return (
        _parts(start, stop, first, first + stop - start, kind=FLIPPED, pair=pair),
        _parts(start, stop, first + stop - start, high, kind=WHOLE, pair=pair),
    )


def _sliding(start: Column, stop: Column, edges: Edges, pair: Column) -> tuple[Column, Column, Column]:
    """Row q sees [q + low, q + high)."""
    some = np.flatnonzero(start < stop)
    width = (edges.high - edges.low)[some]
    runs = -((start - stop)[some] // width)
    run, step = expanded(runs)
    at, width = some[run], width[run]
    begin = start[at] + step * width
    end = np.minimum(begin + width, stop[at])
    first, rows = begin + edges.low[at], end - begin
    return (
        _parts(begin, end, first, first + rows, kind=FLIPPED, pair=pair[at]),
        _parts(begin, end, first + rows, first + width, kind=WHOLE, pair=pair[at]),
        _parts(begin + 1, end, first + width, first + width + rows - 1, kind=CAUSAL, pair=pair[at]),
    )


def _parts(start: Column, stop: Column, low: Column, high: Column, *, kind: int, pair: Column) -> Column:
    return np.stack((start, stop, low, high, np.full(len(start), kind), pair), axis=1)


def _in_rows(parts: Sequence[Column], *, queries: Side, keys: Side) -> Column:
    """Positions as rows of slots, squares first, by kind, then query; nothing empty."""
    table = np.concatenate(parts)
    table = table[(table[:, 0] < table[:, 1]) & (table[:, 2] < table[:, 3])]
    pair = table[:, 5]
    table[:, :2] += (queries.begin - queries.start)[pair, None]
    table[:, 2:4] += (keys.begin - keys.start)[pair, None]
    return table[np.lexsort((table[:, 2], table[:, 0], table[:, 4], table[:, 4] == WHOLE))]
