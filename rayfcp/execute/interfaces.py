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


Values = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pixels:
    """Pictures as the library's processor makes them, one after the other.

    `values`: `[patches, patch_values]` where pictures differ in size (Qwen3-VL), `[pictures, channels, height, width]`
    where all are tiles (InternVL). `grids`: `[pictures, 2]`, how many patches each is high and wide.
    """

    values: Values
    grids: Tokens


class PictureSource(Protocol):
    """Pictures of the sequences of one global batch, and where its tokens stand for rotary factors."""

    def pixels(self, sequence: int, /, *, first: int, last: int) -> Pixels:
        """Pictures `[first, last)` of a sequence, counted over all its runs (`SequenceSpec.pictures`)."""
        ...

    def positions(self, sequence: int, /, *, start: int, stop: int) -> Tokens:
        """Of tokens `[start, stop)`: `[3, tokens]` (time, height, width) where the model's positions have three axes,
        sequences without pictures included; else `[tokens]`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Features of pictures that are on the rank of their tokens: `features`, `[rows, num_mergers x hidden]`, belong at
    `rows`, ascending, of what was loaded."""

    features: Tensor
    rows: Tensor


class TrainableModel(Protocol):
    """A causal language model, or one stage of it, sharded or whole; with a vision encoder, if it has one."""

    def run(
        self,
        inputs: Tensor,
        *,
        positions: Tensor,
        targets: Tensor | None,
        attention: AttentionContext,
        keep_logits: bool = True,
        placed: Placed | None = None,
    ) -> Tensor:
        """The last stage: sum of the cross entropies of all targets that are not -100. Others, which need no targets:
        activations `[tokens, hidden]` for the next one.

        `inputs`: token ids on the first stage, then what the stage before gave; targets `[tokens]`, and positions,
        or `[3, tokens]` of these. `keep_logits`: backward comes next, so that logits may be kept for it. `placed`:
        what stands for the embeddings of pictures' tokens.
        """
        ...

    def encode(self, pixels: Pixels | None) -> Tensor:
        """Features of the pictures' tokens, in order, `[tokens, num_mergers x hidden]`: in the graph unless the
        encoder is frozen. None: no rows, but the encoder ran, and will run backward, as on other ranks.

        Raises:
            ValueError: the model has no encoder.
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
