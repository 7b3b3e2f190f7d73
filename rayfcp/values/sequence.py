"""Which keys the rows of a mask see: bands whose two edges stand still or slide with the row.

Pictures whose tokens see one another in the language model: what they add to a mask.

Without pictures row q sees no keys from q + `ahead` on. A row of a picture [a, b) sees these too, the keys
[q + `ahead`, b), whatever the window. Earlier tokens of its picture are like all others: a window may not reach them.
So the transformers library has it for Gemma 3 and Gemma 4 (`create_masks_for_vision_model`): sliding layers see what is
within the window of causal mask and picture together, and that window has no upper end.

What a planner knows of a sequence: its length, its mask, how many targets it has.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from operator import attrgetter

from rayfcp.values.images import Pictures, check_pictures

Windows = tuple[tuple[int, int], ...]
"""Kinds of a model's layers, ascending: (how many keys a query sees, itself included; how many layers). A window of 0:
all keys before it. Nothing at all: no layer has a window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Where the keys of a row begin or end: at key `at`, or where it `slides`, for row q at key q + `at`."""

    at: int
    slides: bool = False

    def of(self, row: int) -> int:
        return self.at + row if self.slides else self.at


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Rows `[start, stop)` of a sequence see keys `[low, high)`, as far as the sequence has them. Edges that both
    slide are at least one key apart; those of one row may cross (it then sees nothing)."""

    start: int
    stop: int
    low: Edge
    high: Edge


def window_cells(num_tokens: int, window: int) -> int:
    """(query, key) cells of a causal sequence whose queries see `window` keys at most, themselves included.

    >>> [window_cells(5, window) for window in (1, 2, 5, 9)]
    [5, 9, 15, 15]
    """
    inside = min(num_tokens, window)
    return inside * (inside + 1) // 2 + (num_tokens - inside) * inside


def mutual_cells(runs: Sequence[Pictures], rows: tuple[int, int], *, ahead: int) -> int:
    """Cells that rows `[start, stop)` see beyond their mask; `runs` ascend.

    >>> mutual_cells([Pictures(start=2, num_tokens=3, num_patches=3)], (0, 9), ahead=1)
    3
    """
    start, stop = rows
    cells = 0
    for run in runs[bisect_right(runs, start, key=_stop) :]:
        if run.start >= stop:
            break
        cells += _cells_before(run, stop, ahead=ahead)
        cells -= _cells_before(run, start, ahead=ahead)
    return cells


_stop = attrgetter("stop")


def _cells_before(run: Pictures, position: int, *, ahead: int) -> int:
    """Of the rows before a position."""
    if position <= run.start:
        return 0
    whole, rows = divmod(position - run.start, run.stride if run.count > 1 else run.num_tokens)
    whole, rows = (whole, min(rows, run.num_tokens)) if whole < run.count else (run.count, 0)
    return whole * _cells(run, run.num_tokens, ahead=ahead) + _cells(run, rows, ahead=ahead)


def _cells(run: Pictures, rows: int, *, ahead: int) -> int:
    """Of the first rows of one picture."""
    left = run.num_tokens - ahead
    return _triangle(left) - _triangle(left - rows) if rows else 0


def _triangle(side: int) -> int:
    return side * (side + 1) // 2 if side > 0 else 0


def mutual_bands(runs: Iterable[Pictures], *, ahead: int) -> tuple[Band, ...]:
    """What rows of pictures see beyond their mask, in order of pictures; none sees nothing there."""
    return tuple(
        Band(start=start, stop=stop - ahead, low=Edge(at=ahead, slides=True), high=Edge(at=stop))
        for run in runs
        for start, stop in run.ranges()
        if start + ahead < stop
    )


def picture_stop(runs: Iterable[Pictures], position: int) -> int:
    """Behind the picture that holds a position; behind the position where none does.

    >>> [picture_stop([Pictures(start=2, num_tokens=3, num_patches=3)], at) for at in (1, 2, 4, 5)]
    [2, 5, 5, 6]
    """
    for run in runs:
        if run.start <= position < run.stop:
            first = position - (position - run.start) % (run.stride if run.count > 1 else run.num_tokens)
            return first + run.num_tokens if position < first + run.num_tokens else position + 1
    return position + 1


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
