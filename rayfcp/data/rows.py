"""Rows that are too long: cut, split or dropped; pictures stay whole.

Rows on their way from a file to a shard: as they were read, as tokens, or as broken ones with the reason.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from rayfcp.data.tokenizer import TokenArray

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


IGNORED = -100
MAX_TOKEN_ID = 2**31 - 1


class BadReason(StrEnum):
    """Why a row is left out."""

    EMPTY = "empty"
    NOT_UTF8 = "not_utf8"
    BAD_JSON = "bad_json"
    WRONG_TYPE = "wrong_type"
    MISSING_COLUMN = "missing_column"
    TOKEN_OUT_OF_RANGE = "token_out_of_range"
    LABELS_MISMATCH = "labels_mismatch"
    UNREADABLE = "unreadable"
    PICTURE_MISSING = "picture_missing"
    PICTURE_UNREADABLE = "picture_unreadable"
    PICTURE_TOO_LARGE = "picture_too_large"
    MARKERS_MISMATCH = "markers_mismatch"


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """A row that is left out: `row` (from 0) of the file `shard`, and the `num_rows - 1` rows after it."""

    shard: str
    row: int
    reason: BadReason
    detail: str = ""
    num_rows: int = 1

    def __str__(self) -> str:
        return f"{self.shard} row {self.row}: {self.reason}" + (f" ({self.detail})" if self.detail else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class RawPictures:
    """What a file says of a row with pictures or messages; as it was read, nothing is checked. `text` is None where
    there are messages."""

    text: Any = None
    messages: Any = None
    images: Any = None
    videos: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRow:
    """What a file says: `text`, or `tokens` as a list or integer array, with `labels` of the same kind or None; or
    `pictures`, which cannot be used with tokens."""

    row: int
    text: str | None = None
    tokens: Any = None
    labels: Any = None
    pictures: RawPictures | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPictures:
    """The pictures of a row: `items` and `runs` as `rayfcp.data.vision.layout` has them, int64 `[items, 7]` and
    `[runs, 5]`, and `parts`, the files that the items are made of."""

    items: npt.NDArray[np.int64]
    runs: npt.NDArray[np.int64]
    parts: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Checked tokens `[tokens]`, at least one; `labels` `[tokens]` or None where the tokens are the labels.

    `num_targets` counts the positions after the first whose label is not -100; `max_token_id` covers labels.
    """

    tokens: TokenArray
    labels: TokenArray | None
    num_targets: int
    max_token_id: int
    pictures: RowPictures | None = None


class BadRowError(Exception):
    """A row cannot be used; carries reason and detail up to where the row's place is known."""

    def __init__(self, reason: BadReason, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


def make_row(tokens: Any, *, labels: Any = None, vocab_size: int | None) -> Row:
    """The checked row of token ids in `[0, vocab_size)` (32 bits if None) and labels: likewise, or -100.

    Raises:
        BadRowError: Empty, not integers, out of range, or labels that do not match.
    """
    limit = MAX_TOKEN_ID if vocab_size is None else vocab_size - 1
    ids = _integers(tokens, column="input_ids")
    if ids.size == 0:
        raise BadRowError(BadReason.EMPTY)
    largest = _check_range(ids, limit=limit, column="input_ids")
    if labels is None:
        return Row(tokens=ids.astype(np.int32), labels=None, num_targets=ids.size - 1, max_token_id=largest)
    marks = _integers(labels, column="labels")
    if marks.size != ids.size:
        raise BadRowError(BadReason.LABELS_MISMATCH, f"{marks.size} labels for {ids.size} tokens")
    kept = marks[marks != IGNORED]
    if kept.size:
        largest = max(largest, _check_range(kept, limit=limit, column="labels"))
    targets = int(np.count_nonzero(marks[1:] != IGNORED))
    return Row(tokens=ids.astype(np.int32), labels=marks.astype(np.int32), num_targets=targets, max_token_id=largest)


def _integers(values: Any, *, column: str) -> npt.NDArray[Any]:
    """The values as an array of whole numbers `[tokens]`."""
    if isinstance(values, list):
        if not all(type(value) is int for value in values):
            raise BadRowError(BadReason.WRONG_TYPE, f"{column} must hold whole numbers only")
        try:
            return np.array(values, dtype=np.int64)
        except OverflowError as error:
            raise BadRowError(BadReason.TOKEN_OUT_OF_RANGE, f"{column} has numbers of more than 64 bits") from error
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "iu":
        raise BadRowError(BadReason.WRONG_TYPE, f"{column} must be a list of whole numbers")
    return values


def _check_range(ids: npt.NDArray[Any], *, limit: int, column: str) -> int:
    """The largest id."""
    smallest, largest = int(ids.min()), int(ids.max())
    if smallest < 0 or largest > limit:
        wrong = smallest if smallest < 0 else largest
        raise BadRowError(BadReason.TOKEN_OUT_OF_RANGE, f"{column} has {wrong}, must be in [0, {limit + 1})")
    return largest
