"""Which queries attend to which keys where rows see bands of keys: layers with a window."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from rayfcp.program.attends import joined_tables
from rayfcp.program.bands import Edges, Side, decomposed
from rayfcp.program.placed import POSITIONS, Placed, firsts
from rayfcp.program.table import Attends, Column
from rayfcp.program.tokens import expanded
from rayfcp.values import Band


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
    """A rank's own tokens as queries, each piece cut where its sequence's band changes.

    Attends come squares first, by kind, then by query, so that those of one slot and kind are few series of ascending
    queries: one call of a kernel each.
    """

    def __init__(self, own: Placed, bands: Mapping[int, Sequence[Band]]) -> None:
        self._own = _Pieces(own)
        rows = [row for at in range(len(self._own.start)) for row in self._rows(at, bands)]
        table = np.array(rows, np.int64).reshape(-1, 7)
        piece, start, stop = table[:, 0], table[:, 1], table[:, 2]
        self._sequence = self._own.sequence[piece]
        self._rows_of = Side(start=start, stop=stop, begin=self._own.begin[piece] + start - self._own.start[piece])
        self._edges = Edges(*table[:, 3:].T)

    def within(self) -> Attends:
        """Attends to own keys."""
        return self._to(self._own, slot=0)

    def to(self, held: Placed, *, slot: int) -> Attends:
        """Attends to the keys that other blocks brought into a slot."""
        return self._to(_Pieces(held), slot=slot)

    def to_each(self, slots: Iterable[tuple[int, Placed]], *, first: Attends | None) -> Attends:
        """`first`, then attends to the keys of each of these slots (number, blocks)."""
        tables = [] if first is None else [first.columns]
        tables += [self.to(held, slot=number).columns for number, held in slots if held.blocks]
        return joined_tables(tables)

    def _rows(self, at: int, bands: Mapping[int, Sequence[Band]]) -> list[tuple[int, ...]]:
        """Number, start and stop of the parts of a piece, each in one band, and the band's edges."""
        own = self._own
        start, stop = int(own.start[at]), int(own.stop[at])
        cut = [(max(each.start, start), min(each.stop, stop), each) for each in bands[int(own.sequence[at])]]
        return [
            (at, first, last, each.low.at, each.low.slides, each.high.at, each.high.slides)
            for first, last, each in cut
            if first < last
        ]

    def _to(self, keys: _Pieces, *, slot: int) -> Attends:
        if not len(keys.start):
            return joined_tables([])
        rows, edges = self._rows_of, self._edges
        low = edges.low + edges.low_slides * rows.start
        high = edges.high + edges.high_slides * (rows.stop - 1)
        base = self._sequence * POSITIONS
        first = np.searchsorted(keys.sequence * POSITIONS + keys.stop, base + np.maximum(low, 0), side="right")
        last = np.searchsorted(keys.sequence * POSITIONS + keys.start, base + np.minimum(high, POSITIONS - 1))
        query, step = expanded(np.maximum(last - first, 0))
        pairs = Side(*(column[query] for column in rows))
        parts = decomposed(pairs, keys.part(first[query] + step), edges=Edges(*(column[query] for column in edges)))
        columns = np.empty((len(parts), 6), np.int64)
        columns[:, :2], columns[:, 2], columns[:, 3:5], columns[:, 5] = parts[:, :2], slot, parts[:, 2:4], parts[:, 4]
        return Attends(columns)
