"""Rows on their way from a file to a shard, and how rows longer than `data.max_seqlen` become samples."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from rayfcp.data.tokenizer import TokenArray

if TYPE_CHECKING:
    from rayfcp.data.vision.layout import RowImages

Integers = npt.NDArray[np.int64]
TeacherRows = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]
"""The likeliest words by a teacher at each position, and their logits, `[tokens, words]`."""
Lengths = npt.NDArray[np.integer]
LongSequences = Literal["auto", "cut", "split", "drop"]

IGNORED = -100
"""Label, and target, of a position that does not enter the loss."""
MAX_TOKEN_ID = 2**31 - 1
TEACHER_COLUMNS = ("teacher_words", "teacher_logits")


def printable(name: str) -> str:
    """Return the name, e.g. of a file, with escapes in place of line ends and of what no encoding can write.

    >>> printable("a\\udcff\\n.jsonl")
    'a\\\\udcff\\\\n.jsonl'
    """
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in name)


class BadReason(StrEnum):
    """Reason for which a row is skipped."""

    EMPTY = "empty"
    NOT_UTF8 = "not_utf8"
    BAD_JSON = "bad_json"
    WRONG_TYPE = "wrong_type"
    MISSING_COLUMN = "missing_column"
    TOKEN_OUT_OF_RANGE = "token_out_of_range"
    LABELS_MISMATCH = "labels_mismatch"
    IMAGE_MISSING = "picture_missing"
    IMAGE_UNREADABLE = "picture_unreadable"
    IMAGE_TOO_LARGE = "picture_too_large"
    IMAGE_SHAPE = "picture_shape"
    IMAGE_BROKEN = "picture_broken"
    MARKERS_MISMATCH = "markers_mismatch"
    BAD_MESSAGES = "bad_messages"
    BAD_WEIGHT = "bad_weight"
    NO_CHAT_TEMPLATE = "no_chat_template"
    TEMPLATE_ERROR = "template_error"
    PROMPT_MISMATCH = "prompt_mismatch"
    MARKS_MISMATCH = "marks_mismatch"
    TOKEN_ACROSS_BORDER = "token_across_border"
    NO_TARGETS = "no_targets"
    NO_PROMPT = "no_prompt"
    EQUAL_ANSWERS = "equal_answers"
    TEACHER_MISMATCH = "teacher_mismatch"
    REPEATED_WORD = "repeated_word"
    NOT_FINITE = "not_finite"
    NOT_RENDERED = "not_rendered"
    UNUSED_COLUMN = "unused_column"
    NO_PROCESSOR = "no_processor"
    MASK_MISMATCH = "mask_mismatch"
    BAD_POSITIONS = "bad_positions"


_DETAIL_LENGTH = 240


class BadRowError(Exception):
    """A row cannot be used. Carries reason and detail (a text, or the error that occurred, cut to one line) to the
    caller that knows the row's file and number. `num_rows`: rows that are lost with it, itself included; `num_images`:
    images and videos in it, as far as they were counted."""

    num_images = 0

    def __init__(self, reason: BadReason, detail: str | Exception = "", *, num_rows: int = 1) -> None:
        super().__init__(reason, detail)
        if isinstance(detail, Exception):
            detail = str(detail) or type(detail).__name__
        self.num_rows = num_rows
        self.reason, self.detail = reason, printable(" ".join(detail.split()))[:_DETAIL_LENGTH]

    def at(self, url: str, *, row: int) -> "BadRow":
        """Return the skipped row of the file at `url`."""
        counts = {"num_rows": self.num_rows, "num_images": self.num_images}
        return BadRow(shard=url, row=row, reason=self.reason, detail=self.detail, **counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """A skipped row: number `row` (from 0) of the file `shard`, and the `num_rows - 1` rows after it; with `num_images`
    images and videos."""

    shard: str
    row: int
    reason: BadReason
    detail: str = ""
    num_rows: int = 1
    num_images: int = 0

    @property
    def place(self) -> str:
        """File and number of the row, counted from 1."""
        return printable(f"{self.shard} row {self.row + 1}")

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}" + (printable(f" ({self.detail})") if self.detail else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRow:
    """A row as its file has it, in one of four forms: a text, or values keyed by column: of tokens with their labels
    and masks, of rows with images, or of a conversation. `ignored`: columns with values that the form does not use."""

    row: int
    text: str | None = None
    tokens: Mapping[str, Any] | None = None
    media: Mapping[str, Any] | None = None
    chat: Mapping[str, Any] | None = None
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """Checked tokens `[tokens]`, at least one; `labels` `[tokens]`, or None where the tokens are the labels.

    `num_targets` counts the positions after the first whose label is not -100; `max_token_id` covers labels and the
    teacher's words. `num_rows`: 1, or 0 for a further sample of the row before.
    """

    tokens: TokenArray
    labels: TokenArray | None
    num_targets: int
    max_token_id: int
    images: "RowImages | None" = None
    teacher: TeacherRows | None = None
    num_rows: int = 1


def checked_text(value: Any, *, name: str) -> str:
    """Return a text that is not empty, from str or UTF-8 bytes.

    Raises:
        BadRowError: It is anything else.
    """
    if not isinstance(value, str | bytes):
        raise BadRowError(BadReason.WRONG_TYPE, f"{name} is {'null' if value is None else 'not text'}")
    if not value:
        raise BadRowError(BadReason.EMPTY)
    try:
        if isinstance(value, bytes):
            return value.decode()
        value.encode()
    except UnicodeDecodeError as error:
        raise BadRowError(BadReason.NOT_UTF8, f"byte {error.start}") from error
    except UnicodeEncodeError as error:
        raise BadRowError(BadReason.NOT_UTF8, "half of a surrogate pair") from error
    return value


def make_row(tokens: Any, *, labels: Any = None) -> TokenRow:
    """Check token ids in `[0, 2^31)`, and labels in the same range or -100; the model's vocabulary is checked by
    `LengthIndex`.

    Raises:
        BadRowError: Empty, not integers, out of range, or labels of another length.
    """
    ids = _integers(tokens, column="input_ids")
    if ids.size == 0:
        raise BadRowError(BadReason.EMPTY)
    largest = largest_id(ids, column="input_ids")
    if labels is None:
        return TokenRow(tokens=ids.astype(np.int32), labels=None, num_targets=ids.size - 1, max_token_id=largest)
    marks = _integers(labels, column="labels")
    if marks.size != ids.size:
        raise BadRowError(BadReason.LABELS_MISMATCH, f"{marks.size} labels for {ids.size} tokens")
    kept = marks[marks != IGNORED]
    if kept.size:
        largest = max(largest, largest_id(kept, column="labels"))
    num_targets = int(np.count_nonzero(marks[1:] != IGNORED))
    ids, marks = ids.astype(np.int32), marks.astype(np.int32)
    return TokenRow(tokens=ids, labels=marks, num_targets=num_targets, max_token_id=largest)


def _integers(values: Any, *, column: str) -> npt.NDArray[Any]:
    if isinstance(values, list):
        if not all(type(value) is int for value in values):
            raise BadRowError(BadReason.WRONG_TYPE, f"{column} must hold integers only")
        try:
            return np.array(values, dtype=np.int64)
        except OverflowError as error:
            raise BadRowError(BadReason.TOKEN_OUT_OF_RANGE, f"{column} has numbers of more than 64 bits") from error
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "iu":
        raise BadRowError(BadReason.WRONG_TYPE, f"{column} must be a list of integers")
    return values


def largest_id(ids: npt.NDArray[Any], *, column: str) -> int:
    """The largest of some token ids.

    Raises:
        BadRowError: One is negative, or more than any vocabulary has.
    """
    smallest, largest = int(ids.min()), int(ids.max())
    if smallest < 0 or largest > MAX_TOKEN_ID:
        wrong = smallest if smallest < 0 else largest
        raise BadRowError(BadReason.TOKEN_OUT_OF_RANGE, f"{column} has {wrong}, must be in [0, {MAX_TOKEN_ID + 1})")
    return largest


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRanges:
    """Tokens `[starts, stops)` of `rows`, `[ranges]` each, ascending by row and start."""

    rows: Integers
    starts: Integers
    stops: Integers


def sample_ranges(rows: Integers, *, lengths: Lengths, max_seqlen: int, long_sequences: LongSequences) -> RowRanges:
    """Samples of `rows`: rows of more than `max_seqlen` tokens are cut to it ("auto" too), split into consecutive
    samples, or dropped. A last sample of a single token has no target and is left out, unless it is the whole row."""
    if long_sequences == "drop":
        kept = lengths <= max_seqlen
        rows, lengths = rows[kept], lengths[kept]
    lengths = lengths.astype(np.int64)
    num_ranges = -(-lengths // max_seqlen) if long_sequences == "split" else np.ones_like(lengths)
    of_row = np.repeat(np.arange(rows.size), num_ranges)
    number_in_row = np.arange(of_row.size) - np.repeat(np.cumsum(num_ranges) - num_ranges, num_ranges)
    starts = number_in_row * max_seqlen
    stops = np.minimum(starts + max_seqlen, lengths[of_row])
    kept = (stops - starts > 1) | (num_ranges[of_row] == 1)
    return RowRanges(rows=rows[of_row[kept]], starts=starts[kept], stops=stops[kept])
