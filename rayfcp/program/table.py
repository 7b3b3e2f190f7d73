"""The attention of all ranks in one microbatch, in columns; what each rank runs is a view of it.

A message is one row for both of its ends, so that they cannot disagree, and ranges of rows follow from the blocks that
lie in slots: a ring of d ranks is d (d - 1) rows, however many sequences it holds. `AttentionTable.check` proves the
rest.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from rayfcp.program.attends import BlockSets, SlotAttends, attends_of, check_parts, queries_of
from rayfcp.program.instructions import (
    CAUSAL,
    FLIPPED,
    WHOLE,
    Attends,
    AttentionProgram,
    AttentionRound,
    Column,
    ContextSlot,
    HeadProgram,
    Message,
    Payload,
    Range,
    merged,
)
from rayfcp.values import LayerKind, attends
from rayfcp.values.arrays import Bools, Ints

BATCH = 1 << 20
"""Query blocks of which attends are made at a time: bounds memory, some 100 MB."""


class Units(NamedTuple):
    """Ranks that share out heads attend as one: unit u has the ranks `ranks[first[u]:first[u + 1]]`, by position. Most
    units are single ranks. `by_heads`: whether a unit exchanges tokens for heads."""

    first: Ints
    ranks: Ints
    by_heads: Bools

    @property
    def num_units(self) -> int:
        return len(self.first) - 1

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def degree(self) -> Ints:
        """Ranks of each unit."""
        return np.diff(self.first)

    def of_ranks(self) -> tuple[Ints, Ints]:
        """The unit of each rank, and its position there."""
        unit, position = np.empty((2, self.num_ranks), np.int64)
        unit[self.ranks] = np.repeat(np.arange(self.num_units), self.degree)
        position[self.ranks] = np.arange(self.num_ranks) - np.repeat(self.first[:-1], self.degree)
        return unit, position


class Slots(NamedTuple):
    """Slot n of unit u is row `first[u] + n`: the blocks of set `set`, there from the start (`arrived` is -1) or since
    the end of that round."""

    first: Ints
    set: Ints
    arrived: Ints


class Messages(NamedTuple):
    """Messages in the order of rounds, from a slot of the unit `source` to a slot of `target`. Keys and values fill
    their slot; the gradient of a slot is added to that of the other, all of it or the rows of the same blocks."""

    round: Ints
    source: Ints
    target: Ints
    source_slot: Ints
    target_slot: Ints


class ContextRows(NamedTuple):
    """Slot `slot` of a unit is full from the start: rows `[start, stop)` that it had in slot 0 in `microbatch`."""

    unit: Ints
    slot: Ints
    microbatch: Ints
    start: Ints
    stop: Ints


class KeptRows(NamedTuple):
    """Rows `[start, stop)` of slot 0 of a unit that later microbatches read; ascending, apart."""

    unit: Ints
    start: Ints
    stop: Ints


class Phases(NamedTuple):
    """Attends that are spread over rounds: those of unit u in round r are the columns `first[u * rounds + r]` to the
    next one's (`AttentionTable.num_phases`). None where `first` is empty."""

    first: Ints
    columns: Column


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionTable:
    """The attention of all ranks for one microbatch, in layers of one kind. `tokens`: of each rank, 1 of padding if it
    has none. Columns are not changed."""

    kind: LayerKind
    units: Units
    tokens: Ints
    sets: BlockSets
    slots: Slots
    keys: Messages
    gradients: Messages
    context: ContextRows
    kept: KeptRows
    phases: Phases

    @property
    def earlier(self) -> set[int]:
        """The microbatches whose keys and values are read."""
        return set(self.context.microbatch.tolist())

    def arrays(self) -> Iterator[Ints | Bools]:
        """All columns, in the order that `of` takes them in."""
        sets = self.sets
        yield from (*self.units, self.tokens, sets.first, sets.sequence, sets.start, sets.stop)
        for part in (self.slots, self.keys, self.gradients, self.context, self.kept, self.phases):
            yield from part

    @classmethod
    def of(cls, kind: LayerKind, arrays: Iterator[Ints]) -> "AttentionTable":
        """The table with these columns."""

        def part(kind: Any) -> Any:
            return kind(*(next(arrays) for _ in kind._fields))

        return cls(
            kind=kind,
            units=Units(next(arrays), next(arrays), next(arrays).astype(bool)),
            tokens=next(arrays),
            sets=BlockSets(next(arrays), sequence=next(arrays), start=next(arrays), stop=next(arrays)),
            slots=part(Slots),
            keys=part(Messages),
            gradients=part(Messages),
            context=part(ContextRows),
            kept=part(KeptRows),
            phases=Phases(next(arrays), next(arrays).reshape(-1, 6)),
        )

    @cached_property
    def unit_of_slot(self) -> Ints:
        """The unit of each row of `slots`."""
        return np.repeat(np.arange(self.units.num_units), np.diff(self.slots.first))

    @cached_property
    def place_of_rank(self) -> tuple[Ints, Ints]:
        """The unit of each rank, and its position there."""
        return self.units.of_ranks()

    @property
    def num_phases(self) -> int:
        """Rounds that attends are spread over; 0 where they are not."""
        return max(len(self.phases.first) - 1, 0) // self.units.num_units

    def rank(self, unit: Ints) -> Ints:
        """The first rank of each of these units."""
        return self.units.ranks[self.units.first[unit]]

    def row(self, unit: Ints, slot: Ints) -> Ints:
        """The row of a slot."""
        return self.slots.first[unit] + slot

    def attends(self) -> Iterator[tuple[Ints, SlotAttends]]:
        """The attends of all slots that are not paced, some slots at a time: these rows of `slots`, and their attends.
        A slot's are computed in the round after it arrived."""
        if not attends(self.kind):
            return
        queries = queries_of(self.sets, self.kind)
        own = self.slots.set[self.slots.first[self.unit_of_slot]]
        cost = np.cumsum(np.diff(self.sets.first)[own] + 1)
        bounds = np.searchsorted(cost, np.arange(0, cost[-1] + BATCH, BATCH), side="right")
        for start, stop in itertools.pairwise(np.unique(np.append(bounds, len(cost))).tolist()):
            rows = np.arange(start, stop)
            number = rows - self.slots.first[self.unit_of_slot[rows]]
            yield rows, attends_of(queries, own[rows], keys=self.slots.set[rows], slot=number)

    def keeps(self, rank: int) -> bool:
        """Whether later microbatches read what the rank has in slot 0."""
        return bool((self.kept.unit == self.place_of_rank[0][rank]).any())

    def program(self, rank: int) -> AttentionProgram | HeadProgram:
        """What a rank runs, as objects."""
        unit, position = (int(each[rank]) for each in self.place_of_rank)
        program = _View(self, unit=unit, position=position).program()
        if not self.units.by_heads[unit]:
            return program
        ranks = self.units.ranks[self.units.first[unit] : self.units.first[unit + 1]].tolist()
        tokens = tuple(self.tokens[ranks].tolist())
        return HeadProgram(num_tokens=tokens[position], ranks=tuple(ranks), tokens=tokens, attention=program)

    def check(self) -> None:
        """Prove that every message and its gradient can be sent, and that none is sent twice.

        Units hold each rank once. A message goes from a slot that was full before its round to one that it fills, of
        the same blocks, on another unit. Each of these slots sends its gradient once, after it was computed and what is
        added to it came, to a slot that has the same blocks. Both ends of a message post it in the same round, and
        messages of two units in the same order, so the rounds of all ranks meet.

        Raises:
            ValueError: names what is wrong and the first row at which it is.
        """
        _check_units(self.units, self.tokens)
        num_units, num_slots = self.units.num_units, len(self.slots.set)
        check_parts("slots", self.slots.first, count=num_units, size=num_slots)
        for name, columns in (("slots", self.slots[1:]), ("keys", self.keys), ("gradients", self.gradients)):
            _check_lengths(name, columns)
        _refuse("empty blocks", self.sets.stop <= self.sets.start)
        _refuse("a slot of a set that is not there", (self.slots.set < 0) | (self.slots.set >= len(self.sets)))
        _refuse("a slot that arrives before the first round", self.slots.arrived < -1)
        _refuse("a unit without a slot 0", np.diff(self.slots.first) < 1)
        first = self.slots.first[:-1]
        _refuse("a slot 0 that comes", self.slots.arrived[first] >= 0)
        tokens = np.add.reduceat(self.tokens[self.units.ranks], self.units.first[:-1])
        _refuse("a slot 0 of other tokens than its ranks'", tokens != self.sets.num_tokens[self.slots.set[first]])
        for name, rows in (("keys", self.keys), ("gradients", self.gradients)):
            _check_ends(name, rows, self.slots, num_units=num_units)
        _check_keys(self)
        _check_gradients(self)
        _check_context(self)
        if len(self.phases.first):
            _check_phases(self)


def _refuse(what: str, wrong: Bools, *, ranks: Ints | None = None) -> None:
    """
    Raises:
        ValueError: some row is wrong. `ranks`: that of each row.
    """
    if wrong.any():
        at = int(np.argmax(wrong))
        where = f"row {at}" if ranks is None else f"rank {ranks[at]}, row {at}"
        raise ValueError(f"the table of attention has {what} ({where}); lower the plan again")


def _check_units(units: Units, tokens: Ints) -> None:
    check_parts("units", units.first, count=units.num_units, size=units.num_ranks)
    known = np.array_equal(np.sort(units.ranks), np.arange(units.num_ranks)) and len(tokens) == units.num_ranks
    if not (known and (units.degree > 0).all() and len(units.by_heads) == units.num_units):
        raise ValueError(f"units have the ranks {units.ranks.tolist()[:16]}, must have each once; lower the plan again")
    _refuse("a rank without a token", tokens < 1)
    _refuse("a unit whose ranks are several and share out no heads, or one", (units.degree > 1) != units.by_heads)


def _check_lengths(name: str, columns: Sequence[Ints]) -> None:
    if len({len(column) for column in columns}) > 1:
        raise ValueError(f"columns of {name} differ in length; lower the plan again")


def _check_context(table: AttentionTable) -> None:
    """Rows of context and of what is kept are in slots of their units; slots that are full from the start, but for
    slot 0, are context."""
    context, kept, slots = table.context, table.kept, table.slots
    for name, columns in (("context", context), ("kept rows", kept)):
        _check_lengths(name, columns)
        _refuse(f"{name} at a unit that is not there", (columns[0] < 0) | (columns[0] >= table.units.num_units))
        ranks = table.rank(columns[0])
        _refuse(f"{name} that are empty", (columns[-2] < 0) | (columns[-1] <= columns[-2]), ranks=ranks)
    outside = (context.slot < 1) | (context.slot >= np.diff(slots.first)[context.unit])
    _refuse("context in a slot that is not there", outside, ranks=table.rank(context.unit))
    filled = np.bincount(table.row(context.unit, context.slot), minlength=len(slots.set))
    filled[slots.first[:-1]] = 1
    empty = np.diff(table.sets.first)[slots.set] == 0
    wrong, ranks = (slots.arrived < 0) & ~empty & (filled != 1), table.rank(table.unit_of_slot)
    _refuse("a slot that is full from the start and no context", wrong, ranks=ranks)
    _refuse("context in a slot that comes", (slots.arrived >= 0) & (filled > 0), ranks=ranks)


def _check_ends(name: str, rows: Messages, slots: Slots, *, num_units: int) -> None:
    _refuse(f"{name} out of order", np.append(False, rows.round[1:] < rows.round[:-1])[: len(rows.round)])
    _refuse(f"{name} in a round below 0", rows.round < 0)
    for unit, slot in ((rows.source, rows.source_slot), (rows.target, rows.target_slot)):
        _refuse(f"{name} at a unit that is not there", (unit < 0) | (unit >= num_units))
        count = np.diff(slots.first)[unit]
        _refuse(f"{name} in a slot that is not there", (slot < 0) | (slot >= count))
    _refuse(f"{name} from a unit to itself", rows.source == rows.target)


def _check_keys(table: AttentionTable) -> None:
    slots, keys = table.slots, table.keys
    left, came = table.row(keys.source, keys.source_slot), table.row(keys.target, keys.target_slot)
    targets, ranks = table.rank(keys.target), table.rank(table.unit_of_slot)
    _refuse("keys from a slot that is not full by then", slots.arrived[left] >= keys.round, ranks=targets)
    _refuse("keys that fill a slot in another round", slots.arrived[came] != keys.round, ranks=targets)
    filled = np.bincount(came, minlength=len(slots.set))
    _refuse("a slot that is not filled once", filled != (slots.arrived >= 0), ranks=ranks)
    _refuse("keys of no tokens", table.sets.num_tokens[slots.set[came]] < 1, ranks=targets)
    _refuse("keys of other blocks", ~_holds(table.sets, slots.set[left], slots.set[came]), ranks=targets)


def _check_gradients(table: AttentionTable) -> None:
    slots, rows = table.slots, table.gradients
    left, came = table.row(rows.source, rows.source_slot), table.row(rows.target, rows.target_slot)
    sent, ranks = np.bincount(left, minlength=len(slots.set)), table.rank(rows.source)
    unsent = sent != (slots.arrived >= 0)
    _refuse("a slot whose gradient is not sent once", unsent, ranks=table.rank(table.unit_of_slot))
    _refuse("gradients that leave before they are computed", rows.round < slots.arrived[left] + 2, ranks=ranks)
    _refuse("gradients of other blocks", ~_holds(table.sets, slots.set[came], slots.set[left]), ranks=ranks)
    late = rows.round >= _leaves(table)[came]
    _refuse("gradients that come after those that they belong to have left", late, ranks=ranks)


def _leaves(table: AttentionTable) -> Ints:
    """The round in which the gradient of each slot leaves, one beyond all for slots whose gradient stays."""
    found = np.full(len(table.slots.set), np.iinfo(np.int64).max)
    found[table.row(table.gradients.source, table.gradients.source_slot)] = table.gradients.round
    return found


def _check_phases(table: AttentionTable) -> None:
    """Attends that are spread over rounds are of tokens that lie in slots, after these came and before their gradients
    leave."""
    phases, slots, tokens = table.phases, table.slots, table.sets.num_tokens
    check_parts("phases", phases.first, count=table.units.num_units * table.num_phases, size=len(phases.columns))
    at = np.repeat(np.arange(len(phases.first) - 1), np.diff(phases.first))
    unit, number = np.divmod(at, table.num_phases)
    begin, end, slot, key_begin, key_end, kind = phases.columns.T
    ranks = table.rank(unit)
    _refuse("attends to a slot that is not there", (slot < 0) | (slot >= np.diff(slots.first)[unit]), ranks=ranks)
    row = table.row(unit, slot)
    _refuse("attends to keys before they came", slots.arrived[row] >= number, ranks=ranks)
    _refuse("attends to keys after their gradient has left", _leaves(table)[row] <= number, ranks=ranks)
    queries, keys = tokens[slots.set[slots.first[unit]]], tokens[slots.set[row]]
    outside = (begin < 0) | (end > queries) | (key_begin < 0) | (key_end > keys)
    _refuse("attends of tokens that are not there", outside | (begin >= end) | (key_begin >= key_end), ranks=ranks)
    unequal = (kind != WHOLE) & (end - begin != key_end - key_begin)
    _refuse("attends of no known shape", unequal | ~np.isin(kind, (WHOLE, CAUSAL, FLIPPED)), ranks=ranks)


def _holds(sets: BlockSets, outer: Ints, inner: Ints) -> Bools:
    """Whether each set of `outer` has all blocks of that of `inner`."""
    found = np.ones(len(outer), bool)
    other = np.flatnonzero(outer != inner)
    row, at = sets.rows(inner[other])
    there = sets.find(outer[other][at], sequence=sets.sequence[row], start=sets.start[row])
    missing = (there < 0) | (sets.stop[there] != sets.stop[row])
    found[other[at[missing]]] = False
    return found


Posted = dict[int, tuple[list[Message], list[Message]]]
"""Sent and received messages, by round."""


class _View:
    """The rounds of a unit, named by the ranks at one position of each unit."""

    def __init__(self, table: AttentionTable, *, unit: int, position: int) -> None:
        self._table, self._unit = table, unit
        first, last = table.slots.first[unit : unit + 2].tolist()
        self._set, self._arrived = table.slots.set[first:last], table.slots.arrived[first:last]
        self._position = position
        self._places: dict[int, dict[tuple[int, int], Range]] = {}

    def program(self) -> AttentionProgram:
        """The attention of the unit."""
        attends = self._attends()
        keys, gradients = (
            self._messages(self._table.keys, Payload.KV),
            self._messages(self._table.gradients, Payload.GRAD),
        )
        context, kept = self._table.context, self._table.kept
        slots = context.unit == self._unit
        rows = zip(*(column[slots].tolist() for column in context[1:]), strict=True)
        mine = kept.unit == self._unit
        return AttentionProgram(
            num_tokens=int(self._table.sets.num_tokens[self._set[0]]),
            forward=_rounds(attends, keys),
            backward=_rounds(attends, keys, gradients),
            context=tuple(ContextSlot(slot=slot, microbatch=at, span=(start, stop)) for slot, at, start, stop in rows),
            kept=tuple(zip(kept.start[mine].tolist(), kept.stop[mine].tolist(), strict=True)),
        )

    def _attends(self) -> dict[int, Attends]:
        """By round."""
        phases, table = self._table.phases, self._table
        if not attends(table.kind):
            return {}
        if table.num_phases:
            begin, end = (unit * table.num_phases for unit in (self._unit, self._unit + 1))
            bounds = phases.first[begin : end + 1].tolist()
            parts = enumerate(itertools.pairwise(bounds))
            return {at: Attends(phases.columns[low:high].astype(np.int64)) for at, (low, high) in parts if high > low}
        sets, number = np.unique(self._set, return_inverse=True)
        found = attends_of(
            queries_of(table.sets.part(sets), table.kind),
            np.full(len(number), number[0]),
            keys=number,
            slot=np.arange(len(number)),
        )
        step = self._arrived[found.slot] + 1
        order = np.argsort(step, kind="stable")
        rounds, first = np.unique(step[order], return_index=True)
        return dict(zip(rounds.tolist(), map(Attends, np.split(found.columns[order], first[1:])), strict=True))

    def _messages(self, rows: Messages, payload: Payload) -> Posted:
        found: Posted = defaultdict(lambda: ([], []))
        units = self._table.units
        for way, (own, other) in enumerate(((rows.source, rows.target), (rows.target, rows.source))):
            at = np.flatnonzero(own == self._unit)
            slots = [column[at] for column in (rows.source_slot, rows.target_slot)]
            filled = slots[1] if payload is Payload.KV else slots[0]
            unit = (rows.target if payload is Payload.KV else rows.source)[at]
            carried = self._table.slots.set[self._table.row(unit, filled)].tolist()
            peers = units.ranks[units.first[other[at]] + self._position]
            columns = (rows.round[at].tolist(), peers.tolist(), slots[way].tolist(), carried)
            for number, peer, slot, moved in zip(*columns, strict=True):
                message = Message(peer=peer, payload=payload, slot=slot, ranges=self._at(slot, moved))
                found[number][way].append(message)
        return found

    def _at(self, slot: int, blocks: int) -> tuple[Range, ...]:
        """The rows at which a set of blocks lies in a slot, in their order, touching ranges joined."""
        sets, here = self._table.sets, int(self._set[slot])
        if here == blocks:
            return ((0, int(sets.num_tokens[here])),)
        if here not in self._places:
            low, high = sets.first[here : here + 2].tolist()
            names = zip(sets.sequence[low:high].tolist(), sets.start[low:high].tolist(), strict=True)
            spans = zip(sets.begin[low:high].tolist(), sets.end[low:high].tolist(), strict=True)
            self._places[here] = dict(zip(names, spans, strict=True))
        low, high = sets.first[blocks : blocks + 2].tolist()
        names = zip(sets.sequence[low:high].tolist(), sets.start[low:high].tolist(), strict=True)
        return merged([self._places[here][name] for name in names])


def _rounds(attends: dict[int, Attends], *messages: Posted) -> tuple[AttentionRound, ...]:
    last = max([*attends, *(number for each in messages for number in each)], default=-1)
    none: tuple[list[Message], list[Message]] = ([], [])
    return tuple(
        AttentionRound(
            sends=tuple(message for each in messages for message in each.get(number, none)[0]),
            receives=tuple(message for each in messages for message in each.get(number, none)[1]),
            attends=attends.get(number, NO_ATTENDS),
        )
        for number in range(last + 1)
    )


NO_ATTENDS = Attends.of(())
