"""Cross entropy with the token that follows: one function for training, evaluation and log-probabilities.

`torch.nn.functional.cross_entropy` adds up a row sequentially in fp32 on CPUs, and loses 1e-5 of it over 50,000 words.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rayfcp.data.rows import IGNORED
from rayfcp.execute.devices.backend import backend_of
from rayfcp.execute.losses.base import Loss, Targets, wide


class CrossEntropy(Loss):
    """Terms are negative log-probabilities of the tokens that follow."""

    def terms(self, logits: Tensor, targets: Targets) -> Tensor:
        return cross_entropies(logits, targets.words)

    def into_gradient(self, logits: Tensor, targets: Targets) -> Tensor:
        return _into_gradient(logits, targets.words)


def cross_entropies(logits: Tensor, words: Tensor) -> Tensor:
    """Return cross entropies `[tokens]` of `logits`, `[tokens, words]`, in fp32 at least, 0 for a word of -100."""
    return _CrossEntropies.apply(logits.to(wide(logits)), words)  # type: ignore[no-any-return, no-untyped-call]


class _CrossEntropies(torch.autograd.Function):
    """`_into_gradient` for autograd."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, words: Tensor) -> Tensor:
        slopes = logits.clone()
        losses = _into_gradient(slopes, words)
        ctx.save_for_backward(slopes)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (slopes,) = ctx.saved_tensors
        return slopes * gradient.unsqueeze(1), None


def _into_gradient(logits: Tensor, words: Tensor) -> Tensor:
    """Losses `[tokens]` of `logits`, `[tokens, words]`, which are overwritten with the gradient of their sum.

    Without a fused kernel one wide copy of the logits exists at a time: `log_softmax` to a wider dtype would make two.
    """
    fused = backend_of(logits.device).loss_kernel()
    if fused is not None and wide(logits) is torch.float32:
        return fused(logits, words)
    counted, index = words != IGNORED, words.clamp(min=0).unsqueeze(1)
    shares = logits.to(wide(logits))
    shares -= shares.amax(-1, keepdim=True)
    chosen = shares.gather(1, index)
    total = shares.exp_().sum(-1, keepdim=True)
    losses = (total.log() - chosen).squeeze(1).masked_fill(~counted, 0.0)
    shares.scatter_add_(1, index, -total)
    torch.mul(shares, counted.unsqueeze(1) / total, out=logits)
    return losses
