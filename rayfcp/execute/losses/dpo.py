"""Direct preference optimization (Rafailov et al., 2023, equation 7)."""

from torch import Tensor

from rayfcp.execute.losses.base import PairLoss
from rayfcp.execute.losses.cross_entropy import CrossEntropy


class DirectPreference(CrossEntropy, PairLoss):
    """A sequence's reward is `beta` times the log of the ratio of its probability to that of the reference model."""

    def __init__(self, *, beta: float) -> None:
        self._beta = beta

    def rewards(self, sums: Tensor, reference: Tensor | None) -> Tensor:
        assert reference is not None, "the reference model's sums are known before training"
        return self._beta * (reference - sums)  # both of negative log-probabilities
