"""Losses: a file for each, chosen by `loss.type`."""

from rayfcp.config.losses import LossConfig
from rayfcp.execute.losses.base import Loss
from rayfcp.execute.losses.cross_entropy import CrossEntropy
from rayfcp.execute.losses.distillation import Distillation
from rayfcp.execute.losses.dpo import DirectPreference
from rayfcp.execute.losses.reward import RewardModel


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
