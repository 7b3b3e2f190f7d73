"""What a loss is: a term of each token, and for losses of pairs a function of the terms' sums by sequence.

Sums of tokens are the same on any number of ranks, wherever the pieces of a sequence lie; nothing else of a batch is
known to a rank. So a loss that is not a sum of terms is differentiated in two passes: a forward pass gives each
sequence's sum, all ranks add theirs up, and the gradient of the loss by these sums weighs the terms of a pass forward
and backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from rayfcp.execute.devices.backend import backend_of
from rayfcp.values.report import PairStats

_COPIES = 5
"""Peak fp32 copies of the logits held by autograd for any loss (4), plus one gradient in the logits' dtype."""

ABSENT = -1e20
"""A logit without probability, and finite at any temperature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """The likeliest words at each token by another model, `words` and their `logits`, `[tokens, words]`; the logits of
    words that are not there are `ABSENT`."""

    words: Tensor
    logits: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Targets of the head, all `[rows]`.

    `words`: the ids that follow, -100 where that does not count. `terms`: memory that the head fills with the loss's
    terms, 0 where they do not count. `weights`: of the terms in what is differentiated; 1 if None. `rows`: the tokens
    that the head runs on, by number; None if these are all tokens.
    """

    loss: "Loss"
    words: Tensor
    terms: Tensor
    weights: Tensor | None = None
    teacher: Teacher | None = None
    rows: Tensor | None = None

    @classmethod
    def of(
        cls,
        words: Tensor,
        *,
        loss: "Loss",
        weights: Tensor | None = None,
        teacher: Teacher | None = None,
        rows: Tensor | None = None,
    ) -> "Targets":
        """Targets, and memory for their terms."""
        terms = torch.empty(len(words), dtype=backend_of(words.device).sum_dtype, device=words.device)
        return cls(loss=loss, words=words, terms=terms, weights=weights, teacher=teacher, rows=rows)

    def __len__(self) -> int:
        return len(self.words)

    def split(self, num_rows: int) -> list["Targets"]:
        """Return views of `num_rows` rows each; the last one may have fewer."""
        return [self._part(start, start + num_rows) for start in range(0, len(self), num_rows)]

    def _part(self, start: int, stop: int) -> "Targets":
        teacher = self.teacher
        return replace(
            self,
            words=self.words[start:stop],
            terms=self.terms[start:stop],
            weights=None if self.weights is None else self.weights[start:stop],
            teacher=teacher and Teacher(words=teacher.words[start:stop], logits=teacher.logits[start:stop]),
            rows=None if self.rows is None else self.rows[start:stop],
        )

    def by_token(self, num_tokens: int) -> Tensor:
        """Return the terms as `[num_tokens]`, 0 for tokens that the head did not run on."""
        if self.rows is None:
            return self.terms
        return self.terms.new_zeros(num_tokens).index_copy_(0, self.rows, self.terms)

    def weighted(self, terms: Tensor) -> Tensor:
        """Sum of terms as it is differentiated."""
        return terms.sum() if self.weights is None else terms @ self.weights.to(terms)


class Loss(Protocol):
    """Terms of tokens. A batch's loss is their sum over its targets, unless it is a `PairLoss`.

    `scores_end`: terms are those of the last token of each sequence alone, whatever its targets. `has_teacher`:
    `Targets.teacher` is needed.
    """

    scores_end: bool = False
    has_teacher: bool = False

    def terms(self, logits: Tensor, targets: Targets) -> Tensor:
        """Terms `[tokens]` of `logits`, `[tokens, words]`, in fp32 at least; 0 where a token does not count."""
        ...

    def into_gradient(self, logits: Tensor, targets: Targets) -> Tensor:
        """Return the same terms, and overwrite `logits` with the gradient of their sum, without the weights. Work on
        few rows at a time, so that the copies of their logits together are as large as one copy of all."""
        few, found = -(-len(targets) // _COPIES), []
        for part, wanted in zip(logits.split(few), targets.split(few), strict=True):
            with torch.enable_grad():
                own = part.detach().requires_grad_()
                terms = self.terms(own, wanted)
                (gradient,) = torch.autograd.grad(terms.sum(), own)
            part.copy_(gradient)
            found.append(terms.detach())
        return torch.cat(found)


@runtime_checkable
class PairLoss(Loss, Protocol):
    """A mean over pairs of sequences: number 2i is the chosen one of a pair, 2i+1 the rejected one."""

    def rewards(self, sums: Tensor, reference: Tensor | None) -> Tensor:
        """Rewards of sequences by the sums of their terms, and by those of the reference model; `[sequences]` all."""
        ...

    def of_rewards(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Loss of each pair, `[pairs]`: by default the negative log-likelihood of the choice in the model of Bradley
        and Terry."""
        return -torch.nn.functional.logsigmoid(chosen - rejected)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairValues:
    """Loss of pairs: its mean, its gradient by the sequences' sums, `weights` `[sequences]`; and means over pairs of
    the chosen and the rejected rewards, and of whether the chosen one is higher, `figures` `[3]`."""

    loss: Tensor
    weights: Tensor
    figures: Tensor

    def stats(self) -> PairStats:
        """The figures, once the device has them."""
        chosen, rejected, accuracy = self.figures.tolist()
        return PairStats(num_pairs=len(self.weights) // 2, chosen=chosen, rejected=rejected, accuracy=accuracy)


def pair_values(loss: PairLoss, sums: Tensor, *, reference: Sequence[float] = ()) -> PairValues:
    """Loss of a batch of pairs by the sums of its sequences' terms; and by those of the reference model, if it has one.

    >>> from rayfcp.execute.losses.dpo import DirectPreference
    >>> found = pair_values(DirectPreference(beta=0.5), torch.tensor([1.0, 3.0]), reference=[2.0, 2.0])
    >>> round(float(found.loss), 4), [round(each, 4) for each in found.weights.tolist()]
    (0.3133, [0.1345, -0.1345])
    """
    known = torch.tensor(reference, dtype=sums.dtype, device=sums.device) if reference else None
    with torch.enable_grad():
        given = sums.detach().requires_grad_()
        chosen, rejected = loss.rewards(given, known).unflatten(0, (-1, 2)).unbind(1)
        mean = loss.of_rewards(chosen, rejected).mean()
        (weights,) = torch.autograd.grad(mean, given)
    figures = torch.stack([chosen.mean(), rejected.mean(), (chosen > rejected).to(mean).mean()])
    return PairValues(loss=mean.detach(), weights=weights, figures=figures.detach())


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLoss:
    """The loss of one global batch, as a rank's passes need it.

    `scale`: of its gradient. `weights`: of each sequence's terms, `[sequences]`; 1 if None. `row_of`: the row to which
    each sequence's terms are added, of `num_rows`; no sums are made without.
    """

    loss: Loss
    scale: float = 1.0
    weights: Tensor | None = None
    row_of: Sequence[int] = ()
    num_rows: int = 0


def wide(tensor: Tensor) -> torch.dtype:
    """fp32, or fp64 for that."""
    return torch.promote_types(tensor.dtype, torch.float32)
