"""Reshuffling: bring tokens from the ranks and order in which a training loop holds them to the plan's, and back.

A loop that brings its own layout (whole packed sequences, a slice of a packed batch) keeps it outside of attention.
On the way in queries, keys and values go to the ranks of the plan, on the way out the outputs go back; in the
backward pass the gradients take the same ways. Tokens whose rank is the same in both layouts do not travel.

No rank can wait forever: every rank runs the rounds of the way in, those of its attention program and those of the way
out one after the other, and both ends of a message have it in the same round; so the earliest round that some rank has
not finished has been posted by both ends of all its messages, or will be without waiting.

Local attention does not overlap with these exchanges: moving local attends into their rounds made 13 of 16 simulated
steps slower (`flex-ring`, `flex-block`, 8 and 16 ranks), since the work of a round then differs between ranks, and
these wait for each other in each round.

Source: the transparent reshuffler of FCP with blocks (Zhao et al.), section 4.3, without its local computation at the
beginning and the end; rounds without congestion as in section 4.2.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rayfcp.program.instructions import (
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
    ours = pieces_of(layout, num_ranks=num_ranks)
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


def pieces_of(layout: Layout, *, num_ranks: int) -> list[tuple[Piece, ...]]:
    """The pieces in each rank's slot 0, in order."""
    ours: list[list[Piece]] = [[] for _ in range(num_ranks)]
    for block in layout.blocks:
        if not 0 <= block.rank < num_ranks:
            raise ValueError(
                f"the layout places tokens on rank {block.rank}, must be one of [0, {num_ranks}); give pieces of every "
                "rank, none for a rank that brings nothing"
            )
        ours[block.rank].append(Piece(sequence=block.sequence, start=block.start, stop=block.stop))
    return [tuple(each) for each in ours]


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
