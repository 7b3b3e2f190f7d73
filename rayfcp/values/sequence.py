"""What a planner knows of a sequence: its length, its mask, how many targets it has."""

from dataclasses import dataclass
from enum import StrEnum

from rayfcp.values.bands import Band, Edge, Windows, window_cells


class Mask(StrEnum):
    """Which (query, key) cells of a sequence are computed, in layers without a window."""

    CAUSAL = "causal"
    FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpec:
    """One sequence of a global batch, lengths only.

    `id` is the position of the sequence in its global batch, `[0, B)`. `num_targets` counts the
    tokens that enter the loss; it is `num_tokens - 1` for plain language modelling. `windows`: the kinds of layers
    that attend to it.
    """

    id: int
    num_tokens: int
    num_targets: int
    mask: Mask = Mask.CAUSAL
    windows: Windows = ()

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(
                f"sequence {self.id}: num_tokens is {self.num_tokens}, must be at least 1; drop empty rows"
            )

    @property
    def attention_cells(self) -> float:
        """Number of (query, key) cells of the mask, in the mean over layers: `L(L+1)/2` causal, `L^2` full, fewer
        where a window is shorter than L. Whole unless kinds of layers differ."""
        return self.block_cells(0, self.num_tokens)

    def block_cells(self, start: int, stop: int) -> float:
        """Cells of the queries `[start, stop)`, in the mean over layers."""
        counts = [(self.cells(start, stop, window=window), layers) for window, layers in self.windows]
        if len(counts) <= 1:
            return counts[0][0] if counts else self.cells(start, stop)
        return sum(cells * layers for cells, layers in counts) / sum(layers for _, layers in counts)

    def cells(self, start: int, stop: int, *, window: int = 0) -> int:
        """Cells of the queries `[start, stop)` in a layer of this window (0: none).

        >>> full = SequenceSpec(id=0, num_tokens=4, num_targets=3, mask=Mask.FULL)
        >>> [full.cells(0, 4, window=window) for window in (0, 1, 2)]
        [16, 4, 10]
        """
        length = self.num_tokens
        reach = window or length
        before = window_cells(stop, reach) - window_cells(start, reach)
        if self.mask is Mask.CAUSAL:
            return before
        after = window_cells(length - start, reach) - window_cells(length - stop, reach)
        return before + after - (stop - start)


def bands_of(mask: Mask, *, num_tokens: int, window: int = 0) -> tuple[Band, ...]:
    """The bands of a mask, which together hold each row once.

    With a window w a causal row q sees keys [q - w + 1, q + 1), as in the transformers library; a full mask sees all
    keys less than w away.
    """
    causal = mask is Mask.CAUSAL
    low = Edge(at=1 - window, slides=True) if window else Edge(at=0)
    high = Edge(at=1, slides=True) if causal else Edge(at=window or num_tokens, slides=bool(window))
    return (Band(start=0, stop=num_tokens, low=low, high=high),)
