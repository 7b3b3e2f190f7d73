"""Rows of packed tensors by half-open ranges."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rayfcp.program import Range
from rayfcp.program.placed import merged


def take_rows(tensor: Tensor, ranges: Sequence[Range]) -> Tensor:
    """Rows of `tensor` at `ranges`, in order: a view where the ranges touch, else a copy."""
    joined = merged(list(ranges))
    if len(joined) == 1:
        return tensor[joined[0][0] : joined[0][1]]
    return torch.cat([tensor[start:stop] for start, stop in joined])


def add_rows(target: Tensor, ranges: Sequence[Range], *, source: Tensor) -> None:
    """target[ranges] += source, in place; ranges may repeat."""
    at = 0
    for start, stop in merged(list(ranges)):
        target[start:stop] += source[at : at + stop - start]
        at += stop - start


def put_rows(target: Tensor, ranges: Sequence[Range], *, source: Tensor) -> None:
    """target[ranges] = source, in place."""
    at = 0
    for start, stop in merged(list(ranges)):
        target[start:stop] = source[at : at + stop - start]
        at += stop - start
