"""What a planner knows of a sequence: its length, its mask, how many targets it has."""

from dataclasses import dataclass, replace
from enum import StrEnum

from rayfcp.values.bands import Band, Edge, Windows, window_cells
from rayfcp.values.mutual import mutual_bands, mutual_cells, picture_stop
from rayfcp.values.pictures import Pictures, check_pictures

POSITIONS = 2**40
"""More than any position: sequence x this + position orders tokens by sequence, then position."""


class Mask(StrEnum):
    """Which (query, key) cells of a sequence are computed, in layers without a window and outside mutual pictures."""

    CAUSAL = "causal"
    FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpec:
    """One sequence of a global batch, lengths only.

    `id` is the position of the sequence in its global batch, `[0, B)`. `num_targets` counts the
    tokens that enter the loss; it is `num_tokens - 1` for plain language modelling. `windows`: the kinds of layers
    that attend to it. `pictures`: what of it the vision encoder sees, in order; tokens of `mutual` ones
    see all later ones of their picture besides what `mask` and window say.
    """

    id: int
    num_tokens: int
    num_targets: int
    mask: Mask = Mask.CAUSAL
    windows: Windows = ()
    pictures: tuple[Pictures, ...] = ()

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(
                f"sequence {self.id}: num_tokens is {self.num_tokens}, must be at least 1; drop empty rows"
            )
        check_pictures(self.pictures, sequence=self.id, num_tokens=self.num_tokens)

    @property
    def mutual(self) -> tuple[Pictures, ...]:
        """The runs of pictures whose tokens see one another."""
        return tuple(run for run in self.pictures if run.mutual)

    @property
    def attention_cells(self) -> float:
        """Number of (query, key) cells of the mask, in the mean over layers: `L(L+1)/2` causal, `L^2` full, fewer
        where a window is shorter than L, more where pictures are mutual. Whole unless kinds of layers differ."""
        if not self.windows and not self.pictures:
            return self.num_tokens * (self.num_tokens + (1 if self.mask is Mask.CAUSAL else self.num_tokens)) // 2
        return self.block_cells(0, self.num_tokens)

    @property
    def mask_factor(self) -> float:
        """Cells beyond those of a causal mask without mutual pictures, in shares of these (eta of Eq. 8 of Flexible
        Context Parallelism).

        >>> SequenceSpec(id=0, num_tokens=9, num_targets=8, mask=Mask.FULL).mask_factor
        0.8
        """
        return self.attention_cells / replace(self, mask=Mask.CAUSAL, pictures=()).attention_cells - 1

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
        cells = window_cells(stop, reach) - window_cells(start, reach)
        if self.mask is Mask.FULL:
            after = window_cells(length - start, reach) - window_cells(length - stop, reach)
            cells += after - (stop - start)
        if mutual := self.mutual:
            cells += mutual_cells(mutual, (start, stop), ahead=self._ahead(window))
        return cells

    def reach(self, stop: int) -> int:
        """Behind the last key that queries before `stop`, at least one, see in layers without a window. Later queries
        reach no less far.

        >>> SequenceSpec(id=0, num_tokens=9, num_targets=8).reach(4)
        4
        """
        return self.num_tokens if self.mask is Mask.FULL else picture_stop(self.mutual, stop - 1)

    def mutual_bands(self, *, window: int = 0) -> tuple[Band, ...]:
        """What rows of mutual pictures see beyond mask and window, each cell once, by ascending picture."""
        return mutual_bands(self.mutual, ahead=self._ahead(window))

    def _ahead(self, window: int) -> int:
        """How many keys a row sees from itself on, without its picture, where there are as many."""
        return 1 if self.mask is Mask.CAUSAL else window or self.num_tokens


def bands_of(sequence: SequenceSpec, *, window: int = 0) -> tuple[Band, ...]:
    """The bands of a sequence, which together hold each cell once; the first one has every row.

    With a window w a causal row q sees keys [q - w + 1, q + 1), as in the transformers library; a full mask sees all
    keys less than w away. What mutual pictures add comes in bands of their own, whatever the window.
    """
    causal = sequence.mask is Mask.CAUSAL
    low = Edge(at=1 - window, slides=True) if window else Edge(at=0)
    high = Edge(at=1, slides=True) if causal else Edge(at=window or sequence.num_tokens, slides=bool(window))
    whole = Band(start=0, stop=sequence.num_tokens, low=low, high=high)
    return whole, *sequence.mutual_bands(window=window)
