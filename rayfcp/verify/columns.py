"""Proof of programs in columns, in time and memory proportional to their rows: pairs by sums of random numbers.

Every token q gets random numbers a(q) and b(q), and d(q) for its pair with itself. If the sum of a(q) b(k) over all
pairs that are computed equals that over all that are visible, the same pairs are computed, each once: otherwise the
difference is a polynomial that is not 0, of degree 2, in numbers drawn from a field of 2^31 - 1 elements, and is 0 with
a probability of at most 2 / (2^31 - 1) (Schwartz, 1980; Zippel, 1979). Drawn twice, a wrong program passes with
a probability of less than 1e-18. Tokens that no attend separates share their numbers, and sums over ranges are
differences of prefix sums.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rayfcp.program.attends import BlockSets
from rayfcp.program.attention import padding_number
from rayfcp.program.instructions import CAUSAL, WHOLE
from rayfcp.program.programs import Pieces, Programs
from rayfcp.program.table import AttentionTable
from rayfcp.values import FULL, SequenceSpec
from rayfcp.values.arrays import Bools, Ints

PRIME = 2**31 - 1
"""Products of two residues fit into 64 bits."""

DRAWS = 2


def proved(programs: Programs, sequences: Sequence[SequenceSpec]) -> bool:
    """Whether the programs, which passed `check_progress`, place each token of the sequences once, load what they
    attend to, and compute each visible pair once. False if that is wrong, or is not shown here: of layers with a
    window, which are proved pair by pair."""
    tables = list(programs.attention.values())
    if any(table.kind != FULL for of_kind in tables for table in of_kind):
        return False
    if not all(_loads(table, pieces) for table, pieces in zip(tables[0], programs.pieces, strict=True)):
        return False
    if not all(_continues(tables[0], at) for at in range(len(tables[0]))):
        return False
    return _places(programs.pieces, sequences) and _pairs(tables[0], sequences)


def _places(pieces: Sequence[Pieces], sequences: Sequence[SequenceSpec]) -> bool:
    """Whether each token is loaded once."""
    sequence, start, stop = (np.concatenate([each[column] for each in pieces]) for column in (1, 2, 3))
    order = np.lexsort((start, sequence))
    sequence, start, stop = sequence[order], start[order], stop[order]
    opens = np.append(True, sequence[1:] != sequence[:-1])[: len(sequence)]
    closes = np.append(opens[1:], True)[: len(sequence)]
    lengths = {each.id: each.num_tokens for each in sequences}
    whole = bool((start[opens] == 0).all() and (start[1:] == stop[:-1])[~opens[1:]].all() and (stop > start).all())
    return whole and dict(zip(sequence[closes].tolist(), stop[closes].tolist(), strict=True)) == lengths


def _loads(table: AttentionTable, pieces: Pieces) -> bool:
    """Whether the ranks of each unit together load what lies in its slot 0, padding where nothing."""
    sets, units = table.sets, table.units
    row, _ = sets.rows(table.slots.set[table.slots.first[:-1]])
    own = sets.sequence[row] >= 0
    padded = np.flatnonzero(np.diff(pieces.first) == 0)
    if not np.array_equal(np.sort(sets.sequence[row][~own]), np.sort(padding_number(padded))):
        return False
    row = row[own]
    order = np.repeat(np.arange(units.num_ranks), np.diff(pieces.first))
    place = np.empty(units.num_ranks, np.int64)
    place[units.ranks] = np.arange(units.num_ranks)
    order = np.argsort(place[order], kind="stable")
    held = (sets.sequence[row], sets.start[row], sets.stop[row])
    return all(np.array_equal(one, other[order]) for one, other in zip(held, pieces[1:], strict=True))


def _continues(tables: Sequence[AttentionTable], at: int) -> bool:
    """Whether each slot of context has the blocks that lie at its rows of the earlier microbatch's slot 0."""
    table, rows = tables[at], tables[at].context
    for microbatch in np.unique(rows.microbatch).tolist():
        mine, earlier = np.flatnonzero(rows.microbatch == microbatch), tables[microbatch]
        held, which = table.sets.rows(table.slots.set[table.row(rows.unit[mine], rows.slot[mine])])
        ranks = table.units.ranks[table.units.first[rows.unit[mine]]]
        own = earlier.slots.set[earlier.slots.first[earlier.place_of_rank[0][ranks]]]
        there = earlier.sets.find(own[which], sequence=table.sets.sequence[held], start=table.sets.start[held])
        same = (there >= 0) & (earlier.sets.stop[there] == table.sets.stop[held])
        same &= earlier.sets.begin[there] == table.sets.begin[held] + rows.start[mine][which]
        sizes = np.bincount(which, table.sets.stop[held] - table.sets.start[held], minlength=len(mine))
        if not same.all() or not np.array_equal(sizes, rows.stop[mine] - rows.start[mine]):
            return False
    return True


class _Rows(NamedTuple):
    """Attends: the sets of their queries and keys, and rows there; `square`: causal squares."""

    own: Ints
    keys: Ints
    begin: Ints
    end: Ints
    key_begin: Ints
    key_end: Ints
    square: Bools


def _rows(table: AttentionTable) -> Iterator[_Rows | None]:
    """All attends; None for those that are no causal square of own tokens nor all pairs of a rectangle."""
    phases, slots = table.phases, table.slots
    if table.num_phases:
        unit = np.repeat(np.arange(len(phases.first) - 1), np.diff(phases.first)) // table.num_phases
        parts = iter([(table.row(unit, phases.columns[:, 2]), phases.columns)])
    else:
        parts = ((rows[found.slot], found.columns) for rows, found in table.attends())
    for row, columns in parts:
        begin, end, slot, key_begin, key_end, kind = columns.T
        square = kind == CAUSAL
        if (square & ((slot != 0) | (begin != key_begin) | (end != key_end))).any() or (
            kind > max(WHOLE, CAUSAL)
        ).any():
            yield None
            return
        own = slots.set[slots.first[table.unit_of_slot[row]]]
        yield _Rows(own, slots.set[row], begin, end, key_begin, key_end, square)


class _Numbers:
    """Random numbers of the parts of sequences, `[draw, part]`; sums up to each of `bounds`, sequence x `most` +
    position, ascending: of a, b, and of a times all b before plus d."""

    def __init__(self, bounds: Ints, *, most: int) -> None:
        self._bounds, self._most = bounds, most
        inside = bounds[1:] // most == bounds[:-1] // most
        a, b, d = np.random.default_rng(0).integers(1, PRIME, (3, DRAWS, len(inside))) * inside
        self.a, self.b = _sums(a), _sums(b)
        self.below = _sums((a * self.b[:, :-1] + d) % PRIME)

    def at(self, sequence: Ints, position: Ints) -> Ints:
        """The bound at a position."""
        return np.searchsorted(self._bounds, sequence * self._most + position)


def _sums(values: Ints) -> Ints:
    return np.pad(np.cumsum(values % PRIME, axis=1) % PRIME, ((0, 0), (1, 0)))


class _SetNumbers:
    """The same along the rows of sets, up to any of their bounds."""

    def __init__(self, sets: BlockSets, numbers: _Numbers, *, lowest: int) -> None:
        self._sets, self._numbers, self._lowest = sets, numbers, lowest
        first, last = (numbers.at(sets.sequence - lowest, each) for each in (sets.start, sets.stop))
        self._start = first
        a, b = numbers.a[:, last] - numbers.a[:, first], numbers.b[:, last] - numbers.b[:, first]
        self._a, self._b = _sums(a)[:, :-1], _sums(b)[:, :-1]  # over all sets: only differences count
        below = numbers.below[:, last] - numbers.below[:, first] + (self._b - numbers.b[:, first]) % PRIME * (a % PRIME)
        self._below = _sums(below)[:, :-1]

    def upto(self, sets: Ints, row: Ints) -> tuple[Ints, Ints, Ints]:
        """Sums of a, of b, and of a times all b before plus d, up to a row of each of these sets."""
        held = self._sets
        block = held.block_at(sets, row)
        position = held.start[block] + row - held.begin[block]
        at, start, numbers = (
            self._numbers.at(held.sequence[block] - self._lowest, position),
            self._start[block],
            self._numbers,
        )
        a, b = (numbers.a[:, at] - numbers.a[:, start]) % PRIME, (numbers.b[:, at] - numbers.b[:, start]) % PRIME
        shift = (self._b[:, block] - numbers.b[:, start]) % PRIME
        below = numbers.below[:, at] - numbers.below[:, start] + shift * a
        return (self._a[:, block] + a) % PRIME, (self._b[:, block] + b) % PRIME, (self._below[:, block] + below) % PRIME


def _pairs(tables: Sequence[AttentionTable], sequences: Sequence[SequenceSpec]) -> bool:
    """Whether each visible pair is computed once, and that of each token of padding."""
    lowest = min(int(table.sets.sequence.min(initial=0)) for table in tables)
    most = max(int(table.sets.stop.max(initial=0)) for table in tables) + 1
    bounds: list[Ints] = []
    for table in tables:
        sets = table.sets
        bounds += [(sets.sequence - lowest) * most + each for each in (sets.start, sets.stop)]
        if table.num_phases:  # the only attends that cut blocks
            bounds += [_bounds(rows, sets, lowest=lowest, most=most) for rows in _rows(table) if rows is not None]
    numbers = _Numbers(np.unique(np.concatenate(bounds)), most=most)
    found = np.zeros(DRAWS, np.int64)
    for table in tables:
        along = _SetNumbers(table.sets, numbers, lowest=lowest)
        for rows in _rows(table):
            if rows is None:
                return False
            found = (found + _computed(along, rows)) % PRIME
        row, _ = table.sets.rows(table.slots.set[table.slots.first[:-1]])
        padding = -table.sets.sequence[row][table.sets.sequence[row] < 0]
        found = (found - _visible(numbers, -padding - lowest, np.ones_like(padding))) % PRIME
    ids = np.array([each.id for each in sequences], np.int64) - lowest
    due = _visible(numbers, ids, np.array([each.num_tokens for each in sequences], np.int64))
    return np.array_equal(found, due)


def _bounds(rows: _Rows, sets: BlockSets, *, lowest: int, most: int) -> Ints:
    """Positions at which attends begin and end."""
    found = []
    for held, row in (
        (rows.own, rows.begin),
        (rows.own, rows.end),
        (rows.keys, rows.key_begin),
        (rows.keys, rows.key_end),
    ):
        block = sets.block_at(held, row)
        found.append((sets.sequence[block] - lowest) * most + sets.start[block] + row - sets.begin[block])
    return np.unique(np.concatenate(found))


def _computed(along: _SetNumbers, rows: _Rows) -> Ints:
    """The sum over the pairs of attends."""
    a_begin, b_begin, below_begin = along.upto(rows.own, rows.begin)
    a_end, _, below_end = along.upto(rows.own, rows.end)
    _, first, _ = along.upto(rows.keys, rows.key_begin)
    _, last, _ = along.upto(rows.keys, rows.key_end)
    a = (a_end - a_begin) % PRIME
    squares = (below_end - below_begin - b_begin * a) % PRIME
    parts = np.where(rows.square, squares, (last - first) % PRIME * a % PRIME)
    return np.asarray(parts.sum(axis=1) % PRIME)


def _visible(numbers: _Numbers, sequence: Ints, num_tokens: Ints) -> Ints:
    """The sum over the pairs of causal sequences."""
    first, last = numbers.at(sequence, np.zeros_like(sequence)), numbers.at(sequence, num_tokens)
    a = (numbers.a[:, last] - numbers.a[:, first]) % PRIME
    parts = (numbers.below[:, last] - numbers.below[:, first] - numbers.b[:, first] * a) % PRIME
    return np.asarray(parts.sum(axis=1) % PRIME)
