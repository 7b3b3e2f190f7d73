"""Masks and positions of token rows: which tokens are padding, which enter the loss, where documents begin."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

LOSS_MASKS = ("loss_mask", "completion_mask", "assistant_masks", "assistant_mask")
"""Columns with 0 at tokens that do not enter the loss."""
MASK_COLUMNS = ("attention_mask", "position_ids", "token_type_ids", *LOSS_MASKS)
UNREAD_MASKS = dict.fromkeys(
    ("seq_lengths", "cu_seqlens", "seq_idx", "segment_ids", "sequence_ids", "document_ids"),
    "position_ids that begin at 0 in each document",
) | {"loss_weights": "loss_mask"}
"""Columns that change attention or loss weights and are not read, with the column to give instead."""


class Documents(NamedTuple):
    """Documents of a row, token ranges `[start, stop)` without padding, and `in_loss`, bool `[tokens]`: False where a
    mask keeps a token out of the loss; None if there is no such mask."""

    ranges: list[tuple[int, int]]
    in_loss: npt.NDArray[np.bool_] | None


def read_masks(columns: Mapping[str, Any], *, num_tokens: int) -> Documents:
    """Return the documents of a row by its `MASK_COLUMNS`, numbers `[tokens]` each; columns may be absent.

    `attention_mask` is 0 at padding, on one side or on both. `position_ids` count up, and begin at 0 in each document.

    Raises:
        ValueError: A mask has another length, other values, or padding between tokens; positions do not count up;
            tokens are of several types. Names the column.
    """
    masks = {
        name: _numbers(columns[name], name=name, num_tokens=num_tokens) for name in MASK_COLUMNS if name in columns
    }
    types = masks.get("token_type_ids")
    if types is not None and (types != types[:1]).any():
        raise ValueError("token_type_ids has several types, must have one; leave the column out")
    start, stop = _without_padding(masks.get("attention_mask"), num_tokens=num_tokens)
    starts = _document_starts(masks.get("position_ids"), start=start, stop=stop)
    given = [_zeros_and_ones(masks[name], name=name) for name in LOSS_MASKS if name in masks]
    in_loss = np.logical_and.reduce(given) if given else None
    return Documents(list(pairwise([*starts, stop])) if starts else [], in_loss)


def _numbers(values: Any, *, name: str, num_tokens: int) -> npt.NDArray[Any]:
    try:
        numbers = np.asarray(values)
    except (ValueError, OverflowError):  # nested lists of unequal lengths
        numbers = np.empty((0, 0))
    if numbers.ndim != 1 or (numbers.dtype.kind not in "biuf" and numbers.size):
        raise ValueError(f"{name} must be a list of numbers, one for each token")
    if numbers.size != num_tokens:
        raise ValueError(f"{name} has {numbers.size} values for {num_tokens} tokens, must have one for each")
    return numbers


def _zeros_and_ones(mask: npt.NDArray[Any], *, name: str) -> npt.NDArray[np.bool_]:
    wrong = mask[(mask != 0) & (mask != 1)]
    if wrong.size:
        raise ValueError(f"{name} has {wrong[0]}, must be 0 or 1")
    return mask.astype(bool)


def _without_padding(mask: npt.NDArray[Any] | None, *, num_tokens: int) -> tuple[int, int]:
    """Return the range of the tokens that are not padding."""
    if mask is None:
        return 0, num_tokens
    kept = np.flatnonzero(_zeros_and_ones(mask, name="attention_mask"))
    if not kept.size:
        return 0, 0
    start, stop = int(kept[0]), int(kept[-1]) + 1
    if kept.size != stop - start:
        raise ValueError(
            "attention_mask is 0 between tokens, must be 0 at padding before or after them only; separate documents by "
            "position_ids"
        )
    return start, stop


def _document_starts(positions: npt.NDArray[Any] | None, *, start: int, stop: int) -> list[int]:
    if start == stop:
        return []
    if positions is None:
        return [start]
    if positions.dtype.kind not in "iu":
        raise ValueError("position_ids must be integers")
    own = positions[start:stop].astype(np.int64)
    if np.array_equal(own, np.arange(start, stop)):  # positions may also count the padding on the left
        return [start]
    first = own == 0
    follows = np.concatenate([[False], np.diff(own) == 1])
    wrong = np.flatnonzero(~(first | follows))
    if wrong.size:
        at = int(wrong[0])
        before = f" after {own[at - 1]}" if at else ""
        raise ValueError(
            f"position_ids has {own[at]}{before} at token {start + at}, must begin at 0 in each document and count up"
        )
    return [start + int(at) for at in np.flatnonzero(first)]
