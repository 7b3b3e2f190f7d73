"""Reshuffling: the way of tokens from the order in which a training loop holds them to the plan's, and back.

A loop that brings its own layout (whole packed sequences, a slice of a packed batch) keeps it outside of attention.
On the way in queries, keys and values go to the ranks of the plan, on the way out the outputs go back; in the
backward pass the gradients take the same ways. Tokens whose rank is the same in both layouts do not travel.

No rank can wait for ever: every rank runs the rounds of the way in, those of its attention program and those of the way
out one after the other, and both ends of a parcel have it in the same round; so the earliest round that some rank has
not finished has been posted by both ends of all its parcels, or will be without waiting.

Source: the transparent reshuffler of FCP with blocks (Zhao et al.), section 4.3; rounds without congestion as in 4.2.

Local attends beside the exchanges of a reshuffle, so that these are hidden.

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
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from rayfcp.program.columns import CAUSAL, WHOLE, Attends, merged
from rayfcp.program.instructions import (
    AttentionProgram,
    AttentionRound,
    Message,
    Pair,
    Parcel,
    Payload,
    Piece,
    Range,
    ReshuffleProgram,
    ReshuffleRound,
)
from rayfcp.program.paced import Row, cells_of_row, first_cells, rows_of
from rayfcp.values import Layout


def lower_reshuffle(theirs: Sequence[Sequence[Piece]], layout: Layout) -> tuple[ReshuffleProgram, ...]:
    """The reshuffle of each rank for one microbatch.

    Args:
        theirs: what the loop holds, for each rank its pieces in its order.
        layout: where the plan wants the tokens (`rayfcp.plan.lay_out`).

    Invariant: there are as many rounds as the most parcels that one rank sends or receives (the fewest
    without congestion), and there is at most one parcel from one rank to another.

    Raises:
        ValueError: a token of the layout is brought by no rank or twice, one that it does not have is brought, a
            piece is empty, or the layout names further ranks.
    """
    num_ranks = len(theirs)
    ours = _placed(layout, num_ranks=num_ranks)
    brought, placed = _spans(theirs, name="theirs"), _spans(ours, name="layout")
    moves: dict[tuple[int, int], list[Pair]] = defaultdict(list)
    for sequence in sorted(brought.keys() | placed.keys()):
        for source, target, pair in _moves(sequence, brought.get(sequence, []), placed=placed.get(sequence, [])):
            moves[source, target].append(pair)
    for pairs in moves.values():
        pairs.sort(key=lambda pair: pair[1])
    rounds = _rounds(moves, num_ranks=num_ranks)
    return tuple(
        ReshuffleProgram(
            rank=rank,
            num_ranks=num_ranks,
            num_tokens=sum(piece.num_tokens for piece in theirs[rank]),
            num_placed=sum(piece.num_tokens for piece in ours[rank]),
            kept=_joined(moves.get((rank, rank), [])),
            rounds=rounds[rank],
        )
        for rank in range(num_ranks)
    )


@dataclass(frozen=True, slots=True)
class _Span:
    """Tokens `[start, stop)` of a sequence, from row `offset` of `rank` on."""

    start: int
    stop: int
    rank: int
    offset: int

    def rows(self, start: int, *, stop: int) -> Range:
        return self.offset + start - self.start, self.offset + stop - self.start


def _placed(layout: Layout, *, num_ranks: int) -> list[list[Piece]]:
    """What each rank has in slot 0, in order."""
    ours: list[list[Piece]] = [[] for _ in range(num_ranks)]
    for block in layout.blocks:
        if not 0 <= block.rank < num_ranks:
            raise ValueError(
                f"theirs has pieces for {num_ranks} ranks, the layout places tokens on rank {block.rank}; give the "
                "pieces of every rank, none for a rank that brings nothing"
            )
        ours[block.rank].append(Piece(sequence=block.sequence, start=block.start, stop=block.stop))
    return ours


def _spans(ranks: Sequence[Sequence[Piece]], *, name: str) -> Mapping[int, list[_Span]]:
    """By sequence, ascending and disjoint."""
    spans: dict[int, list[_Span]] = defaultdict(list)
    for rank, pieces in enumerate(ranks):
        offset = 0
        for piece in pieces:
            if not 0 <= piece.start < piece.stop:
                raise ValueError(
                    f"{name}: rank {rank} has tokens [{piece.start}, {piece.stop}) of sequence {piece.sequence}, must "
                    "begin at 0 or later and hold at least one; drop empty pieces"
                )
            spans[piece.sequence].append(_Span(piece.start, piece.stop, rank, offset))
            offset += piece.num_tokens
    for sequence, found in spans.items():
        found.sort(key=lambda span: span.start)
        for before, after in pairwise(found):
            if after.start < before.stop:
                raise ValueError(
                    f"{name}: token {after.start} of sequence {sequence} is on rank {before.rank} and again on rank "
                    f"{after.rank}, must be there exactly once; drop one of the pieces"
                )
    return spans


def _moves(sequence: int, brought: list[_Span], *, placed: list[_Span]) -> Iterator[tuple[int, int, Pair]]:
    """(source, target, rows there and here) of a sequence, cut where either layout cuts.

    Raises:
        ValueError: the two do not hold the same tokens.
    """
    bounds = sorted({bound for span in (*brought, *placed) for bound in (span.start, span.stop)})
    at_brought = at_placed = 0
    for start, stop in pairwise(bounds):
        at_brought, source = _holder(brought, at_brought, token=start)
        at_placed, target = _holder(placed, at_placed, token=start)
        where = f"theirs: tokens [{start}, {stop}) of sequence {sequence}"
        if source and not target:
            raise ValueError(
                f"{where} are on rank {source.rank}, but the layout does not have them; bring exactly the tokens "
                "of the microbatch"
            )
        if target and not source:
            raise ValueError(
                f"{where} are on no rank, but the layout has them; bring each token of the microbatch exactly once"
            )
        if source and target:
            yield source.rank, target.rank, (source.rows(start, stop=stop), target.rows(start, stop=stop))


def _holder(spans: list[_Span], at: int, *, token: int) -> tuple[int, _Span | None]:
    """The span that holds a token, looked for from position `at` on, and its position."""
    while at < len(spans) and spans[at].stop <= token:
        at += 1
    return at, spans[at] if at < len(spans) and spans[at].start <= token else None


def _joined(pairs: Sequence[Pair]) -> tuple[Pair, ...]:
    """Neighbours joined that touch in both orders."""
    joined: list[Pair] = []
    for pair in pairs:
        if joined and all(before[1] == after[0] for before, after in zip(joined[-1], pair, strict=True)):
            (there, _), (here, _) = joined.pop()
            joined.append(((there, pair[0][1]), (here, pair[1][1])))
        else:
            joined.append(pair)
    return tuple(joined)


def _rounds(
    moves: Mapping[tuple[int, int], Sequence[Pair]], *, num_ranks: int
) -> tuple[tuple[ReshuffleRound, ...], ...]:
    """The rounds of each rank. Large parcels come first, so that a round's parcels are much alike."""
    from rayfcp.plan.blocks.kernels.rounds import Graph, Wishes, colours_of, max_degree

    parcels = sorted((pair for pair in moves if pair[0] != pair[1]), key=lambda pair: (-_size(moves[pair]), pair))
    if not parcels:
        return ((),) * num_ranks
    source, target = np.array(parcels, np.int64).T
    graph = Graph(np.ascontiguousarray(source), np.ascontiguousarray(target), num_ranks)
    first_fit = Wishes(np.arange(len(parcels)), np.zeros(len(parcels), np.int64))
    colours = colours_of(graph, first_fit).tolist()
    sends: dict[tuple[int, int], Parcel] = {}
    receives: dict[tuple[int, int], Parcel] = {}
    for (sender, receiver), colour in zip(parcels, colours, strict=True):
        there, here = zip(*moves[sender, receiver], strict=True)
        sends[sender, colour] = Parcel(peer=receiver, ranges=merged(there))
        receives[receiver, colour] = Parcel(peer=sender, ranges=merged(here))
    return tuple(
        tuple(
            ReshuffleRound(send=sends.get((rank, colour)), receive=receives.get((rank, colour)))
            for colour in range(max_degree(graph))
        )
        for rank in range(num_ranks)
    )


def _size(pairs: Sequence[Pair]) -> int:
    return sum(stop - start for (start, stop), _ in pairs)


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
