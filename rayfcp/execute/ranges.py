"""Rows of packed tensors by half-open ranges: few of them as views, many by one index on the device."""

import functools
import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from rayfcp.execute.device import moved
from rayfcp.program import Range
from rayfcp.program.placed import merged

FEW = 4
"""Ranges that are worth a launch each."""


@functools.lru_cache(maxsize=1024)
def rows_of(ranges: tuple[Range, ...], device: torch.device) -> Tensor:
    """Numbers of the rows, int64, on the device; the layers of a microbatch share them."""
    return moved(np.concatenate([np.arange(start, stop) for start, stop in ranges]), dtype=torch.int64, device=device)


def take_rows(tensor: Tensor, ranges: Sequence[Range]) -> Tensor:
    """Rows of `tensor` at `ranges`, in order: a view where the ranges touch, else a copy."""
    joined = merged(list(ranges))
    if len(joined) == 1:
        return tensor[joined[0][0] : joined[0][1]]
    if len(joined) <= FEW:
        return torch.cat([tensor[start:stop] for start, stop in joined])
    return tensor.index_select(0, rows_of(joined, tensor.device))


def copy_rows(source: Tensor, ranges: Sequence[Range], *, target: Tensor) -> None:
    """All of `target` = source[ranges], in order."""
    joined = merged(list(ranges))
    if len(joined) == 1:
        target.copy_(source[joined[0][0] : joined[0][1]])
    else:
        torch.index_select(source, 0, rows_of(joined, source.device), out=target)


def add_rows(target: Tensor, ranges: Sequence[Range], *, source: Tensor) -> None:
    """target[ranges] += source, in place; ranges may repeat."""
    joined = merged(list(ranges))
    if len(joined) > FEW and are_apart(joined):
        target.index_add_(0, rows_of(joined, target.device), source.to(target.dtype))
        return
    at = 0
    for start, stop in joined:
        target[start:stop] += source[at : at + stop - start]
        at += stop - start


def put_rows(target: Tensor, ranges: Sequence[Range], *, source: Tensor) -> None:
    """target[ranges] = source, in place; no row twice."""
    joined = merged(list(ranges))
    if len(joined) > FEW:
        target.index_copy_(0, rows_of(joined, target.device), source.to(target.dtype))
        return
    at = 0
    for start, stop in joined:
        target[start:stop] = source[at : at + stop - start]
        at += stop - start


def are_apart(ranges: Sequence[Range]) -> bool:
    """Whether no row is in two of them.

    >>> are_apart([(4, 6), (0, 3)]), are_apart([(0, 3), (2, 4)])
    (True, False)
    """
    placed = sorted(ranges)
    return all(first[1] <= second[0] for first, second in itertools.pairwise(placed))


def without(ranges: Iterable[Range], known: Sequence[Range]) -> tuple[Range, ...]:
    """Rows of `ranges` that are in none of `known`, which is as `union` gives it, range by range.

    >>> without([(0, 10), (3, 4)], ((2, 4), (8, 12)))
    ((0, 2), (4, 8))
    """
    found = []
    for start, stop in ranges:
        at = start
        for first, last in known:
            if last <= at or first >= stop:
                continue
            if first > at:
                found.append((at, first))
            at = last
        if at < stop:
            found.append((at, stop))
    return tuple(found)
