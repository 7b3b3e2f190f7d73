"""Reward models from preferences (Ouyang et al., 2022, equation 1)."""

import torch
from torch import Tensor

from rayfcp.data.rows import IGNORED
from rayfcp.execute.losses.base import PairLoss, Targets, wide


class RewardModel(PairLoss):
    """A sequence's reward is the head's one output at its last token. `center` draws the rewards of a pair towards a
    sum of 0 (Eisenstein et al., 2023)."""

    scores_end = True

    def __init__(self, *, center: float) -> None:
        self._center = center

    def terms(self, logits: Tensor, targets: Targets) -> Tensor:
        return logits.squeeze(1).to(wide(logits)).masked_fill(targets.words == IGNORED, 0.0)

    def rewards(self, sums: Tensor, reference: Tensor | None) -> Tensor:  # noqa: ARG002  has none
        return sums

    def of_rewards(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return super().of_rewards(chosen, rejected) + self._center * torch.square(chosen + rejected)
