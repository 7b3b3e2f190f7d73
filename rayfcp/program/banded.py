"""Which queries attend to which keys where rows see bands of keys: layers with a window, and mutual pictures."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rayfcp.program.attends import Queries, joined_tables
from rayfcp.program.bands import Edges, Side, decomposed
from rayfcp.program.placed import Placed, firsts
from rayfcp.program.table import Attends, Column
from rayfcp.program.tokens import expanded
from rayfcp.values import Band
from rayfcp.values.sequence import POSITIONS


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
