"""Reshuffling: the way of tokens from the order in which a training loop holds them to the plan's, and back.

A loop that brings its own layout (whole packed sequences, a slice of a packed batch) keeps it outside of attention.
On the way in queries, keys and values go to the ranks of the plan, on the way out the outputs go back; in the
backward pass the gradients take the same ways. Tokens whose rank is the same in both layouts do not travel.

No rank can wait for ever: every rank runs the rounds of the way in, those of its attention program and those of the way
out one after the other, and both ends of a parcel have it in the same round; so the earliest round that some rank has
not finished has been posted by both ends of all its parcels, or will be without waiting.

Source: the transparent reshuffler of FCP with blocks (Zhao et al.), section 4.3; rounds without congestion as in 4.2.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rayfcp.program.instructions import Piece
from rayfcp.program.parcels import Pair, Parcel, Range, ReshuffleProgram, ReshuffleRound
from rayfcp.program.placed import merged
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
    from rayfcp.plan.blocks.kernels.colours import Graph, Wishes, colours_of, max_degree  # compiled: loaded on use

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
