"""Which query ranges attend to which key ranges, in as few and as large ranges as possible.

Attends come by run of keys, then by query, so that those of one slot and mask are few series of ascending
queries: one call of a kernel each.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from rayfcp.program.parcels import Range
from rayfcp.program.placed import Placed, merged
from rayfcp.program.table import Attends, Column
from rayfcp.values.sequence import POSITIONS


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
