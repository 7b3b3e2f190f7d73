"""What a planner knows of a sequence: its length, its mask, how many targets it has."""

from dataclasses import dataclass
from enum import StrEnum


class Mask(StrEnum):
    """Which (query, key) cells of a sequence are computed."""

    CAUSAL = "causal"
    FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpec:
    """One sequence of a global batch, lengths only.

    `id` is the position of the sequence in its global batch, `[0, B)`. `num_targets` counts the
    tokens that enter the loss; it is `num_tokens - 1` for plain language modelling.
    """

    id: int
    num_tokens: int
    num_targets: int
    mask: Mask = Mask.CAUSAL

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(
                f"sequence {self.id}: num_tokens is {self.num_tokens}, must be at least 1; drop empty rows"
            )

    @property
    def attention_cells(self) -> int:
        """Number of (query, key) cells of the mask: `L(L+1)/2` causal, `L^2` full."""
        length = self.num_tokens
        return length * length if self.mask is Mask.FULL else length * (length + 1) // 2
