"""Local attends beside the exchanges of a reshuffle, so that these are hidden.

Local attends read slot 0, which a reshuffle fills round by round and empties round by round. So an attend may run

- on the way in, from the round on before which all that it reads is here: tokens that stayed are here from the start;
- on the way out, up to the round before the first that takes away what it adds to: tokens that stay are never taken.

Forward it reads its queries and keys and adds to the outputs of its queries. Backward, when keys and values lie in
slot 0 still and gradients of outputs come, it reads its queries and adds to the gradients of queries and keys.
What came first goes first: early comers are attended to on the way in, late ones on the way out.

Each round, of the reshuffle and of the program, wants cells in proportion to what it carries; the rounds of the program
have those that their messages brought already. That moves local attends between rounds and cuts them, and changes
neither the cells nor any message.

Source: FCP with blocks (Zhao et al.), section 4.3: local computation goes to the beginning and the end.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rayfcp.program.instructions import AttentionProgram, AttentionRound, Message, Payload
from rayfcp.program.paced import Row, cells_of_row, first_cells, rows_of
from rayfcp.program.parcels import Range, ReshuffleProgram
from rayfcp.program.table import CAUSAL, WHOLE, Attends

QUERY_HEADS = 4
"""To one head of keys and values: what the wants of the rounds are reckoned with. Any model runs exactly."""

_KV, _GRAD, _OUT, _ALL = 2, 4, QUERY_HEADS, QUERY_HEADS + 2
"""Heads that a token takes along: keys and values, their gradients in twice the bytes, outputs, and all of q, k, v."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenRounds:
    """One direction of an attention program around a reshuffle; `entering[i]` and `leaving[i]` are computed while
    round i of the reshuffle runs, `rounds` are the program's with what is left."""

    entering: tuple[Attends, ...]
    rounds: tuple[AttentionRound, ...]
    leaving: tuple[Attends, ...]


def hide(program: AttentionProgram, reshuffle: ReshuffleProgram) -> tuple[HiddenRounds, HiddenRounds]:
    """Forward and backward of a rank with local attends moved to the rounds of its reshuffle.

    Invariant: each direction computes exactly the cells of the program. Those of `entering[i]` read only what rounds
    before i brought, those of `leaving[i]` add to nothing that rounds up to i take away.
    """
    return _hidden(program.forward, reshuffle, backward=False), _hidden(program.backward, reshuffle, backward=True)


@dataclass(frozen=True, slots=True)
class _Local:
    """An attend of round `home` that may run in rounds from `first` on of the way in, and up to `last` of the way
    out (none if -1)."""

    row: Row
    first: int
    last: int
    home: int


def _hidden(rounds: Sequence[AttentionRound], reshuffle: ReshuffleProgram, *, backward: bool) -> HiddenRounds:
    moved = [step.num_tokens for step in reshuffle.rounds]
    traffic = [max(_heads(step.sends), _heads(step.receives)) for step in rounds]
    tables = [Attends.of(step.attends) for step in rounds]
    pace = sum(table.num_cells for table in tables) / max(sum(traffic) + (_ALL + _OUT) * sum(moved), 1)
    ways = _Ways(_comings(reshuffle), len(moved), backward)
    fixed, kept, free = list[Attends](), list[list[_Local]](), list[_Local]()
    for home, (table, weight) in enumerate(zip(tables, traffic, strict=True)):
        others, local = ways.parted(table, home)
        mine, rest = _taken(local, pace * weight - others.num_cells)
        fixed.append(others)
        kept.append(mine)
        free += rest
    first, last = (_OUT, _ALL) if backward else (_ALL, _OUT)
    wants = ([pace * heads * each for each in moved] for heads in (first, last))
    entering, leaving, free = _spread(free, *wants)
    for each in free:
        kept[each.home].append(each)
    return HiddenRounds(
        entering=tuple(map(_table, entering)),
        rounds=tuple(
            replace(step, attends=_table(mine, others)) for step, mine, others in zip(rounds, kept, fixed, strict=True)
        ),
        leaving=tuple(map(_table, leaving)),
    )


def _heads(messages: Sequence[Message]) -> int:
    """Heads times tokens."""
    return sum(each.num_tokens * (_KV if each.payload is Payload.KV else _GRAD) for each in messages)


_Coming = tuple[int, int, int]
"""Rows [start, stop) of slot 0, and after how many rounds of the way in they are here."""


def _comings(reshuffle: ReshuffleProgram) -> list[_Coming]:
    """All rows of slot 0 but a padding token, ascending."""
    found = [(*here, 0) for _, here in reshuffle.kept]
    for index, step in enumerate(reshuffle.rounds):
        found += [(*span, index + 1) for span in (step.receive.ranges if step.receive else ())]
    return sorted(found)


@dataclass(frozen=True, slots=True)
class _Ways:
    """When rows of slot 0 come and go in one direction."""

    comings: list[_Coming]
    num_rounds: int
    backward: bool

    def parted(self, table: Attends, home: int) -> tuple[Attends, list[_Local]]:
        """Attends of a round that stay in it, and local ones, cut where rows come together, the least free first.

        Triangles of rows on other rows, which windows have, stay.
        """
        begin, _, slot, key_begin, _, kind = table.columns.T
        is_local = (slot == 0) & ((kind == WHOLE) | ((kind == CAUSAL) & (begin == key_begin)))
        if not (self.num_rounds and self.comings and is_local.any()):
            return table, []
        rows = rows_of(Attends(table.columns[is_local]))
        local = [part for row in rows for part in self._cut(row, home)]
        local.sort(key=lambda each: each.last - each.first)
        return Attends(table.columns[~is_local]), local

    def _cut(self, row: Row, home: int) -> Iterator[_Local]:
        start, stop, _, key_start, key_stop, causal = row
        for begin, end, came in _pieces((start, stop), self.comings):
            if causal:  # queries and keys are the same rows
                yield self._local((begin, end, 0, begin, end, 1), came, came, home=home)
            joined: _Local | None = None
            keys = (start, begin) if causal else (key_start, key_stop)
            for key_begin, key_end, key_came in _pieces(keys, self.comings):
                part = self._local((begin, end, 0, key_begin, key_end, 0), came, key_came, home=home)
                if joined and (joined.first, joined.last) == (part.first, part.last):
                    joined = replace(part, row=(*joined.row[:4], key_end, 0))
                    continue
                if joined:
                    yield joined
                joined = part
            if joined:
                yield joined

    def _local(self, row: Row, came: int, key_came: int, *, home: int) -> _Local:
        last, key_last = (self.num_rounds - 1 if each == 0 else each - 2 for each in (came, key_came))
        if self.backward:
            return _Local(row, came, min(last, key_last), home)
        return _Local(row, max(came, key_came), last, home)


def _pieces(span: Range, comings: Sequence[_Coming]) -> Iterator[_Coming]:
    """`span`, cut where rows come together; nothing of an empty one."""
    start, stop = span
    for begin, end, came in comings[max(bisect_right(comings, (start, stop, 0)) - 1, 0) :]:
        if begin >= stop:
            break
        if max(begin, start) < min(end, stop):
            yield max(begin, start), min(end, stop), came


def _taken(locals_: Sequence[_Local], cells: float) -> tuple[list[_Local], list[_Local]]:
    """About the first `cells`, and what is left."""
    taken: list[_Local] = []
    left: list[_Local] = []
    for each in locals_:
        rows = [each.row]
        found = first_cells(rows, cells=cells)
        cells -= sum(map(cells_of_row, found))
        taken += [replace(each, row=row) for row in found]
        left += [replace(each, row=row) for row in reversed(rows)]
    return taken, left


@dataclass(slots=True)
class _Way:
    """One way of a reshuffle while its rounds get their cells: an attend may run `since` which round, and a round
    takes at most a `share` of what may run. The rest of a want is due in the next while there is work for it."""

    since: Callable[[_Local], int]
    share: float
    due: float = 0.0
    rounds: list[list[_Local]] = field(default_factory=list)

    def take(self, left: Sequence[_Local], want: float) -> list[_Local]:
        """Give the next round its cells; what is left after that."""
        index = len(self.rounds)
        ready = [each for each in left if self.since(each) <= index]
        self.due += want
        taken, rest = _taken(ready, min(self.due, self.share * _sum(ready)) if want else 0.0)
        self.due = self.due - _sum(taken) if rest else min(self.due - _sum(taken), 0.0)
        self.rounds.append(taken)
        return [*rest, *(each for each in left if self.since(each) > index)]


def _spread(
    free: Sequence[_Local], first: Sequence[float], last: Sequence[float]
) -> tuple[list[list[_Local]], list[list[_Local]], list[_Local]]:
    """What the rounds of the way in and of the way out take when they want `first` and `last` cells, and what is left.

    Both ways are filled from their outer ends, where the fewest attends may run, so that neither takes all that the
    other could have.
    """
    num_rounds, left = len(first), sorted(free, key=lambda each: each.last - each.first)
    share = sum(first) / max(sum(first) + sum(last), 1)
    entering = _Way(since=lambda each: each.first, share=share)
    leaving = _Way(since=lambda each: num_rounds - 1 - each.last, share=1.0)
    for want_in, want_out in zip(first, reversed(last), strict=True):
        left = entering.take(left, want_in)
        left = leaving.take(left, want_out)
    return entering.rounds, leaving.rounds[::-1], left


def _sum(locals_: Sequence[_Local]) -> int:
    return sum(cells_of_row(each.row) for each in locals_)


def _table(mine: Sequence[_Local], others: Attends | None = None) -> Attends:
    """In an order in which queries of one kind ascend: few calls of a kernel."""
    rows = sorted((each.row for each in mine), key=lambda row: (-row[5], row[0], row[3]))
    columns = np.array(rows, np.int64).reshape(-1, 6)
    return Attends(columns if others is None else np.concatenate((columns, others.columns)))
