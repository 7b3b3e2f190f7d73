"""Queries, keys and values of a whole batch, and what one kernel over whole sequences makes of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayfcp.bench.planned import Part
from rayfcp.bench.turns import Stopwatch
from rayfcp.execute.kernels import AttentionKernel, Pairs
from rayfcp.values import ModelProfile

ROWS = 8192
"""Tokens that are compared at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences of `lengths` end to end, causal. `query`, `gradient` (of the output): `[tokens, heads, head_dim]`;
    `key`, `value`: `[tokens, kv_heads, head_dim]`."""

    lengths: tuple[int, ...]
    query: Tensor
    key: Tensor
    value: Tensor
    gradient: Tensor

    @property
    def scale(self) -> float:
        return float(self.query.shape[-1] ** -0.5)

    def pairs(self, *, causal: bool) -> Pairs:
        """Each sequence on itself."""
        return Pairs(query_lengths=self.lengths, key_lengths=self.lengths, causal=causal, scale=self.scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Output and gradients, as long as the batch."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor

    def error(self, truth: "Outcome") -> float:
        """The largest difference of any tensor, as a share of its largest number, at least of 1, as inputs are about 1;
        infinite if there is a NaN."""
        return max(_difference(getattr(self, name), getattr(truth, name)) for name in ("out", "dq", "dk", "dv"))


def _difference(own: Tensor, wanted: Tensor) -> float:
    """Some rows at a time: in fp64 all of a long batch would need much memory."""
    pairs = list(zip(own.split(ROWS), wanted.split(ROWS), strict=True))
    # torch's maximum is NaN where one number is, Python's may not be
    worst = float(torch.stack([(some.double() - true.double()).abs().max() for some, true in pairs]).max())
    largest = float(wanted.abs().max())
    return math.inf if math.isnan(worst) else worst / max(largest, 1.0)


def random_batch(
    lengths: Sequence[int], *, model: ModelProfile, device: torch.device, dtype: torch.dtype, seed: int
) -> Batch:
    """Normal numbers; the same for the same device and seed."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(heads: int) -> Tensor:
        shape = (sum(lengths), heads, model.head_dim)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    query, gradient = draw(model.num_heads), draw(model.num_heads)
    key, value = draw(model.num_kv_heads), draw(model.num_kv_heads)
    return Batch(lengths=tuple(lengths), query=query, key=key, value=value, gradient=gradient)


def dense(batch: Batch, kernel: AttentionKernel, *, watch: Stopwatch) -> tuple[Outcome, float, float]:
    """The kernel once over all whole sequences: what comes of it, seconds forward and seconds backward."""
    tensors = (batch.query, batch.key, batch.value)
    pairs = batch.pairs(causal=True)
    watch.start()
    out, lse = kernel.forward(*tensors, pairs=pairs)
    watch.stop()
    forward_s = watch.seconds()
    watch.start()
    dq, dk, dv = kernel.backward(batch.gradient, *tensors, out, lse, pairs=pairs)
    watch.stop()
    return Outcome(out=out, dq=dq, dk=dk, dv=dv), forward_s, watch.seconds()


def rows_of(part: Part, starts: Sequence[int], *, device: torch.device) -> Tensor:
    """Where a rank's tokens are in the batch, whose sequences start at `starts`; the first one for padding."""
    rows = [torch.arange(starts[each.sequence] + each.start, starts[each.sequence] + each.stop) for each in part.pieces]
    return torch.cat(rows or [torch.zeros(1, dtype=torch.int64)]).to(device)
