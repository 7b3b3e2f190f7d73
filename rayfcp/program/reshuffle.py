"""Reshuffling: bring tokens from the ranks and order in which a training loop holds them to the plan's, and back.

A loop that brings its own layout (whole packed sequences, a slice of a packed batch) keeps it outside of attention.
On the way in queries, keys and values go to the ranks of the plan, on the way out the outputs go back; in the
backward pass the gradients take the same ways. Tokens whose rank is the same in both layouts do not travel.

No rank can wait forever: every rank runs the rounds of the way in, those of its attention program and those of the way
out one after the other, and both ends of a message have it in the same round; so the earliest round that some rank has
not finished has been posted by both ends of all its messages, or will be without waiting.

`hide` overlaps these exchanges with local attends, which read slot 0, filled and emptied by the reshuffle round by
round. An attend may run

- on the way in, after the rounds that bring the rows that it reads: rows that stayed are there from the start;
- on the way out, before the round that sends away the rows that it adds to: rows that stay are never sent.

Forward it reads its queries and keys and adds to the outputs of its queries. Backward, when slot 0 still has keys and
values and the gradients of outputs arrive, it reads its queries and adds to the gradients of queries and keys. Rows
that came first go first: early ones are attended to on the way in, late ones on the way out.

Each round, of the reshuffle and of the program, should get pairs in proportion to the tokens that it carries; the
rounds of the program have those of their messages already. Local attends move between rounds and are cut; the pairs
and the messages stay the same.

Source: the transparent reshuffler of FCP with blocks (Zhao et al.), section 4.3, local computation at the beginning and
the end included; rounds without congestion as in section 4.2.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from rayfcp.program.attends import Row, first_pairs, pairs_of_row, rows_of
from rayfcp.program.instructions import (
    CAUSAL,
    WHOLE,
    Attends,
    AttentionProgram,
    AttentionRound,
    Message,
    Payload,
    Piece,
    Range,
    ReshuffleMessage,
    ReshuffleProgram,
    ReshuffleRound,
    RowPair,
    merged,
)
from rayfcp.values import Layout


def lower_reshuffle(theirs: Sequence[Sequence[Piece]], layout: Layout) -> tuple[ReshuffleProgram, ...]:
    """The reshuffle of each rank for one microbatch.

    Args:
        theirs: the pieces that the loop holds on each rank, in its order.
        layout: where the plan places the tokens (`rayfcp.plan.lay_out`).

    Invariant: there are as many rounds as the most messages that one rank sends or receives (the fewest
    without congestion), and there is at most one message from one rank to another.

    Raises:
        ValueError: a token of the layout is brought by no rank or twice, one that it does not have is brought, a
            piece is empty, or the layout names further ranks.
    """
    num_ranks = len(theirs)
    ours = _placed(layout, num_ranks=num_ranks)
    brought, placed = _spans(theirs, name="theirs"), _spans(ours, name="layout")
    moves: dict[tuple[int, int], list[RowPair]] = defaultdict(list)
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
    """The pieces in each rank's slot 0, in order."""
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
    """The spans of each sequence, ascending and disjoint."""
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


def _moves(sequence: int, brought: list[_Span], *, placed: list[_Span]) -> Iterator[tuple[int, int, RowPair]]:
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


def _joined(pairs: Sequence[RowPair]) -> tuple[RowPair, ...]:
    """Neighbours joined that touch in both orders."""
    joined: list[RowPair] = []
    for pair in pairs:
        if joined and all(before[1] == after[0] for before, after in zip(joined[-1], pair, strict=True)):
            (there, _), (here, _) = joined.pop()
            joined.append(((there, pair[0][1]), (here, pair[1][1])))
        else:
            joined.append(pair)
    return tuple(joined)


def _rounds(
    moves: Mapping[tuple[int, int], Sequence[RowPair]], *, num_ranks: int
) -> tuple[tuple[ReshuffleRound, ...], ...]:
    """The rounds of each rank, by edge coloring. Large messages come first, so that a round's are of like size."""
    from rayfcp.plan.blocks.kernels.edge_coloring import Graph, Preferences, edge_coloring, max_degree

    edges = sorted((pair for pair in moves if pair[0] != pair[1]), key=lambda pair: (-_size(moves[pair]), pair))
    if not edges:
        return ((),) * num_ranks
    source, target = np.array(edges, np.int64).T
    graph = Graph(np.ascontiguousarray(source), np.ascontiguousarray(target), num_ranks)
    first_fit = Preferences(np.arange(len(edges)), np.zeros(len(edges), np.int64))
    colors = edge_coloring(graph, first_fit).tolist()
    sends: dict[tuple[int, int], ReshuffleMessage] = {}
    receives: dict[tuple[int, int], ReshuffleMessage] = {}
    for (sender, receiver), color in zip(edges, colors, strict=True):
        there, here = zip(*moves[sender, receiver], strict=True)
        sends[sender, color] = ReshuffleMessage(peer=receiver, ranges=merged(there))
        receives[receiver, color] = ReshuffleMessage(peer=sender, ranges=merged(here))
    return tuple(
        tuple(
            ReshuffleRound(send=sends.get((rank, color)), receive=receives.get((rank, color)))
            for color in range(max_degree(graph))
        )
        for rank in range(num_ranks)
    )


def _size(pairs: Sequence[RowPair]) -> int:
    return sum(stop - start for (start, stop), _ in pairs)


QUERY_HEADS = 4
"""Query heads per KV head that the pairs of a round are estimated with; any model runs exactly."""

_KV, _GRAD, _OUT, _ALL = 2, 4, QUERY_HEADS, QUERY_HEADS + 2
"""Heads that travel with a token: keys and values, their gradients in twice the bytes, outputs, and all of q, k, v."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenRounds:
    """One direction of an attention program around a reshuffle; `entering[i]` and `leaving[i]` are computed while
    round i of the reshuffle runs, `rounds` are the program's with the attends that are left."""

    entering: tuple[Attends, ...]
    rounds: tuple[AttentionRound, ...]
    leaving: tuple[Attends, ...]


def hide(program: AttentionProgram, reshuffle: ReshuffleProgram) -> tuple[HiddenRounds, HiddenRounds]:
    """Forward and backward of a rank with local attends moved to the rounds of its reshuffle.

    Invariant: each direction computes exactly the pairs of the program. Those of `entering[i]` read only what rounds
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
    pace = sum(table.num_pairs for table in tables) / max(sum(traffic) + (_ALL + _OUT) * sum(moved), 1)
    times = _RowTimes(_arrivals(reshuffle), len(moved), backward)
    fixed, kept, free = list[Attends](), list[list[_Local]](), list[_Local]()
    for home, (table, weight) in enumerate(zip(tables, traffic, strict=True)):
        others, local = times.parted(table, home)
        mine, rest = _taken(local, pace * weight - others.num_pairs)
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


_Arrival = tuple[int, int, int]
"""Rows [start, stop) of slot 0, and the number of rounds of the way in after which they are there."""


def _arrivals(reshuffle: ReshuffleProgram) -> list[_Arrival]:
    """All rows of slot 0 but a padding token, ascending."""
    found = [(*here, 0) for _, here in reshuffle.kept]
    for index, step in enumerate(reshuffle.rounds):
        found += [(*span, index + 1) for span in (step.receive.ranges if step.receive else ())]
    return sorted(found)


@dataclass(frozen=True, slots=True)
class _RowTimes:
    """Arrival and departure of the rows of slot 0 in one direction."""

    arrivals: list[_Arrival]
    num_rounds: int
    backward: bool

    def parted(self, table: Attends, home: int) -> tuple[Attends, list[_Local]]:
        """Attends of a round that stay in it, and local ones, cut into rows that arrive together, the least free first.

        Triangles of rows on other rows, which windows have, stay.
        """
        begin, _, slot, key_begin, _, kind = table.columns.T
        is_local = (slot == 0) & ((kind == WHOLE) | ((kind == CAUSAL) & (begin == key_begin)))
        if not (self.num_rounds and self.arrivals and is_local.any()):
            return table, []
        rows = rows_of(Attends(table.columns[is_local]))
        local = [part for row in rows for part in self._cut(row, home)]
        local.sort(key=lambda each: each.last - each.first)
        return Attends(table.columns[~is_local]), local

    def _cut(self, row: Row, home: int) -> Iterator[_Local]:
        start, stop, _, key_start, key_stop, causal = row
        for begin, end, came in _pieces((start, stop), self.arrivals):
            if causal:  # queries and keys are the same rows
                yield self._local((begin, end, 0, begin, end, 1), came, came, home=home)
            joined: _Local | None = None
            keys = (start, begin) if causal else (key_start, key_stop)
            for key_begin, key_end, key_came in _pieces(keys, self.arrivals):
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


def _pieces(span: Range, arrivals: Sequence[_Arrival]) -> Iterator[_Arrival]:
    """`span`, cut into rows that arrive together."""
    start, stop = span
    for begin, end, came in arrivals[max(bisect_right(arrivals, (start, stop, 0)) - 1, 0) :]:
        if begin >= stop:
            break
        if max(begin, start) < min(end, stop):
            yield max(begin, start), min(end, stop), came


def _taken(locals_: Sequence[_Local], pairs: float) -> tuple[list[_Local], list[_Local]]:
    """About the first `pairs`, and the rest."""
    taken: list[_Local] = []
    left: list[_Local] = []
    for each in locals_:
        rows = [each.row]
        found = first_pairs(rows, pairs=pairs)
        pairs -= sum(map(pairs_of_row, found))
        taken += [replace(each, row=row) for row in found]
        left += [replace(each, row=row) for row in reversed(rows)]
    return taken, left


@dataclass(slots=True)
class _Way:
    """One way of a reshuffle while its rounds are filled: an attend may run from round `since` on, and a round takes at
    most a `share` of the attends that may run. What a round lacks is due in the next one while there is work for it."""

    since: Callable[[_Local], int]
    share: float
    due: float = 0.0
    rounds: list[list[_Local]] = field(default_factory=list)

    def take(self, left: Sequence[_Local], want: float) -> list[_Local]:
        """Fill the next round with `want` pairs; returns the attends that are left."""
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
    """The attends of the rounds of both ways, in and out, which should get `first` and `last` pairs, and the rest.

    Both ways are filled from their outer ends, where the fewest attends may run, so that neither starves the other.
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
    return sum(pairs_of_row(each.row) for each in locals_)


def _table(mine: Sequence[_Local], others: Attends | None = None) -> Attends:
    """Ordered so that queries of one kind ascend: few kernel calls."""
    rows = sorted((each.row for each in mine), key=lambda row: (-row[5], row[0], row[3]))
    columns = np.array(rows, np.int64).reshape(-1, 6)
    return Attends(columns if others is None else np.concatenate((columns, others.columns)))
