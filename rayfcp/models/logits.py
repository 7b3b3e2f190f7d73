"""What families of the transformers library do to the logits of their head: a factor, and a soft cap."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from rayfcp.execute.losses.base import wide
from rayfcp.models.library import has_reward_head, text_of

_MULTIPLIERS = ("logit_scale", "lm_head_multiplier")
"""Keys of a factor: of Cohere, Falcon-H1."""

_SCALING = "logits_scaling"
"""Key of a number by which Granite and MiniCPM divide, and families in `_SCALED_UP` multiply."""

_SCALED_UP = ("hyperclovax",)
_CAP = "final_logit_softcapping"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitCurve:
    """Logits l of the head become l `scale`, and with a `cap` c above 0 then `c tanh(l / c)`."""

    scale: float = 1.0
    cap: float = 0.0

    def __call__(self, logits: Tensor) -> Tensor:
        """For autograd."""
        scaled = logits * self.scale if self.scale != 1.0 else logits
        return torch.tanh(scaled.to(wide(logits)) / self.cap) * self.cap if self.cap else scaled

    def bend(self, logits: Tensor) -> Tensor | None:
        """Bend logits in place. Return the derivative with respect to the scaled logits, without `scale`; None if it is
        1."""
        if self.scale != 1.0:
            logits *= self.scale
        if not self.cap:
            return None
        shares = torch.div(logits.to(wide(logits)), self.cap).tanh_()
        torch.mul(shares, self.cap, out=logits)
        return shares.square_().neg_().add_(1.0).to(logits.dtype)


def curve_of(config: PreTrainedConfig) -> LogitCurve:
    """The curve of a model's logits; none of rewards."""
    if has_reward_head(config):
        return LogitCurve()
    text, scale = text_of(config), 1.0
    for name in _MULTIPLIERS:
        scale *= getattr(text, name, None) or 1.0
    scaling = getattr(text, _SCALING, None) or 1.0
    scale = scale * scaling if text.model_type in _SCALED_UP else scale / scaling
    return LogitCurve(scale=scale, cap=getattr(text, _CAP, None) or 0.0)
