"""Attends of a rank's own queries to the keys in a slot, in as few and as large ranges as possible.

Attends come by run of keys, then by query, so that those of one slot and kind are few series of ascending queries:
one kernel call each.

In layers with a window, query q attends to keys (q - window, q]. Over the keys of a piece both ends of that range are
fixed or move with the query. Where only the upper one moves, queries see a rectangle and a causal square, where only
the lower one does, a flipped causal square and a rectangle. Where both do they see a parallelogram, cut into runs of as
many queries as a query sees keys: in each the flipped square of its first keys, and the causal square of those that its
later queries see beyond.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rayfcp.program.columns import CAUSAL, FLIPPED, WHOLE, Attends, Column, expanded, merged
from rayfcp.program.instructions import Range
from rayfcp.values import Block, LayerKind
from rayfcp.values.sequence import POSITIONS

_NO_ROWS: Column = np.empty((0, 6), np.int64)


def block_columns(blocks: Sequence[Block]) -> Column:
    """`[3, blocks]`: sequence, start and stop of all blocks of a layout."""
    rows = [(block.sequence, block.start, block.stop) for block in blocks]
    return np.array(rows, np.int64).reshape(-1, 3).T


class SlotBlocks:
    """Blocks in a slot, laid end to end: `blocks`, numbers of the layout, in the order of the slot; columns by sequence
    and start.

    Block i of the columns lies at `[begin[i], end[i])`. A run is a maximal series of blocks of one sequence,
    ascending, that touch in the slot; `run[i]` is that of block i, run j lies at `[opens[j], closes[j])`.
    `first[i]` is the first block of block i's sequence, `all` the whole slot.
    """

    def __init__(self, blocks: tuple[int, ...], table: Column) -> None:
        at = np.array(blocks, np.int64)
        sequence, start, stop = table[:, at]
        end = np.cumsum(stop - start)
        order = np.lexsort((start, sequence))
        self.blocks = blocks
        self.begin, self.end = (end - stop + start)[order], end[order]
        self.num_tokens = int(end[-1]) if blocks else 0
        self.all: tuple[Range, ...] = ((0, self.num_tokens),)
        self.sequence, self.start, self.stop = sequence[order], start[order], stop[order]
        same = self.sequence[1:] == self.sequence[:-1]
        touch = same & (self.begin[1:] == self.end[:-1])
        self.first = firsts(same, size=len(at))
        opens = firsts(touch, size=len(at)) == np.arange(len(at))
        self.run = np.cumsum(opens) - 1
        self.opens, self.closes = self.begin[opens], self.end[np.append(opens[1:], True)[: len(at)]]

    @cached_property
    def ranges(self) -> Mapping[int, Range]:
        """Block -> where it lies in the slot."""
        spans = sorted(zip(self.begin.tolist(), self.end.tolist(), strict=True))
        return dict(zip(self.blocks, spans, strict=True))

    @cached_property
    def only_run(self) -> tuple[int, int] | None:
        """Sequence and last position of a slot that is one run; None for others."""
        one = len(self.opens) == 1 and self.opens[0] == 0
        return (int(self.sequence[0]), int(self.stop[-1])) if one else None

    def holds(self, blocks: tuple[int, ...]) -> bool:
        return blocks == self.blocks or all(block in self.ranges for block in blocks)

    def at(self, blocks: tuple[int, ...]) -> tuple[Range, ...]:
        """The rows of `blocks`, in their order, touching ranges joined."""
        return self.all if blocks == self.blocks else merged([self.ranges[block] for block in blocks])


def firsts(joined: npt.NDArray[np.bool_], *, size: int) -> Column:
    """The first item of the series of each of `size` items; item i + 1 is in the series of item i where `joined[i]`.

    >>> firsts(np.array([True, False, True]), size=4)
    array([0, 0, 2, 2])
    """
    opens = np.ones(size, bool)
    opens[1:] = ~joined
    return np.maximum.accumulate(np.where(opens, np.arange(size), 0))


class Queries:
    """A rank's own blocks as queries of layers without a window, in the order of slot 0. `first_hidden`: the first key
    that no query of a block sees as an earlier one, as sequence x POSITIONS + position."""

    __slots__ = ("_runs", "begin", "end", "first_hidden", "own", "sequence")

    def __init__(self, own: SlotBlocks) -> None:
        order = np.argsort(own.begin, kind="stable")
        self.own = own
        self.begin, self.end, self.sequence = own.begin[order], own.end[order], own.sequence[order]
        self.first_hidden = self.sequence * POSITIONS + own.start[order]
        self._runs: dict[int, tuple[int, list[Range]]] = {}

    def within(self) -> Attends:
        """Attends to own keys.

        A run is one causal square: within it, earlier in the slot is earlier in the sequence. Below it lie the
        earlier runs of its sequence.
        """
        own = self.own
        opens, closes = own.opens, own.closes
        heads = np.flatnonzero(np.diff(own.run, prepend=-1))
        before = own.run[heads] - own.run[own.first[heads]]
        square = np.argsort(opens)
        at, step = _by_step(before)
        key = at - before[at] + step
        squares = _table(opens[square], closes[square], 0, opens[square], closes[square], causal=1)
        pairs = _table(opens[at], closes[at], 0, opens[key], closes[key])
        return Attends(np.concatenate((squares, pairs)))

    def to(self, held: SlotBlocks, *, slot: int) -> Attends:
        """Attends to the keys that another rank's blocks brought into a slot.

        Blocks of a sequence are disjoint, so a query block attends to a key block wholly (key before query) or not at
        all. Neighbouring queries with the same keys join.
        """
        last = np.searchsorted(held.sequence * POSITIONS + held.stop, self.first_hidden, side="right") - 1
        some = np.flatnonzero((last >= 0) & (held.sequence[last] == self.sequence)) if len(held.blocks) else last[:0]
        last = last[some]
        first_run, last_run = held.run[held.first[last]], held.run[last]
        at, step = _by_step(last_run - first_run + 1)
        run = first_run[at] + step
        query, begin = some[at], held.opens[run]
        end = np.where(run == last_run[at], held.end[last][at], held.closes[run])
        return _joined(_table(self.begin[query], self.end[query], slot, begin, end))

    def to_each(self, slots: Iterable[tuple[int, SlotBlocks]], *, first: Attends | None) -> Attends:
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

    def _seeing_all_of(self, held: SlotBlocks) -> list[Range] | None:
        """Ranges of the queries that see every key of a slot, touching ones joined; None if others see a part of it.

        A shortcut for slots that are one run of one sequence, as every context is.
        """
        only = held.only_run
        if only is None:
            return None
        sequence, stop = only
        if not self._runs:
            self._runs = self._runs_by_sequence()
        start, runs = self._runs.get(sequence, (stop, []))
        return runs if start >= stop else None

    def _runs_by_sequence(self) -> dict[int, tuple[int, list[Range]]]:
        """The first own position of each sequence, and its ranges in slot 0."""
        found: dict[int, tuple[int, list[Range]]] = {}
        own = self.own
        columns = (own.sequence.tolist(), own.start.tolist(), own.begin.tolist(), own.end.tolist())
        for sequence, start, begin, end in zip(*columns, strict=True):
            found.setdefault(sequence, (start, []))[1].append((begin, end))
        return {sequence: (start, list(merged(sorted(runs)))) for sequence, (start, runs) in found.items()}


def joined_tables(tables: Sequence[Column]) -> Attends:
    """All rows, in order."""
    return Attends(tables[0] if len(tables) == 1 else np.concatenate(tables) if tables else _NO_ROWS)


def _by_step(counts: Column) -> tuple[Column, Column]:
    """Item i `counts[i]` times and the number of the repetition, ordered by repetition."""
    if counts.max(initial=1) == 1 and counts.min(initial=1) == 1:
        return np.arange(len(counts)), np.zeros(len(counts), np.int64)
    at, step = expanded(counts)
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


class Pieces(NamedTuple):
    """Tokens `[start, stop)` of sequences, which lie in a slot from row `begin` on. Columns, one entry a piece."""

    sequence: Column
    start: Column
    stop: Column
    begin: Column

    @classmethod
    def of(cls, held: SlotBlocks) -> "Pieces":
        """The blocks of a slot by sequence and start; blocks that continue each other, in the sequence and in the slot,
        are one piece."""
        goes_on = (held.sequence[1:] == held.sequence[:-1]) & (held.start[1:] == held.stop[:-1])
        goes_on &= held.begin[1:] == held.end[:-1]
        size = len(held.sequence)
        opens = firsts(goes_on, size=size) == np.arange(size)
        stop = held.stop[np.append(opens[1:], True)[:size]]
        return cls(held.sequence[opens], held.start[opens], stop, held.begin[opens])

    def part(self, at: Column) -> "Pieces":
        return Pieces(*(column[at] for column in self))


class WindowedQueries:
    """A rank's own tokens as queries of layers with a window. Attends to one slot come squares first, by kind, then by
    query."""

    def __init__(self, own: SlotBlocks, kind: LayerKind) -> None:
        self._kind = kind
        self._own = Pieces.of(own)
        self._reaching = self._own.part(np.flatnonzero((self._own.start > 0) & (kind.first_visible(1) < 1)))

    def within(self) -> Attends:
        """Attends to own keys."""
        return self._attends(self._own, self._own, slot=0)

    def to(self, held: SlotBlocks, *, slot: int) -> Attends:
        """Attends to the keys that other blocks brought into a slot."""
        first, last = self._meet(self._reaching, held)
        return self._attends(self._reaching, Pieces.of(held), slot=slot) if (first < last).any() else joined_tables([])

    def to_each(self, slots: Iterable[tuple[int, SlotBlocks]], *, first: Attends | None) -> Attends:
        """`first`, then attends to the keys of each of these slots (number, blocks)."""
        tables = [] if first is None else [first.columns]
        tables += [self.to(held, slot=number).columns for number, held in slots if held.blocks]
        return joined_tables(tables)

    def _meet(self, queries: Pieces, keys: Pieces | SlotBlocks) -> tuple[Column, Column]:
        """The first entry of `keys` that each piece of queries sees a part of, and the one behind the last."""
        base = queries.sequence * POSITIONS
        low = base + np.maximum(self._kind.first_visible(queries.start), 0)
        first = np.searchsorted(keys.sequence * POSITIONS + keys.stop, low, side="right")
        return first, np.searchsorted(keys.sequence * POSITIONS + keys.start, base + queries.stop)

    def _attends(self, queries: Pieces, keys: Pieces, *, slot: int) -> Attends:
        first, last = self._meet(queries, keys)
        query, step = expanded(np.maximum(last - first, 0))
        parts = decomposed(queries.part(query), keys.part(first[query] + step), window=self._kind.window)
        columns = np.empty((len(parts), 6), np.int64)
        columns[:, :2], columns[:, 2], columns[:, 3:5], columns[:, 5] = parts[:, :2], slot, parts[:, 2:4], parts[:, 4]
        return Attends(columns)


def decomposed(queries: Pieces, keys: Pieces, *, window: int) -> Column:
    """The pairs that the i-th piece of queries sees of the i-th piece of keys, each (query, key) pair once.

    `[parts, 6]`: query start and stop and key start and stop in rows of their slots, kind as in `Attends`, and i;
    squares first, by kind, then query. No part is empty.
    """
    begin = np.maximum(queries.start, keys.start)
    end = np.maximum(np.minimum(queries.stop, keys.stop + window - 1), begin)
    lower_moves, upper_moves = keys.start + window, keys.stop  # from the one query on, up to the other
    first = np.clip(np.minimum(lower_moves, upper_moves), begin, end)
    second = np.clip(np.maximum(lower_moves, upper_moves), begin, end)
    both, pair = lower_moves < upper_moves, np.arange(len(begin))
    table = np.concatenate(
        (
            _parts(begin, first, begin, first, kind=CAUSAL, pair=pair),
            _parts(begin, first, keys.start, begin, kind=WHOLE, pair=pair),
            *_parallelogram(first, np.where(both, second, first), window, pair),
            _parts(first, np.where(both, first, second), keys.start, keys.stop, kind=WHOLE, pair=pair),
            _parts(second, end, second + 1 - window, end + 1 - window, kind=FLIPPED, pair=pair),
            _parts(second, end, end + 1 - window, keys.stop, kind=WHOLE, pair=pair),
        )
    )
    table = table[(table[:, 0] < table[:, 1]) & (table[:, 2] < table[:, 3])]
    pair = table[:, 5]
    table[:, :2] += (queries.begin - queries.start)[pair, None]
    table[:, 2:4] += (keys.begin - keys.start)[pair, None]
    return table[np.lexsort((table[:, 2], table[:, 0], table[:, 4], table[:, 4] == WHOLE))]


def _parallelogram(start: Column, stop: Column, window: int, pair: Column) -> tuple[Column, Column, Column]:
    """Query q sees (q - window, q], in runs of `window` queries."""
    some = np.flatnonzero(start < stop)
    run, step = expanded(-((start - stop)[some] // window))
    at = some[run]
    begin = start[at] + step * window
    end = np.minimum(begin + window, stop[at])
    return (
        _parts(begin, end, begin + 1 - window, end + 1 - window, kind=FLIPPED, pair=pair[at]),
        _parts(begin, end, end + 1 - window, begin + 1, kind=WHOLE, pair=pair[at]),
        _parts(begin + 1, end, begin + 1, end, kind=CAUSAL, pair=pair[at]),
    )


def _parts(start: Column, stop: Column, low: Column, high: Column, *, kind: int, pair: Column) -> Column:
    return np.stack((start, stop, low, high, np.full(len(start), kind), pair), axis=1)
