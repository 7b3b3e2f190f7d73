"""Rows that are too long: cut, split or dropped."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.integer]


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
