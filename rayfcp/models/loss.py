"""Cross entropy behind the output head, whose logits exist for a chunk of the tokens at a time.

Where the backward pass follows at once, gradients of the sum of losses are made in the forward pass, chunk by chunk, so
that logits are computed once: a chunk's logits become its gradient in place. Nothing waits for the device.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rayfcp.execute.interfaces import IGNORED

_SCALED_ROWS = 4096


def head_loss(head: nn.Linear, hidden: Tensor, *, targets: Tensor, chunk_tokens: int) -> Tensor:
    """Sum of cross entropies over targets that are not -100, in fp32 at least. `hidden`: `[tokens, hidden]`.

    From forward to backward it keeps gradients, of `hidden` and of the head's parameters, in their dtypes.
    """
    return _HeadLoss.apply(hidden, head.weight, head.bias, targets, chunk_tokens)  # type: ignore[no-any-return]


def cross_entropy_sum(head: nn.Module, hidden: Tensor, *, targets: Tensor) -> Tensor:
    """The same by autograd, all logits at once, for any head."""
    logits = head(hidden)
    return F.cross_entropy(logits.to(_wide(logits)), targets, ignore_index=IGNORED, reduction="sum")


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk_tokens: int
    ) -> Tensor:
        wide = _wide(hidden)
        loss = hidden.new_zeros((), dtype=wide)
        hidden_grad, weight_grad = torch.empty_like(hidden), torch.zeros_like(weight)
        bias_grad = None if bias is None else torch.zeros_like(bias, dtype=wide)
        parts = (each.split(chunk_tokens) for each in (hidden, targets, hidden_grad))
        for own, wanted, own_grad in zip(*parts, strict=True):
            logits = F.linear(own, weight, bias)
            loss += _into_gradient(logits, wanted)
            torch.mm(logits, weight, out=own_grad)
            weight_grad.addmm_(logits.t(), own)
            if bias_grad is not None:
                bias_grad += logits.sum(0, dtype=wide)
            del logits
        ctx.save_for_backward(hidden_grad, weight_grad, bias_grad)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad, bias_grad = ctx.saved_tensors
        biases = None if bias_grad is None else (bias_grad * scale).to(weight_grad.dtype)
        return _scaled(hidden_grad, scale), _scaled(weight_grad, scale), biases, None, None


def _scaled(gradient: Tensor, scale: Tensor) -> Tensor:
    """`scale` in its own precision: rounded to bf16 it would shift all gradients alike. Few wide rows at a time."""
    result = torch.empty_like(gradient)
    for rows, own in zip(gradient.split(_SCALED_ROWS), result.split(_SCALED_ROWS), strict=True):
        own.copy_(rows * scale.expand_as(rows))
    return result


def _into_gradient(logits: Tensor, targets: Tensor) -> Tensor:
    """Overwrite `logits`, `[tokens, vocab]`, with the gradient of their losses' sum, which is returned."""
    counted, index = targets != IGNORED, targets.clamp(min=0).unsqueeze(1)
    shares = F.log_softmax(logits, dim=-1, dtype=_wide(logits))
    losses = shares.gather(1, index).squeeze(1).masked_fill(~counted, 0.0)
    shares.exp_()
    shares.scatter_add_(1, index, torch.full_like(index, -1, dtype=shares.dtype))
    torch.mul(shares, counted.unsqueeze(1), out=logits)
    return -losses.sum()


def _wide(tensor: Tensor) -> torch.dtype:
    """fp32, or fp64 for that."""
    return torch.promote_types(tensor.dtype, torch.float32)
