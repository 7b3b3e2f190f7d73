"""Merging of partial attention results by their logsumexp, in fp32."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayfcp.execute.ranges import put_rows, take_rows
from rayfcp.program import Range
from rayfcp.program.placed import merged


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, otherwise fp32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


@dataclass(slots=True)
class Merged:
    """What is known of attention so far: `out` `[tokens, heads, head_dim]`, `lse` `[tokens, heads]`.

    Rows that no key was seen for have lse = -inf and out = 0.
    """

    out: Tensor
    lse: Tensor
    fresh: bool = True

    @classmethod
    def empty(cls, query: Tensor) -> "Merged":
        dtype = accumulator_dtype(query.dtype)
        return cls(
            out=torch.zeros(query.shape, dtype=dtype, device=query.device),
            lse=torch.full(query.shape[:2], float("-inf"), dtype=dtype, device=query.device),
        )

    def add(self, rows: Sequence[Range], out: Tensor, *, lse: Tensor) -> None:
        """Merge the result of further keys for `rows`.

        out = out_a - sigmoid(lse_b - lse_a) (out_a - out_b), lse = log(exp(lse_a) + exp(lse_b)): exact
        for lse_a = -inf, and no exponential of a large number.
        """
        if self.fresh and merged(list(rows)) == ((0, len(self.out)),):
            self.out, self.lse, self.fresh = out.to(self.out.dtype), lse, False
            return
        self.fresh = False
        old_out, old_lse = take_rows(self.out, rows), take_rows(self.lse, rows)
        weight = torch.sigmoid(lse - old_lse).unsqueeze(-1)
        put_rows(self.out, rows, source=old_out - weight * (old_out - out))
        put_rows(self.lse, rows, source=torch.logaddexp(old_lse, lse))

    def result(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.out.to(dtype), self.lse
