"""Rows for distillation: token ids, and at each position the words that a teacher finds likeliest to follow."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rayfcp.data.account import ReadAccount
from rayfcp.data.masks import MASK_COLUMNS
from rayfcp.data.messages import Forms
from rayfcp.data.pretokenized import cut_row
from rayfcp.data.rows import TEACHER_COLUMNS, BadReason, BadRowError, TokenRow, largest_id, make_row

_NEEDED = ("input_ids", *TEACHER_COLUMNS)
DISTILLED_FORMS: Forms = ((_NEEDED, ("labels", *MASK_COLUMNS)),)


def distilled_rows(record: Mapping[str, Any], *, account: ReadAccount) -> list[TokenRow]:
    """Return the samples of a record of `DISTILLED_FORMS`: its documents, without padding. The teacher's columns are
    lists `[tokens]` of lists of one length, or arrays `[tokens, words]`; logits that differ by a constant at a position
    mean the same.

    Raises:
        BadRowError: As `token_rows`; other shapes, a word twice at a position, or values that are not finite numbers.
    """
    row = make_row(record["input_ids"], labels=record.get("labels"))
    words, logits = (_table(record[name], column=name) for name in TEACHER_COLUMNS)
    if words.dtype.kind not in "iu":
        raise BadRowError(BadReason.WRONG_TYPE, "teacher_words must hold integers only")
    if words.shape != logits.shape or len(words) != row.tokens.size:
        shapes = " and ".join(f"{name} of {len(each)} x {each.shape[1]}" for name, each in _named(words, logits))
        raise BadRowError(BadReason.TEACHER_MISMATCH, f"{shapes} for {row.tokens.size} tokens, must have one list each")
    largest = max(row.max_token_id, largest_id(words, column="teacher_words"))
    _check_words_differ(words)
    with np.errstate(over="ignore"):
        logits = logits.astype(np.float32)
    if not np.isfinite(logits).all():
        raise BadRowError(BadReason.NOT_FINITE, "teacher_logits must be finite; leave words without probability out")
    whole = replace(row, max_token_id=largest, teacher=(words.astype(np.int32), logits))
    return cut_row(whole, masks={name: record[name] for name in MASK_COLUMNS if name in record}, account=account)


def _check_words_differ(words: npt.NDArray[Any]) -> None:
    in_order = np.sort(words, axis=1)
    repeated = np.argwhere(in_order[:, 1:] == in_order[:, :-1])
    if repeated.size:
        position, place = repeated[0]
        detail = f"teacher_words has {in_order[position, place]} twice at position {position}, must have a word once"
        raise BadRowError(BadReason.REPEATED_WORD, detail)


def _named(*tables: npt.NDArray[Any]) -> list[tuple[str, npt.NDArray[Any]]]:
    return list(zip(TEACHER_COLUMNS, tables, strict=True))


def _table(values: Any, *, column: str) -> npt.NDArray[Any]:
    """Numbers `[tokens, words]`, with a word at least."""
    try:
        table = np.asarray(values)
    except ValueError:  # lists of several lengths
        table = np.empty(0)
    if table.ndim != 2 or not table.size:
        raise BadRowError(
            BadReason.TEACHER_MISMATCH, f"{column} must have a list for each token, all of one length from 1 on"
        )
    if table.dtype.kind not in "iuf":
        raise BadRowError(BadReason.WRONG_TYPE, f"{column} must hold numbers only")
    return table
