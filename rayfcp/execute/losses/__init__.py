"""Losses: a file for each, chosen by `loss.type`."""

from collections.abc import Sequence

import torch

from rayfcp.config.losses import LossConfig
from rayfcp.execute.losses.base import Loss, PairLoss, pair_values
from rayfcp.execute.losses.cross_entropy import CrossEntropy
from rayfcp.execute.losses.distillation import Distillation
from rayfcp.execute.losses.dpo import DirectPreference
from rayfcp.execute.losses.reward import RewardModel
from rayfcp.values import EvalResult


def loss_of(config: LossConfig) -> Loss:
    """The loss of a run."""
    match config.type:
        case "cross_entropy":
            return CrossEntropy()
        case "dpo":
            return DirectPreference(beta=config.beta)
        case "reward":
            return RewardModel(center=config.center)
        case "distillation":
            return Distillation(temperature=config.temperature, share=config.share)


def pair_result(
    config: LossConfig, sums: Sequence[float], *, reference: Sequence[float], num_targets: int
) -> EvalResult:
    """The loss of all pairs of an evaluation set by the sums of their sequences' terms; see `pair_values`."""
    loss = loss_of(config)
    assert isinstance(loss, PairLoss)
    found = pair_values(loss, torch.tensor(sums, dtype=torch.float64), reference=reference)
    return EvalResult(loss=float(found.loss), tokens=num_targets, pairs=found.stats())
