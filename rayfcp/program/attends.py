"""Rectangles cut by the bands of a mask, as attends that kernels know: rectangles and triangles.

Over the keys of a piece the rows of a band see [low, high), each edge at rest or sliding by a key a row. Where only the
upper edge slides rows see a rectangle and a causal square, where only the lower one does a flipped causal square and
a rectangle; where both do they see a parallelogram, cut into runs of as many rows as a row sees keys: of each the
flipped square of its first keys, and the causal square of those that its later rows see beyond.

Which query ranges attend to which key ranges, in as few and as large ranges as possible.

Attends come by run of keys, then by query, so that those of one slot and mask are few series of ascending
queries: one call of a kernel each.

Which queries attend to which keys where rows see bands of keys: layers with a window, and mutual pictures.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from rayfcp.program.columns import CAUSAL, FLIPPED, WHOLE, Attends, Column, Placed, expanded, firsts, merged
from rayfcp.program.instructions import Range
from rayfcp.values import Band
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


class Attending(Protocol):
    """A rank's own queries, and what they attend to."""

    def within(self) -> Attends: ...
    def to(self, held: Placed, *, slot: int) -> Attends: ...
    def to_each(self, slots: Iterable[tuple[int, Placed]], *, first: Attends | None) -> Attends: ...


class Queries:
    """A rank's own blocks as queries of masks without windows, in the order of slot 0. `reach` is beyond the keys that
    a block may see, as sequence x POSITIONS + position."""

    __slots__ = ("_runs", "begin", "end", "own", "reach", "sequence")

    def __init__(self, own: Placed) -> None:
        order = np.argsort(own.begin, kind="stable")
        self.own = own
        self.begin, self.end, self.sequence = own.begin[order], own.end[order], own.sequence[order]
        visible = np.where(own.full, POSITIONS - 1, own.start)[order]
        self.reach = self.sequence * POSITIONS + visible
        self._runs: dict[int, tuple[int, list[Range]]] = {}

    def within(self) -> Attends:
        """Attends to own keys."""
        return _within(self.own)

    def to(self, held: Placed, *, slot: int) -> Attends:
        """Attends to the keys that another rank's blocks brought into a slot.

        Blocks of a sequence are disjoint, so under a causal mask a query block attends to a key block wholly
        (key before query) or not at all. Neighbouring queries with the same keys join.
        """
        last = np.searchsorted(held.sequence * POSITIONS + held.stop, self.reach, side="right") - 1
        some = np.flatnonzero((last >= 0) & (held.sequence[last] == self.sequence)) if len(held.blocks) else last[:0]
        last = last[some]
        first_run, last_run = held.run[held.first[last]], held.run[last]
        at, step = _expanded(last_run - first_run + 1)
        run = first_run[at] + step
        query, begin = some[at], held.opens[run]
        end = np.where(run == last_run[at], held.end[last][at], held.closes[run])
        return _joined(_table(self.begin[query], self.end[query], slot, begin, end))

    def to_each(self, slots: Iterable[tuple[int, Placed]], *, first: Attends | None) -> Attends:
        """`first`, then attends to the keys of each of these slots (number, blocks)."""
        tables = [] if first is None else [first.columns]
        rows: list[tuple[int, ...]] = []
        for number, held in slots:
            if not held.blocks:
                continue
            runs = self._seeing_all_of(held)
            if runs is not None:
                rows += [(begin, end, number, 0, held.num_tokens, 0) for begin, end in runs]
                continue
            if rows:
                tables.append(np.array(rows, np.int64))
                rows = []
            tables.append(self.to(held, slot=number).columns)
        if rows:
            tables.append(np.array(rows, np.int64))
        return joined_tables(tables)

    def _seeing_all_of(self, held: Placed) -> list[Range] | None:
        """Where the queries lie that see every key of a slot, ranges that touch as one, if no others see any of it and
        one look is enough to tell: each context is such a slot."""
        only = held.only_run
        if only is None:
            return None
        sequence, stop = only
        if not self._runs:
            self._runs = self._runs_by_sequence()
        start, runs = self._runs.get(sequence, (stop, []))
        return runs if start >= stop else None

    def _runs_by_sequence(self) -> dict[int, tuple[int, list[Range]]]:
        """Of each sequence the first position that is here, and where it lies."""
        found: dict[int, tuple[int, list[Range]]] = {}
        own = self.own
        columns = (own.sequence.tolist(), own.start.tolist(), own.begin.tolist(), own.end.tolist())
        for sequence, start, begin, end in zip(*columns, strict=True):
            found.setdefault(sequence, (start, []))[1].append((begin, end))
        return {sequence: (start, list(merged(sorted(runs)))) for sequence, (start, runs) in found.items()}


_NO_ROWS: Column = np.empty((0, 6), np.int64)


def joined_tables(tables: Sequence[Column]) -> Attends:
    """All rows, in order."""
    return Attends(tables[0] if len(tables) == 1 else np.concatenate(tables) if tables else _NO_ROWS)


def _within(own: Placed) -> Attends:
    """Attends of a rank's own queries to its own keys.

    A run is one causal square: within it, earlier in the slot is earlier in the sequence. Below it lie the
    earlier runs of its sequence. Under a full mask every run attends to every run.
    """
    opens, closes = own.opens, own.closes
    heads = np.flatnonzero(np.diff(own.run, prepend=-1))
    full, before = own.full[heads], own.run[heads] - own.run[own.first[heads]]
    later = own.run[_lasts(own)[heads]] - own.run[heads] if len(heads) else before
    square = np.flatnonzero(~full)
    square = square[np.argsort(opens[square])]
    at, step = _expanded(np.where(full, before + later + 1, before))
    key = at - before[at] + step
    squares = _table(opens[square], closes[square], 0, opens[square], closes[square], causal=1)
    pairs = _table(opens[at], closes[at], 0, opens[key], closes[key])
    return Attends(np.concatenate((squares, pairs)))


def _lasts(placed: Placed) -> Column:
    """Of each block, the last of its sequence."""
    return np.searchsorted(placed.sequence, placed.sequence, side="right") - 1


def _expanded(counts: Column) -> tuple[Column, Column]:
    """Item i `counts[i]` times, and the number of each time, all first times first."""
    if counts.max(initial=1) == 1 and counts.min(initial=1) == 1:
        return np.arange(len(counts)), np.zeros(len(counts), np.int64)
    at = np.repeat(np.arange(len(counts)), counts)
    step = np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)
    order = np.argsort(step, kind="stable")
    return at[order], step[order]


def _table(begin: Column, end: Column, slot: int, key_begin: Column, key_end: Column, *, causal: int = 0) -> Column:
    columns = np.empty((len(begin), 6), np.int64)
    columns[:, 0], columns[:, 1], columns[:, 2] = begin, end, slot
    columns[:, 3], columns[:, 4], columns[:, 5] = key_begin, key_end, causal
    return columns


def _joined(columns: Column) -> Attends:
    """Neighbours joined whose queries touch and whose keys are the same."""
    touch = (columns[1:, 0] == columns[:-1, 1]) & (columns[1:, 3:5] == columns[:-1, 3:5]).all(axis=1)
    heads = np.append(True, ~touch)[: len(columns)]
    kept = columns[heads]
    kept[:, 1] = columns[np.append(~touch, True)[: len(columns)], 1]
    return Attends(kept)


class _Pieces:
    """Blocks of a slot whose positions and rows both go on, as one: columns by sequence and start."""

    __slots__ = ("begin", "sequence", "start", "stop")

    def __init__(self, held: Placed) -> None:
        goes_on = (held.sequence[1:] == held.sequence[:-1]) & (held.start[1:] == held.stop[:-1])
        goes_on &= held.begin[1:] == held.end[:-1]
        size = len(held.sequence)
        opens = firsts(goes_on, size=size) == np.arange(size)
        self.sequence, self.start, self.begin = held.sequence[opens], held.start[opens], held.begin[opens]
        self.stop = held.stop[np.append(opens[1:], True)[:size]]

    def part(self, at: Column) -> Side:
        """These pieces, without their sequences."""
        return Side(start=self.start[at], stop=self.stop[at], begin=self.begin[at])


class BandedQueries:
    """A rank's own tokens as queries, each piece cut where a band of its sequence begins or ends; rows may be in
    several bands, or in none.

    Attends come squares first, by kind, then by query, so that those of one slot and kind are few series of ascending
    queries: one call of a kernel each.
    """

    def __init__(self, own: Placed, bands: Mapping[int, Sequence[Band]]) -> None:
        self._own = _Pieces(own)
        table = self._rows({each: _columns(bands[each]) for each in set(self._own.sequence.tolist()) if each in bands})
        piece, start, stop = table[:, 0], table[:, 1], table[:, 2]
        self._all = _Rows(
            sequence=self._own.sequence[piece],
            side=Side(start=start, stop=stop, begin=self._own.begin[piece] + start - self._own.start[piece]),
            edges=Edges(*table[:, 3:].T),
        )
        low, high = self._all.reach()
        self._far = self._all.part(np.flatnonzero((low < self._own.start[piece]) | (high > self._own.stop[piece])))

    def within(self) -> Attends:
        """Attends to own keys."""
        return _attends(self._all, self._own, slot=0)

    def to(self, held: Placed, *, slot: int) -> Attends:
        """Attends to the keys that other blocks brought into a slot."""
        first, last = self._far.meet(held)
        return _attends(self._far, _Pieces(held), slot=slot) if (first < last).any() else joined_tables([])

    def to_each(self, slots: Iterable[tuple[int, Placed]], *, first: Attends | None) -> Attends:
        """`first`, then attends to the keys of each of these slots (number, blocks)."""
        tables = [] if first is None else [first.columns]
        tables += [self.to(held, slot=number).columns for number, held in slots if held.blocks]
        return joined_tables(tables)

    def _rows(self, bands: Mapping[int, Column]) -> Column:
        """`[rows, 7]`: number, start and stop of the parts of pieces, each in one band, and the band's edges."""
        own, found = self._own, [np.empty((0, 7), np.int64)]
        for at, (sequence, start, stop) in enumerate(
            zip(own.sequence.tolist(), own.start.tolist(), own.stop.tolist(), strict=True)
        ):
            if sequence in bands:
                table = bands[sequence]
                here = table[(table[:, 1] < stop) & (table[:, 2] > start)]
                here[:, 0] = at
                here[:, 1:3] = np.clip(here[:, 1:3], start, stop)
                found.append(here)
        return np.concatenate(found)


class _Rows(NamedTuple):
    """Parts of pieces, each in one band."""

    sequence: Column
    side: Side
    edges: Edges

    def part(self, at: Column) -> "_Rows":
        """These of them."""
        side, edges = (tuple(column[at] for column in columns) for columns in (self.side, self.edges))
        return _Rows(self.sequence[at], Side(*side), Edges(*edges))

    def reach(self) -> tuple[Column, Column]:
        """The first key that some row of a part sees, and the one behind the last, as far as there are any."""
        edges, side = self.edges, self.side
        low = edges.low + edges.low_slides * side.start
        return np.maximum(low, 0), np.minimum(edges.high + edges.high_slides * (side.stop - 1), POSITIONS - 1)

    def meet(self, keys: "_Pieces | Placed") -> tuple[Column, Column]:
        """Of each part the first range of keys that it sees some of, and the one behind the last."""
        low, high = self.reach()
        base = self.sequence * POSITIONS
        first = np.searchsorted(keys.sequence * POSITIONS + keys.stop, base + low, side="right")
        return first, np.searchsorted(keys.sequence * POSITIONS + keys.start, base + high)


def _attends(rows: _Rows, keys: _Pieces, *, slot: int) -> Attends:
    first, last = rows.meet(keys)
    query, step = expanded(np.maximum(last - first, 0))
    seeing = rows.part(query)
    parts = decomposed(seeing.side, keys.part(first[query] + step), edges=seeing.edges)
    columns = np.empty((len(parts), 6), np.int64)
    columns[:, :2], columns[:, 2], columns[:, 3:5], columns[:, 5] = parts[:, :2], slot, parts[:, 2:4], parts[:, 4]
    return Attends(columns)


class PictureQueries:
    """A rank's own tokens as queries of masks without windows, and those of `mutual` pictures, which see more than
    that."""

    def __init__(self, own: Placed, mutual: Mapping[int, Sequence[Band]]) -> None:
        self._plain, self._more = Queries(own), BandedQueries(own, mutual)

    def within(self) -> Attends:
        """Attends to own keys."""
        return joined_tables([self._plain.within().columns, self._more.within().columns])

    def to(self, held: Placed, *, slot: int) -> Attends:
        """Attends to the keys that other blocks brought into a slot."""
        return joined_tables([each.to(held, slot=slot).columns for each in (self._plain, self._more)])

    def to_each(self, slots: Iterable[tuple[int, Placed]], *, first: Attends | None) -> Attends:
        """`first`, then attends to the keys of each of these slots (number, blocks)."""
        held = list(slots)
        return self._more.to_each(held, first=self._plain.to_each(held, first=first))


def _columns(bands: Sequence[Band]) -> Column:
    """`[bands, 7]`: 0, first row and the one behind the last, and edges as in `Edges`."""
    rows = [(0, each.start, each.stop, each.low.at, each.low.slides, each.high.at, each.high.slides) for each in bands]
    return np.array(rows, np.int64).reshape(-1, 7)
