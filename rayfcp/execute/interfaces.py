"""What the interpreter asks of a model, of a source of tokens, and what it gives back."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rayfcp.execute.attention import AttentionContext
from rayfcp.values import Span

Tokens = npt.NDArray[np.int64]

IGNORED = -100
"""Target id of tokens that do not enter the loss."""


class TokenSource(Protocol):
    """Tokens of the sequences of one global batch."""

    def read(self, sequence: int, /, *, start: int, stop: int) -> tuple[Tokens, Tokens]:
        """Token ids and target ids of `[start, stop)`; a target is the next token's id, or -100."""
        ...


class TrainableModel(Protocol):
    """A causal language model, or one stage of it, sharded or whole."""

    def run(
        self,
        inputs: Tensor,
        *,
        positions: Tensor,
        targets: Tensor | None,
        attention: AttentionContext,
        keep_logits: bool = True,
    ) -> Tensor:
        """The last stage: sum of the cross entropies of all targets that are not -100. Others, which need no targets:
        activations `[tokens, hidden]` for the next one.

        `inputs`: token ids on the first stage, then what the stage before gave; positions and targets `[tokens]`.
        `keep_logits`: backward comes next, so that logits may be kept for it.
        """
        ...

    def set_reduce(self, reduce: bool) -> None:
        """Whether the next backward pass sums gradients over ranks."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """What one rank did on one stage in one global batch. `loss_sum`: of its own tokens, 0 before the last stage.
    `bytes_sent`: to other ranks of the stage, by attention. `wait_s`: for messages, those of other stages included.
    `gather_s[m]`: what the interpreter's `waited` grew by in microbatch m. `context_peak_bytes`: the most that
    microbatches kept for later ones beside what autograd holds."""

    loss_sum: float
    spans: tuple[Span, ...]
    bytes_sent: int
    num_cells: float
    wait_s: float
    gather_s: tuple[float, ...] = ()
    context_peak_bytes: int = 0
