"""Make samples of rows that are tokens already, with labels, masks and positions."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rayfcp.data.account import ReadAccount
from rayfcp.data.masks import MASK_COLUMNS, Documents, read_masks
from rayfcp.data.rows import IGNORED, BadReason, BadRowError, TokenRow, make_row


def token_rows(columns: Mapping[str, Any], *, account: ReadAccount) -> list[TokenRow]:
    """Return the samples of a row with `input_ids`: one for each of its documents, without padding, which is counted.

    A label of the row, or a token if there are no labels, is a target unless a mask says otherwise. A document of one
    token has no target, and is left out of a row with others.

    Raises:
        BadRowError: As `make_row` and `read_masks`; nothing but padding.
    """
    whole = make_row(columns["input_ids"], labels=columns.get("labels"))
    masks = {name: columns[name] for name in MASK_COLUMNS if columns.get(name) is not None}
    return cut_row(whole, masks=masks, account=account) if masks else [whole]


def cut_row(whole: TokenRow, *, masks: Mapping[str, Any], account: ReadAccount) -> list[TokenRow]:
    """Return the documents of a checked row by its masks, see `token_rows`.

    Raises:
        BadRowError: As `token_rows`.
    """
    num_tokens = whole.tokens.size
    try:
        documents = read_masks(masks, num_tokens=num_tokens)
    except ValueError as error:
        reason = BadReason.BAD_POSITIONS if str(error).startswith("position_ids") else BadReason.MASK_MISMATCH
        raise BadRowError(reason, error) from error
    if not documents.ranges:
        raise BadRowError(BadReason.EMPTY, "attention_mask is 0 at all tokens")
    if documents.in_loss is None and documents.ranges == [(0, num_tokens)]:
        return [whole]
    return _documents(whole, documents, account=account)


def _documents(whole: TokenRow, documents: Documents, *, account: ReadAccount) -> list[TokenRow]:
    ranges, in_loss = documents
    labels = whole.labels
    if in_loss is not None:
        labels = np.where(in_loss, whole.tokens if labels is None else labels, np.int32(IGNORED))
    padding = whole.tokens.size - (ranges[-1][1] - ranges[0][0])
    if padding:
        account.count("removed_tokens", "padding", by=padding)
    kept = [(start, stop) for start, stop in ranges if stop - start > 1] or ranges[:1]
    if len(kept) < len(ranges):
        account.count("removed_tokens", "documents of one token", by=len(ranges) - len(kept))
    return [
        replace(
            make_row(whole.tokens[start:stop], labels=None if labels is None else labels[start:stop]),
            teacher=whole.teacher and (whole.teacher[0][start:stop], whole.teacher[1][start:stop]),
            max_token_id=whole.max_token_id,
            num_rows=int(not number),
        )
        for number, (start, stop) in enumerate(kept)
    ]
