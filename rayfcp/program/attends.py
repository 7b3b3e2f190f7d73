"""Attends of a rank's own queries to the keys in its slots, in as few and as large ranges as possible.

Attends come by run of keys, then by query, so that those of one slot and kind are few series of ascending queries:
one kernel call each. They follow from the blocks that lie in slots, so programs do not carry them: whoever needs them,
the rank that runs them or the simulator, asks for those of many slots at once.
"""

from functools import cached_property
from typing import NamedTuple

import numpy as np

from rayfcp.program.instructions import CAUSAL, WHOLE, Column
from rayfcp.program.windows import Pieces, decomposed
from rayfcp.values import FULL, LayerKind
from rayfcp.values.arrays import Bools, Ints, expanded, firsts


def check_parts(name: str, first: Ints, *, count: int, size: int) -> None:
    """
    Raises:
        ValueError: `first` does not cut `size` rows into `count` parts.
    """
    if len(first) != count + 1 or first[0] != 0 or first[-1] != size or (np.diff(first) < 0).any():
        raise ValueError(f"{name} are cut at {first.tolist()[:16]}, must be {count} parts of {size} rows; lower again")


class BlockSets:
    """Sets of blocks that lie in slots, each laid end to end: columns, set after set, each in the order of its slot.
    Set s has the rows `first[s]` to `first[s + 1]`; a block's tokens `[start, stop)` lie at `[begin, end)` of the slot.
    """

    def __init__(self, first: Ints, *, sequence: Ints, start: Ints, stop: Ints) -> None:
        self.first, self.sequence, self.start, self.stop = (
            each.astype(np.int64, copy=False) for each in (first, sequence, start, stop)
        )
        check_parts("sets of blocks", self.first, count=len(first) - 1, size=len(start))
        self.set = np.repeat(np.arange(len(first) - 1), np.diff(self.first))
        bound = np.append(0, np.cumsum(self.stop - self.start))
        base = bound[self.first]
        self.begin, self.end = bound[:-1] - base[self.set], bound[1:] - base[self.set]
        self.num_tokens = np.diff(base)

    def __len__(self) -> int:
        return len(self.first) - 1

    def rows(self, sets: Ints) -> tuple[Ints, Ints]:
        """All rows of these sets, in order, and for each the index of its set in `sets`."""
        at, number = expanded(np.diff(self.first)[sets])
        return self.first[sets][at] + number, at

    def key(self, sets: Ints, *, sequence: Ints, position: Ints) -> Ints:
        """Numbers that order tokens by set, sequence and position."""
        low, high, most = self._bounds
        return np.asarray((sets.astype(np.int64, copy=False) * (high - low + 1) + sequence - low) * most + position)

    def find(self, sets: Ints, *, sequence: Ints, start: Ints) -> Ints:
        """The row at which the block of a sequence that begins at `start` lies in each of these sets; -1 if none."""
        if not len(self.set):
            return np.full(len(sets), -1)
        order = self.sorted
        keys = self.key(self.set, sequence=self.sequence, position=self.start)[order]
        inside = (sequence >= self._bounds[0]) & (sequence <= self._bounds[1]) & (start < self._bounds[2])
        wanted = np.where(inside, self.key(sets, sequence=sequence, position=start), -1)
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        return np.where(keys[at] == wanted, order[at], -1)

    def block_at(self, sets: Ints, row: Ints) -> Ints:
        """The block of each of these sets that holds the tokens before a row, its first one for row 0."""
        width = int(self.num_tokens.max(initial=0)) + 1
        return np.searchsorted(self.set * width + self.end, sets.astype(np.int64, copy=False) * width + row)

    def part(self, sets: Ints) -> "BlockSets":
        """These sets, numbered from 0."""
        row, _ = self.rows(sets)
        first = np.append(0, np.cumsum(np.diff(self.first)[sets]))
        return BlockSets(first, sequence=self.sequence[row], start=self.start[row], stop=self.stop[row])

    @cached_property
    def sorted(self) -> Ints:
        """The rows by set, sequence and start."""
        return np.lexsort((self.start, self.sequence, self.set))

    @cached_property
    def same(self) -> Bools:
        """Whether each of the sorted rows but the first is of the set and sequence of the one before."""
        sets, sequence = self.set[self.sorted], self.sequence[self.sorted]
        return np.asarray((sets[1:] == sets[:-1]) & (sequence[1:] == sequence[:-1]))

    @cached_property
    def _bounds(self) -> tuple[int, int, int]:
        """Lowest and highest sequence, and one more than the last position."""
        return int(self.sequence.min(initial=0)), int(self.sequence.max(initial=0)), int(self.stop.max(initial=0)) + 1


class SlotAttends(NamedTuple):
    """Attends of several slots: row i, six columns as of `Attends`, is one of slot `slot[i]`, an index into those that
    were asked for, ascending."""

    slot: Ints
    columns: Column


class FullQueries:
    """Attends in layers without a window. A run is a maximal series of blocks of one sequence, ascending, that touch
    in the slot; run j lies at `[opens[j], closes[j])`."""

    def __init__(self, sets: BlockSets) -> None:
        self._sets = sets
        order = sets.sorted
        begin, end = sets.begin[order], sets.end[order]
        self._end = end
        self._stop = sets.key(sets.set, sequence=sets.sequence, position=sets.stop)[order]
        opens = np.append(True, ~(sets.same & (begin[1:] == end[:-1])))[: len(order)]
        self._run = np.cumsum(opens) - 1
        self._head = firsts(sets.same) if len(order) else order  # the first block of the same sequence in the set
        self._opens, self._closes = begin[opens], end[np.append(opens[1:], True)[: len(order)]]
        self._run_set = sets.set[order][opens]
        self._run_head = self._run[self._head][opens]

    def within(self, own: Ints) -> SlotAttends:
        """Attends to own keys, slot 0, of ranks with these sets.

        A run is one causal square: within it, earlier in the slot is earlier in the sequence. Below it lie the
        earlier runs of its sequence.
        """
        first = np.searchsorted(self._run_set, own)
        at, number = expanded(np.searchsorted(self._run_set, own, side="right") - first)
        run = first[at] + number
        begin, end = self._opens[run], self._closes[run]
        order = np.lexsort((begin, at))
        squares = _table(begin[order], end[order], 0, begin[order], end[order], kind=CAUSAL)
        before = run - self._run_head[run]
        item, step = expanded(before)
        item, step = _by_step(item, step, at[item])
        key = run[item] - before[item] + step
        pairs = _table(begin[item], end[item], 0, self._opens[key], self._closes[key])
        slot, columns = np.concatenate((at[order], at[item])), np.concatenate((squares, pairs))
        order = np.argsort(slot, kind="stable")
        return SlotAttends(slot[order], columns[order])

    def to(self, own: Ints, keys: Ints, *, slot: Ints) -> SlotAttends:
        """Attends of ranks with the sets `own` to the sets `keys` that others brought into their slots `slot`.

        Blocks of a sequence are disjoint, so a query block attends to a key block wholly (key before query) or not at
        all. Neighbouring queries with the same keys join.
        """
        sets = self._sets
        row, at = sets.rows(own)
        last = (
            np.searchsorted(
                self._stop, sets.key(keys[at], sequence=sets.sequence[row], position=sets.start[row]), side="right"
            )
            - 1
        )
        order = sets.sorted[np.maximum(last, 0)]
        seen = np.flatnonzero(
            (last >= 0) & (sets.set[order] == keys[at]) & (sets.sequence[order] == sets.sequence[row])
        )
        row, at, last = row[seen], at[seen], last[seen]
        first_run, last_run = self._run[self._head[last]], self._run[last]
        item, step = expanded(last_run - first_run + 1)
        item, step = _by_step(item, step, at[item])
        run = first_run[item] + step
        end = np.where(run == last_run[item], self._end[last][item], self._closes[run])
        query, pair = row[item], at[item]
        columns = _table(sets.begin[query], sets.end[query], slot[pair], self._opens[run], end)
        touch = (pair[1:] == pair[:-1]) & (columns[1:, 0] == columns[:-1, 1])
        touch &= (columns[1:, 3:5] == columns[:-1, 3:5]).all(axis=1)
        heads, tails = np.append(True, ~touch)[: len(pair)], np.append(~touch, True)[: len(pair)]
        kept = columns[heads]
        kept[:, 1] = columns[tails, 1]
        return SlotAttends(pair[heads], kept)


class WindowedQueries:
    """Attends in layers with a window or chunks. Those to one slot come squares first, by kind, then by query."""

    def __init__(self, sets: BlockSets, kind: LayerKind) -> None:
        self._sets, self._kind = sets, kind
        order = sets.sorted
        start, stop, begin, end = (column[order] for column in (sets.start, sets.stop, sets.begin, sets.end))
        goes_on = sets.same & (start[1:] == stop[:-1]) & (begin[1:] == end[:-1])
        opens = np.append(True, ~goes_on)[: len(order)]
        self._pieces = Pieces(
            sets.sequence[order][opens], start[opens], stop[np.append(opens[1:], True)[: len(order)]], begin[opens]
        )
        self._set = sets.set[order][opens]

    def within(self, own: Ints) -> SlotAttends:
        """Attends to own keys, slot 0, of ranks with these sets."""
        return self._attends(own, own, slot=np.zeros_like(own), reaching=False)

    def to(self, own: Ints, keys: Ints, *, slot: Ints) -> SlotAttends:
        """Attends of ranks with the sets `own` to the sets `keys` that others brought into their slots `slot`."""
        return self._attends(own, keys, slot=slot, reaching=True)

    def _attends(self, own: Ints, keys: Ints, *, slot: Ints, reaching: bool) -> SlotAttends:
        """`reaching`: only queries that may see keys of other ranks."""
        pieces, sets, kind = self._pieces, self._sets, self._kind
        first = np.searchsorted(self._set, own)
        at, number = expanded(np.searchsorted(self._set, own, side="right") - first)
        query = first[at] + number
        if reaching:
            some = (pieces.start[query] > 0) & (kind.first_visible(1) < 1)
            query, at = query[some], at[some]
        start, stop, sequence = pieces.start[query], pieces.stop[query], pieces.sequence[query]
        low = np.maximum(kind.first_visible(start), 0)
        first = np.searchsorted(
            sets.key(self._set, sequence=pieces.sequence, position=pieces.stop),
            sets.key(keys[at], sequence=sequence, position=low),
            side="right",
        )
        last = np.searchsorted(
            sets.key(self._set, sequence=pieces.sequence, position=pieces.start),
            sets.key(keys[at], sequence=sequence, position=stop),
        )
        item, step = expanded(np.maximum(last - first, 0))
        parts = decomposed(pieces.part(query[item]), pieces.part(first[item] + step), kind=kind)
        pair = at[item][parts[:, 5]]
        order = np.argsort(pair, kind="stable")
        pair, parts = pair[order], parts[order]
        columns = np.empty((len(parts), 6), np.int64)
        columns[:, :2], columns[:, 2], columns[:, 3:5], columns[:, 5] = (
            parts[:, :2],
            slot[pair],
            parts[:, 2:4],
            parts[:, 4],
        )
        return SlotAttends(pair, columns)


def queries_of(sets: BlockSets, kind: LayerKind) -> FullQueries | WindowedQueries:
    """What makes the attends of layers of a kind."""
    return FullQueries(sets) if kind == FULL else WindowedQueries(sets, kind)


def attends_of(queries: FullQueries | WindowedQueries, own: Ints, *, keys: Ints, slot: Ints) -> SlotAttends:
    """Attends of ranks with the sets `own` to the sets `keys` in their slots `slot`, of which slot 0 is their own."""
    inner, outer = np.flatnonzero(slot == 0), np.flatnonzero(slot != 0)
    parts = (queries.within(own[inner]), queries.to(own[outer], keys[outer], slot=slot[outer]))
    at = np.concatenate((inner[parts[0].slot], outer[parts[1].slot]))
    order = np.argsort(at, kind="stable")
    return SlotAttends(at[order], np.concatenate([each.columns for each in parts])[order])


def _by_step(item: Ints, step: Ints, slot: Ints) -> tuple[Ints, Ints]:
    """Items that are repeated, by slot, then repetition."""
    if not step.any():
        return item, step
    order = np.lexsort((step, slot))
    return item[order], step[order]


def _table(begin: Ints, end: Ints, slot: Ints | int, key_begin: Ints, key_end: Ints, *, kind: int = WHOLE) -> Column:
    columns = np.empty((len(begin), 6), np.int64)
    columns[:, 0], columns[:, 1], columns[:, 2] = begin, end, slot
    columns[:, 3], columns[:, 4], columns[:, 5] = key_begin, key_end, kind
    return columns
