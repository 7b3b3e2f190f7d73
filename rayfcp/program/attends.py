"""Attends of a rank's own queries to the keys in a slot, in as few and as large ranges as possible.

Attends come by run of keys, then by query, so that those of one slot and kind are few series of ascending queries:
one kernel call each.

`paced` spreads attends over phases, as `rayfcp.values.Pacing` defines them: an equal share of pairs in each, first on
keys that arrived, then on own ones. Ranks whose loads are balanced then go through the rounds at one pace, and none
waits for another that has more to do in one phase (`rayfcp.cost.kernels.flow` predicts the same).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rayfcp.program.instructions import FLIPPED, WHOLE, Attends, Column, Range, expanded, merged
from rayfcp.values import Block
from rayfcp.values.plan import phase_share
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


TILE = 128
"""Queries: attends are cut at multiples of this, and are not cut shorter."""

Row = tuple[int, int, int, int, int, int]
"""As in `Attends`: query start, query stop, slot, key start, key stop, kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """Attends on the keys of one transfer: possible from phase `first` on, all in phase `due` at the latest."""

    attends: Attends
    first: int
    due: int


def paced(brought: Sequence[Brought], own: Attends, *, num_phases: int) -> list[Attends]:
    """The attends of each phase; together exactly all of `brought`, which comes in order, and `own`.

    Each phase gets its equal share of the pairs, and more where attends are due.

    An attend that is larger than the rest of a phase is cut by its queries; a causal square of n tokens into
    a smaller one of the first queries, those of the others on the first keys, and the square of the rest; a flipped one
    into a smaller one of the first queries, these on the last keys, and the square of the rest.
    """
    total = own.num_pairs + sum(each.attends.num_pairs for each in brought)
    end = num_phases - 1
    arrived = [(row, each.first, min(each.due, end)) for each in brought for row in rows_of(each.attends)]
    queues = [arrived[::-1], [(row, 0, end) for row in rows_of(own)][::-1]]  # the next one last
    phases, done = [], 0
    for phase in range(num_phases):
        taken: list[Row] = []
        left = phase_share(total, phase, num_phases, done)
        for queue in queues:
            while queue and queue[-1][1] <= phase:
                row, first, due = queue.pop()
                here, later = (row, ()) if phase >= due else _cut(row, int(left))
                queue += [(each, first, due) for each in later]
                if here is None:
                    break
                taken.append(here)
                left -= pairs_of_row(here)
        done += sum(map(pairs_of_row, taken))
        phases.append(Attends(np.array(taken, np.int64).reshape(-1, 6)))
    return phases


def rows_of(attends: Attends) -> list[Row]:
    """The rows of the table."""
    return [(row[0], row[1], row[2], row[3], row[4], row[5]) for row in attends.columns.tolist()]


def pairs_of_row(row: Row) -> int:
    """(query, key) pairs of an attend."""
    queries, keys = row[1] - row[0], row[4] - row[3]
    return queries * (queries + 1) // 2 if row[5] != WHOLE else queries * keys


def _cut(row: Row, pairs: int) -> tuple[Row | None, tuple[Row, ...]]:
    """About `pairs` of a row, and the rest, the next last."""
    start, stop, slot, key_start, key_stop, kind = row
    queries = int((2 * max(pairs, 0)) ** 0.5) if kind != WHOLE else max(pairs, 0) // (key_stop - key_start)
    queries = (queries + TILE // 2) // TILE * TILE
    if queries + TILE > stop - start:
        if 2 * max(pairs, 0) >= pairs_of_row(row):
            return row, ()
        queries = 0
    if queries == 0:
        return None, (row,)
    at, key_at = start + queries, key_start + queries
    if kind == WHOLE:
        return (start, at, slot, key_start, key_stop, WHOLE), ((at, stop, slot, key_start, key_stop, WHOLE),)
    rectangle = (at, stop, slot, key_start, key_at, WHOLE)
    if kind == FLIPPED:
        rectangle = (start, at, slot, key_at, key_stop, WHOLE)
    return (start, at, slot, key_start, key_at, kind), ((at, stop, slot, key_at, key_stop, kind), rectangle)
