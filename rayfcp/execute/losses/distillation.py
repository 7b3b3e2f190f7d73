"""Distillation from the stored logits of a teacher (Hinton et al., 2015)."""

from torch import Tensor

from rayfcp.data.rows import IGNORED
from rayfcp.execute.losses.base import Loss, Targets, wide
from rayfcp.execute.losses.cross_entropy import cross_entropies


class Distillation(Loss):
    """Terms are `share` of the divergence KL(teacher || model) at `temperature`, times the square of it, and for the
    rest cross entropy with the token that follows. The teacher's distribution is that over its stored words alone."""

    has_teacher = True

    def __init__(self, *, temperature: float, share: float) -> None:
        self._temperature, self._share = temperature, share

    def terms(self, logits: Tensor, targets: Targets) -> Tensor:
        assert targets.teacher is not None
        logits = logits.to(wide(logits))
        known = (targets.teacher.logits.to(logits) / self._temperature).log_softmax(-1)
        own = (logits / self._temperature).log_softmax(-1).gather(1, targets.teacher.words.long())
        divergences = (known.exp() * (known - own)).sum(-1) * self._temperature**2
        mixed = self._share * divergences
        if self._share < 1.0:
            mixed = mixed + (1.0 - self._share) * cross_entropies(logits, targets.words)
        return mixed.masked_fill(targets.words == IGNORED, 0.0)
