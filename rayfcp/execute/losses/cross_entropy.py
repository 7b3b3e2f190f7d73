"""Cross entropy with the token that follows."""

import torch
import torch.nn.functional as F
from torch import Tensor

from rayfcp.data.rows import IGNORED
from rayfcp.execute.devices.backend import backend_of
from rayfcp.execute.losses.base import Loss, Targets, wide


class CrossEntropy(Loss):
    """Terms are negative log-probabilities of the tokens that follow."""

    def terms(self, logits: Tensor, targets: Targets) -> Tensor:
        return cross_entropies(logits, targets.words)

    def into_gradient(self, logits: Tensor, targets: Targets) -> Tensor:
        terms = _into_gradient(logits, targets.words)
        if targets.weights is not None:
            logits *= targets.weights.unsqueeze(1).to(logits)
        return terms


def cross_entropies(logits: Tensor, words: Tensor) -> Tensor:
    """Cross entropies `[tokens]` of `logits`, `[tokens, words]`, in fp32 at least, 0 where a word is -100."""
    return F.cross_entropy(logits.to(wide(logits)), words, ignore_index=IGNORED, reduction="none")


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
