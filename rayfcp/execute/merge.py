"""Merging of partial attention results by their logsumexp, in fp32."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rayfcp.execute.ranges import FEW, put_rows, rows_of, without
from rayfcp.program import Range
from rayfcp.program.placed import merged, union


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, otherwise fp32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


class Merged:
    """What is known so far of attention of `query`: out `[tokens, heads, head_dim]`, logsumexp `[tokens, heads]`.

    A row's first result is copied, later ones are merged in place. A first result that has all rows in order is kept
    as it is, in its own dtype, until another comes.
    """

    def __init__(self, query: Tensor) -> None:
        self._query, self._all = query, ((0, len(query)),)
        self._dtype = accumulator_dtype(query.dtype)
        self._out: Tensor | None = None
        self._lse: Tensor | None = None
        self._known: tuple[Range, ...] = ()

    def add(self, ranges: Sequence[Range], out: Tensor, *, lse: Tensor) -> None:
        """Merge the result of further keys for the rows `ranges`, none twice.

        out = out_a + sigmoid(lse_b - lse_a) (out_b - out_a), lse = log(exp(lse_a) + exp(lse_b)): exact for
        lse_a = -inf, and no exponential of a large number.
        """
        joined, rows = merged(list(ranges)), union(ranges)
        if not self._known and joined == self._all:
            self._out, self._lse, self._known = out, lse, self._all
            return
        fresh = without(rows, self._known)
        known_out, known_lse = self._sums()
        if fresh == rows:
            put_rows(known_out, joined, source=out)
            put_rows(known_lse, joined, source=lse)
        else:
            self._clear(fresh)
            _merge_rows(known_out, known_lse, joined, out=out.to(self._dtype), lse=lse)
        self._known = union((*self._known, *rows))

    @property
    def out(self) -> Tensor:
        """So far; rows that nothing was added to hold anything."""
        return self._sums()[0] if self._out is None else self._out

    def result(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """out in a dtype, and logsumexp. Rows that no key was seen for have 0 and -inf."""
        missing = without(self._all, self._known)
        if missing:
            self._sums()
            self._clear(missing)
            self._known = self._all
        assert self._out is not None and self._lse is not None
        return self._out.to(dtype), self._lse

    def _sums(self) -> tuple[Tensor, Tensor]:
        """What can be written to, in the dtype of sums."""
        query = self._query
        if self._out is None or self._lse is None:
            self._out = torch.empty(query.shape, dtype=self._dtype, device=query.device)
            self._lse = torch.empty(query.shape[:2], dtype=self._dtype, device=query.device)
        elif self._out.dtype is not self._dtype:
            self._out = self._out.to(self._dtype)
        return self._out, self._lse

    def _clear(self, ranges: Sequence[Range]) -> None:
        assert self._out is not None and self._lse is not None
        for start, stop in ranges:
            self._out[start:stop] = 0
            self._lse[start:stop] = float("-inf")


def _merge_rows(known_out: Tensor, known_lse: Tensor, ranges: Sequence[Range], *, out: Tensor, lse: Tensor) -> None:
    """Merge rows into `known_out` and `known_lse`, in place."""
    if len(ranges) > FEW:
        index = rows_of(tuple(ranges), out.device)
        old_out, old_lse = known_out.index_select(0, index), known_lse.index_select(0, index)
        _merge(old_out, old_lse, out=out, lse=lse)
        known_out.index_copy_(0, index, old_out)
        known_lse.index_copy_(0, index, old_lse)
        return
    at = 0
    for start, stop in ranges:
        rows = slice(at, at + stop - start)
        _merge(known_out[start:stop], known_lse[start:stop], out=out[rows], lse=lse[rows])
        at = rows.stop


def _merge(known_out: Tensor, known_lse: Tensor, *, out: Tensor, lse: Tensor) -> None:
    known_out.lerp_(out, torch.sigmoid(lse - known_lse).unsqueeze(-1))
    known_lse.copy_(torch.logaddexp(known_lse, lse))
