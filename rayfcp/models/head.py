"""Loss of a model's output head.

Logits exist for one chunk of rows at a time and become their own gradient in place. If the backward pass follows at
once, gradients are computed in the forward pass, so that logits are computed once; otherwise the backward pass computes
them again. The gradient of the head's weight is summed over chunks in fp32 at least, scaled, and cast once. Nothing
waits for the device.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rayfcp.execute.devices.backend import SLICE_ROWS, backend_of
from rayfcp.execute.losses.base import Targets, wide
from rayfcp.models.logits import LogitCurve

PLAIN = LogitCurve()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    targets: Targets
    chunk_tokens: int
    curve: LogitCurve
    keep_logits: bool


def head_loss(
    head: nn.Linear,
    hidden: Tensor,
    *,
    targets: Targets,
    chunk_tokens: int,
    curve: LogitCurve = PLAIN,
    keep_logits: bool = True,
) -> Tensor:
    """Return the weighted sum of the terms of `targets`, in fp32 at least, and fill in the terms.

    Args:
        hidden: `[tokens, hidden]`; the head runs on the rows that `targets.rows` names, on all if it is None.
        chunk_tokens: Rows whose logits exist at a time.
        curve: What the model does to the logits.
        keep_logits: Compute gradients in the forward pass, since backward follows at once. Until then that keeps the
            gradients of the rows in their dtype, and those of the head's trained parameters in fp32 at least. Otherwise
            `hidden` is kept, and the backward pass computes the logits again.
    """
    settings = _Settings(targets=targets, chunk_tokens=chunk_tokens, curve=curve, keep_logits=keep_logits)
    if not torch.is_grad_enabled():
        return _run(hidden, head.weight, bias=head.bias, settings=settings)
    return _HeadLoss.apply(hidden, head.weight, head.bias, settings)  # type: ignore[no-any-return, no-untyped-call]


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, settings: _Settings) -> Tensor:
        ctx.settings, ctx.gradients = settings, None
        if not settings.keep_logits:
            ctx.save_for_backward(hidden, weight, bias)
            return _run(hidden, weight, bias=bias, settings=settings)
        ctx.gradients = _Gradients(hidden, weight, bias=bias, settings=settings, needed=ctx.needs_input_grad)
        return _run(hidden, weight, bias=bias, settings=settings, gradients=ctx.gradients)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        settings, (gradients, ctx.gradients) = ctx.settings, (ctx.gradients, None)
        if not settings.keep_logits:
            hidden, weight, bias = ctx.saved_tensors
            gradients = _Gradients(hidden, weight, bias=bias, settings=settings, needed=ctx.needs_input_grad)
            _run(hidden, weight, bias=bias, settings=settings, gradients=gradients)
        return *gradients.scaled(scale), None


class _Gradients:
    """Gradients of the sum of terms for the trained inputs of a head: `rows`, those of hidden states in their dtype,
    before the weights of the rows are applied; `weight` and `bias` in fp32 at least."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, *, bias: Tensor | None, settings: _Settings, needed: tuple[bool, ...]
    ) -> None:
        self._settings, self._num_tokens, self._dtype = settings, len(hidden), hidden.dtype
        needs_hidden, needs_weight, needs_bias, _ = needed
        self.rows = hidden.new_empty(len(settings.targets), hidden.shape[1]) if needs_hidden else None
        self.weight = torch.zeros_like(weight, dtype=wide(weight)) if needs_weight else None
        self.bias = torch.zeros_like(bias, dtype=wide(bias)) if bias is not None and needs_bias else None

    def add(self, slopes: Tensor, own: Tensor, *, start: int, weight: Tensor, row_weights: Tensor | None) -> None:
        """Add a chunk of rows: `own`, from row `start` on, whose logits have the gradients `slopes`.

        Weights multiply rows in fp32. Rounded to bf16, or multiplied into slopes that are, they would bias the
        gradients of all tokens of a sequence alike.
        """
        if self.rows is not None:
            torch.mm(slopes, weight, out=self.rows[start : start + len(own)])
        if self.weight is not None:
            weighed = own if row_weights is None else own * row_weights.to(self.weight).unsqueeze(1)
            backend_of(own.device).add_product(self.weight, left=slopes.t(), right=weighed)
        if self.bias is not None:
            wider = slopes.to(self.bias)
            self.bias += wider.sum(0) if row_weights is None else row_weights.to(wider) @ wider

    def scaled(self, scale: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden states, weight and bias in the head's dtype, times `scale`."""
        targets, scale = self._settings.targets, scale * self._settings.curve.scale
        rows = self.rows
        if rows is not None:
            factors = scale.expand(len(rows)) if targets.weights is None else scale * targets.weights.to(scale)
            rows = _times(rows, factors, out=rows)
            if targets.rows is not None:
                rows = rows.new_zeros(self._num_tokens, rows.shape[1]).index_copy_(0, targets.rows, rows)
        weight = self.weight
        if weight is not None:
            out = weight if weight.dtype is self._dtype else torch.empty_like(weight, dtype=self._dtype)
            weight = _times(weight, scale.expand(len(weight)), out=out)
        return rows, weight, None if self.bias is None else (self.bias * scale).to(self._dtype)


def _times(rows: Tensor, factors: Tensor, *, out: Tensor) -> Tensor:
    """Return `rows` times `factors`, multiplied in the dtype of `factors` and written to `out`."""
    parts = (each.split(SLICE_ROWS) for each in (rows, factors.unsqueeze(1), out))
    for own, factor, result in zip(*parts, strict=True):
        result.copy_(own * factor)
    return out


def _run(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None,
    settings: _Settings,
    gradients: _Gradients | None = None,
) -> Tensor:
    """Return the weighted sum of terms, chunk by chunk, and add to `gradients`."""
    targets, few = settings.targets, settings.chunk_tokens
    loss, start = hidden.new_zeros((), dtype=wide(hidden)), 0
    for wanted in targets.split(few):
        own = hidden[start : start + len(wanted)] if wanted.rows is None else hidden.index_select(0, wanted.rows)
        logits = F.linear(own, weight, bias)
        slope = settings.curve.bend(logits)
        terms = wanted.loss.into_gradient(logits, wanted)
        wanted.terms.copy_(terms)
        loss += wanted.weighted(terms)
        if gradients is not None:
            if slope is not None:
                logits *= slope
            gradients.add(logits, own, start=start, weight=weight, row_weights=wanted.weights)
        start += len(wanted)
        del logits, slope
    return loss
