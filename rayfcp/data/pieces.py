"""Rows that are too long: cut, split or dropped; pictures stay whole."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.integer]
Range = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Tokens `[starts, stops)` of `rows`, `[pieces]` each, ascending by row and start."""

    rows: Integers
    starts: Integers
    stops: Integers


def cut_rows(rows: Integers, *, lengths: Lengths, max_seqlen: int) -> Pieces:
    """The first `max_seqlen` tokens of each row."""
    stops = np.minimum(lengths, max_seqlen).astype(np.int64)
    return Pieces(rows=rows, starts=np.zeros_like(stops), stops=stops)


def drop_rows(rows: Integers, *, lengths: Lengths, max_seqlen: int) -> Pieces:
    """The rows of at most `max_seqlen` tokens."""
    kept = lengths <= max_seqlen
    return cut_rows(rows[kept], lengths=lengths[kept], max_seqlen=max_seqlen)


def split_rows(rows: Integers, *, lengths: Lengths, max_seqlen: int) -> Pieces:
    """Consecutive pieces of `max_seqlen` tokens, a row's last one shorter; one of one token only if it is a row."""
    num_pieces = -(-lengths.astype(np.int64) // max_seqlen)
    of_row = np.repeat(np.arange(rows.size), num_pieces)
    number_in_row = np.arange(of_row.size) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    starts = number_in_row * max_seqlen
    stops = np.minimum(starts + max_seqlen, lengths[of_row])
    kept = (stops - starts > 1) | (lengths[of_row] == 1)
    return Pieces(rows=rows[of_row[kept]], starts=starts[kept], stops=stops[kept])


def around_pictures(
    pieces: Pieces, *, lengths: Lengths, spans_of: Mapping[int, Sequence[Range]], max_seqlen: int, split: bool
) -> tuple[Pieces, int]:
    """`pieces` of rows, with those of the rows in `spans_of` made anew so that no span of tokens is cut; and of how
    many of these a span is longer than a piece, so that it and what follows is lost. `lengths`: by row."""
    kept = ~np.isin(pieces.rows, list(spans_of))
    found, num_lost = [], 0
    for row, spans in spans_of.items():
        own, reached = clear_pieces(int(lengths[row]), spans, max_seqlen=max_seqlen, split=split)
        found += [(row, *piece) for piece in own]
        num_lost += reached < lengths[row] if split else not own
    new = np.array(found, dtype=np.int64).reshape(-1, 3)
    old = np.stack([pieces.rows[kept], pieces.starts[kept], pieces.stops[kept]], axis=1)
    both = np.concatenate([old, new])
    rows, starts, stops = both[np.lexsort((both[:, 1], both[:, 0]))].T
    return Pieces(rows=rows, starts=starts, stops=stops), int(num_lost)


def clear_pieces(length: int, spans: Sequence[Range], *, max_seqlen: int, split: bool) -> tuple[list[Range], int]:
    """A row's first piece of at most `max_seqlen` tokens, or (`split`) consecutive ones, each as long as it can be,
    that cut none of `spans`, ascending and apart; and how many tokens they reach over. Pieces of one token are left
    out.

    >>> clear_pieces(20, [(6, 9), (14, 16)], max_seqlen=8, split=True)
    ([(0, 6), (6, 14), (14, 20)], 20)
    >>> clear_pieces(20, [(6, 15)], max_seqlen=8, split=True), clear_pieces(20, [(0, 9)], max_seqlen=8, split=False)
    (([(0, 6)], 6), ([], 0))
    """
    pieces: list[Range] = []
    start = 0
    while start < length and (split or not start):
        stop = min(start + max_seqlen, length)
        stop = next((first for first, last in spans if first < stop < last), stop)
        if stop <= start:
            break
        if stop - start > 1:
            pieces.append((start, stop))
        start = stop
    return pieces, start
