"""Proof of programs in columns, in time and memory proportional to their rows: pairs by values of polynomials.

The pairs of queries q of sequence s with keys k of sequence s' are a polynomial, the sum of r(s) t(s') x^q y^k. For
each block of queries, what is computed and what is visible are the same pairs, each once, if and only if their
polynomials are the same. These are evaluated at one random point of a field of 2^61 - 1 elements: different ones, of
degree at most 2 n with n tokens in the longest sequence, agree there with a probability of at most 2 n / (2^61 - 1)
(Schwartz, 1980; Zippel, 1979), less than 1e-11 for sequences of eight million tokens. The pairs of rectangles and
triangles are geometric sums, so that none is added up pair by pair (`rayfcp.verify.polynomials`).
"""

from collections.abc import Iterator, Sequence

import numpy as np

from rayfcp.program.attends import BlockSets
from rayfcp.program.attention import padding_number
from rayfcp.program.instructions import CAUSAL, FLIPPED, WHOLE, Column
from rayfcp.program.pieces import Pieces
from rayfcp.program.programs import Programs
from rayfcp.program.table import AttentionTable
from rayfcp.values import LayerKind, SequenceSpec, attends
from rayfcp.values.arrays import Ints, expanded
from rayfcp.verify.polynomials import PRIME, Point, Residues, Totals, folded, less, prefix_sums, times

BATCH = 1 << 18
"""Attends that are added up at a time: bounds memory, some 100 MB."""


def check_columns(programs: Programs, sequences: Sequence[SequenceSpec]) -> None:
    """Prove that programs, which passed `check_progress`, place each token of the sequences once, load what they
    attend to, and compute each visible pair of each kind of layers once, in both directions.

    Raises:
        ValueError: names the sequence and its tokens, and the microbatch, the kind of layers and a rank.
    """
    _check_places(programs.pieces, sequences)
    for kind, tables in programs.attention.items():
        for number, (table, pieces) in enumerate(zip(tables, programs.pieces, strict=True)):
            where = f"microbatch {number}, {kind}"
            _check_loads(table, pieces, where=where)
            _check_context(tables, number, where=where)
            if attends(kind):
                _check_pairs(table, kind, where=where)


def _check_places(pieces: Sequence[Pieces], sequences: Sequence[SequenceSpec]) -> None:
    """Each token is loaded once."""
    sequence, start, stop = (np.concatenate([each[column] for each in pieces]) for column in (1, 2, 3))
    if unknown := np.setdiff1d(sequence, [each.id for each in sequences]).tolist():
        raise ValueError(f"plan places sequences {unknown}, which the batch does not have")
    order = np.lexsort((stop, start, sequence))
    sequence, start, stop = sequence[order], start[order], stop[order]
    due = np.where(np.append(-1, sequence)[:-1] == sequence, np.append(0, stop)[:-1], 0)
    wrong = (start != due) | (stop <= start)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ValueError(
            f"sequence {sequence[at]}: piece [{start[at]}, {stop[at]}) where token {due[at]} is due; each token is "
            "placed once"
        )
    placed = dict(zip(sequence.tolist(), stop.tolist(), strict=True))
    for each in sequences:
        if (found := placed.get(each.id, 0)) != each.num_tokens:
            raise ValueError(f"sequence {each.id}: {found} of {each.num_tokens} tokens are placed; each must be, once")


def _name(table: AttentionTable, unit: int) -> str:
    """The ranks of a unit, in words."""
    first, last = table.units.first[unit : unit + 2].tolist()
    ranks = table.units.ranks[first:last].tolist()
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"


def _check_loads(table: AttentionTable, pieces: Pieces, *, where: str) -> None:
    """The ranks of each unit together load what lies in its slot 0, in its order, padding where nothing."""
    sets = table.sets
    row, unit = sets.rows(table.slots.set[table.slots.first[:-1]])
    held = runs_of((unit, sets.sequence[row], sets.start[row], sets.stop[row]))
    rank, *loaded = loaded_by(pieces)
    unit, position = (each[rank] for each in table.place_of_rank)
    order = np.lexsort((position, unit))
    found = runs_of([column[order] for column in (unit, *loaded)])
    size = min(len(held), len(found))
    wrong = np.append((held[:size] != found[:size]).any(axis=1), len(held) != len(found))
    if wrong.any():
        at = int(np.argmax(wrong))
        unit_of_row, sequence, start, stop = (held if at < len(held) else found)[at].tolist()
        raise ValueError(
            f"{where}: {_name(table, unit_of_row)} must load what lies in slot 0, tokens [{start}, {stop}) of sequence "
            f"{sequence} at this place; lower the plan again"
        )


def loaded_by(pieces: Pieces) -> tuple[Ints, Ints, Ints, Ints]:
    """Rank, sequence, start and stop of all that is loaded, in the order of each rank's slot 0, padding last."""
    counts = np.diff(pieces.first)
    padded = np.flatnonzero(counts == 0)
    rank = np.append(np.repeat(np.arange(len(counts)), counts), padded)
    padding = (padding_number(padded), np.zeros_like(padded), np.ones_like(padded))
    sequence, start, stop = (np.append(column, more) for column, more in zip(pieces[1:], padding, strict=True))
    return rank, sequence, start, stop


def runs_of(columns: Sequence[Ints]) -> Column:
    """Rows of tokens (unit, sequence, start, stop), those that continue each other joined."""
    unit, sequence, start, stop = columns
    goes_on = (unit[1:] == unit[:-1]) & (sequence[1:] == sequence[:-1]) & (start[1:] == stop[:-1])
    opens, closes = np.append(True, ~goes_on)[: len(unit)], np.append(~goes_on, True)[: len(unit)]
    return np.stack((unit[opens], sequence[opens], start[opens], stop[closes]), axis=1)


def _check_context(tables: Sequence[AttentionTable], number: int, *, where: str) -> None:
    """Each slot of context has the blocks that lie at its rows of the earlier microbatch's slot 0."""
    table, rows = tables[number], tables[number].context
    for microbatch in np.unique(rows.microbatch).tolist():
        mine, earlier = np.flatnonzero(rows.microbatch == microbatch), tables[microbatch]
        sets = table.slots.set[table.row(rows.unit[mine], rows.slot[mine])]
        held, which = table.sets.rows(sets)
        unit = earlier.place_of_rank[0][table.rank(rows.unit[mine])]
        own = earlier.slots.set[earlier.slots.first[unit]]
        there = earlier.sets.find(own[which], sequence=table.sets.sequence[held], start=table.sets.start[held])
        same = (there >= 0) & (earlier.sets.stop[there] == table.sets.stop[held])
        same &= earlier.sets.begin[there] == table.sets.begin[held] + rows.start[mine][which]
        wrong = table.sets.num_tokens[sets] != rows.stop[mine] - rows.start[mine]
        wrong[which[~same]] = True
        if wrong.any():
            at = mine[int(np.argmax(wrong))]
            raise ValueError(
                f"{where}: {_name(table, rows.unit[at])}: slot {rows.slot[at]} must hold rows [{rows.start[at]}, "
                f"{rows.stop[at]}) of microbatch {microbatch}; lower the plan again"
            )


def _check_pairs(table: AttentionTable, kind: LayerKind, *, where: str) -> None:
    """The queries of each block attend to each key that they see once, and so does each token of padding."""
    sets, sums, found = table.sets, _Sums(table.sets), Totals(len(table.sets.set))
    for block, pairs in sums.computed(table, where=where):
        found.add(block, pairs)
    row, unit = sets.rows(table.slots.set[table.slots.first[:-1]])
    wrong = found.sums()[row] != sums.visible(kind, row)
    if wrong.any():
        at = int(np.argmax(wrong))
        sequence, start, stop = (int(column[row[at]]) for column in (sets.sequence, sets.start, sets.stop))
        which = f"queries [{start}, {stop}) of sequence {sequence}" if sequence >= 0 else "the token of padding"
        raise ValueError(
            f"{where}: {_name(table, unit[at])}: {which} must attend to each key that they see once, and to no other; "
            "lower the plan again"
        )


class _Sums:
    """Sums over the tokens of sets of blocks, at a random point. Neighbours in a set that follow each other in their
    sequence are of one run: `run` of each block."""

    def __init__(self, sets: BlockSets) -> None:
        self.sets = sets
        lowest, highest = int(sets.sequence.min(initial=0)), int(sets.sequence.max(initial=0))
        self.point = Point(lowest=lowest, highest=highest, most=int(sets.stop.max(initial=0)))
        self._before = prefix_sums(self.point.keys(sets.sequence, start=sets.start, stop=sets.stop))
        goes_on = (sets.sequence[1:] == sets.sequence[:-1]) & (sets.start[1:] == sets.stop[:-1])
        self._run = np.cumsum(np.append(True, ~goes_on | (sets.set[1:] != sets.set[:-1]))[: len(sets.set)])

    def keys_before(self, sets: Ints, row: Ints) -> Residues:
        """The sum of b over the rows of sets before one, and over all sets before: only differences count."""
        held, block = self.sets, self.sets.block_at(sets, row)
        start = held.start[block]
        part = self.point.keys(held.sequence[block], start=start, stop=start + row - held.begin[block])
        return folded(self._before[block] + part)

    def place(self, sets: Ints, row: Ints, *, count: Ints) -> tuple[Ints, Ints]:
        """Sequence and position of the token at a row of sets; position -1 where the `count` tokens from there on do
        not follow each other in one sequence."""
        held, block = self.sets, self.sets.block_at(sets, row + 1)
        follows = self._run[block] == self._run[held.block_at(sets, row + count)]
        return held.sequence[block], np.where(follows, held.start[block] + row - held.begin[block], -1)

    def computed(self, table: AttentionTable, *, where: str) -> Iterator[tuple[Ints, Residues]]:
        """Sums over the pairs of attends, cut at blocks of queries, and these blocks.

        Raises:
            ValueError: keys of a triangle do not follow each other in one sequence.
        """
        sets, slots = self.sets, table.slots
        for row, columns in _attends(table):
            begin, end, _, key_begin, key_end, kind = columns.T
            own = slots.set[slots.first[table.unit_of_slot[row]]]
            head = sets.block_at(own, begin + 1)
            at, step = expanded(sets.block_at(own, end) - head + 1)
            block, keys, kind = head[at] + step, slots.set[row[at]], kind[at]
            first, last = np.maximum(begin[at], sets.begin[block]), np.minimum(end[at], sets.end[block])
            key = key_begin[at] + first - begin[at]  # of the first query, where keys move with queries
            high = self.keys_before(keys, np.where(kind == CAUSAL, key + 1, key_end[at]))
            low = self.keys_before(keys, np.where(kind == FLIPPED, key, key_begin[at]))
            start, stop = (sets.start[block] + each - sets.begin[block] for each in (first, last))
            pairs = times(self.point.queries(sets.sequence[block], start=start, stop=stop), less(high, low))
            some = np.flatnonzero(kind != WHOLE)
            of, position = self.place(keys[some], key[some], count=(stop - start)[some])
            if (position < 0).any():
                unit = table.unit_of_slot[row[at[some[np.argmin(position)]]]]
                raise ValueError(
                    f"{where}: {_name(table, unit)}: keys of a triangle must follow each other in one sequence; lower "
                    "the plan again"
                )
            causal = kind[some] == CAUSAL
            moving = self.point.moving(
                sets.sequence[block[some]], start=start[some], stop=stop[some], key=position + causal, of=of
            )
            pairs[some] = folded(pairs[some] + np.where(causal, moving, PRIME - moving))
            yield block, pairs

    def visible(self, kind: LayerKind, block: Ints) -> Residues:
        """The sums over the pairs that queries of blocks see: of all keys up to each, those of its window or chunk."""
        sequence, start, stop = (column[block] for column in (self.sets.sequence, self.sets.start, self.sets.stop))
        if kind.chunk:
            hidden = self._before_chunks(sequence, start, stop=stop, chunk=kind.chunk)
            return less(self.point.upto(sequence, start=start, stop=stop, keys=start + 1), hidden)
        first = np.clip(kind.window, start, stop) if kind.window else stop  # the first query that does not see key 0
        hidden = self.point.upto(sequence, start=first, stop=stop, keys=np.maximum(kind.first_visible(first), 0))
        return less(self.point.upto(sequence, start=start, stop=stop, keys=start + 1), hidden)

    def _before_chunks(self, sequence: Ints, start: Ints, *, stop: Ints, chunk: int) -> Residues:
        """The sums over queries `[start, stop)` and the keys before the chunk of each."""
        at, step = expanded((stop - 1) // chunk - start // chunk + 1)
        low = (start[at] // chunk + step) * chunk
        begin, end = np.maximum(start[at], low), np.minimum(stop[at], low + chunk)
        keys = self.point.keys(sequence[at], start=np.zeros_like(low), stop=low)
        found = Totals(len(start))
        found.add(at, times(self.point.queries(sequence[at], start=begin, stop=end), keys))
        return found.sums()


def _attends(table: AttentionTable) -> Iterator[tuple[Ints, Column]]:
    """All attends, some at a time, and the rows of their slots."""
    phases = table.phases
    if table.num_phases:
        unit = np.repeat(np.arange(len(phases.first) - 1), np.diff(phases.first)) // table.num_phases
        parts = iter([(table.row(unit, phases.columns[:, 2]), phases.columns)])
    else:
        parts = ((rows[found.slot], found.columns) for rows, found in table.attends())
    for row, columns in parts:
        for at in range(0, len(row), BATCH):
            yield row[at : at + BATCH], columns[at : at + BATCH].astype(np.int64)
