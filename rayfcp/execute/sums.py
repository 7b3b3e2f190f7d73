"""Sums of rows to which kernels' calls add in any order, without zeros to start from where a first term comes."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rayfcp.execute.ranges import add_rows, are_apart, put_rows, without
from rayfcp.program import Range
from rayfcp.program.placed import merged, union

Tensors = tuple[Tensor, ...]


class RowSums:
    """Sums of several tensors with the same rows, `[rows, ...]` each.

    The first terms of a row are copied, later ones added. A first term that has all rows in order is kept as it is, in
    its own dtype, until another comes: one call over all rows costs nothing.

    Args:
        make: memory for all sums, of any content, in the dtype in which terms are added.
        num_rows: of each tensor.
    """

    def __init__(self, make: Callable[[], Tensors], *, num_rows: int) -> None:
        self._make, self._all = make, ((0, num_rows),)
        self._sums: Tensors = ()
        self._only: Tensors = ()
        self._known: tuple[Range, ...] = ()

    def add(self, ranges: Sequence[Range], *terms: Tensor) -> None:
        """Add terms to the rows `ranges`, which may repeat; each term has them one after the other."""
        if not self._known and not self._sums and merged(list(ranges)) == self._all:
            self._only, self._known = terms, self._all
            return
        rows = union(ranges)
        fresh = without(rows, self._known)
        alone = fresh == rows and are_apart(ranges)
        for target, term in zip(self.partial, terms, strict=True):
            if alone:
                put_rows(target, ranges, source=term)
            else:
                _clear(target, fresh)
                add_rows(target, ranges, source=term)
        self._known = union((*self._known, *rows))

    @property
    def partial(self) -> Tensors:
        """The sums so far, which go on growing in place; rows without a term hold anything."""
        if not self._sums:
            self._sums = self._make()
            for target, only in zip(self._sums, self._only, strict=False):
                target.copy_(only)
            self._only = ()
        return self._sums

    @property
    def whole(self) -> Tensors:
        """The sums, zero where there was no term."""
        for target in self.partial:
            _clear(target, without(self._all, self._known))
        self._known = self._all
        return self._sums

    def result(self, dtype: torch.dtype) -> Tensors:
        """The sums in a dtype."""
        return tuple(each.to(dtype) for each in self._only or self.whole)


def _clear(target: Tensor, ranges: Sequence[Range]) -> None:
    for start, stop in ranges:
        target[start:stop] = 0
