"""Sequences as a planner knows them: lengths, targets, images, and which keys each query sees.

Every sequence is causal. In a layer with a window w, query q sees keys `[q - w + 1, q + 1)`, itself included, as in the
transformers library.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:  # without numpy, the values import fast
    from rayfcp.values.arrays import Ints

Windows = tuple[tuple[int, int], ...]
"""Kinds of a model's layers, ascending: (keys that a query sees, itself included; number of layers). A window of 0 sees
all keys before it. Empty: no layer has a window."""

POSITIONS = 2**40
"""More than any position: sequence x this + position orders tokens by sequence, then position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """A run of `count` equal images in a sequence: an image, its tiles, or frames of a video.

    Image k of the run has tokens `[start + k stride, start + k stride + num_tokens)` of the sequence. To the vision
    encoder it is `num_patches` patches, which attend to one another and to no other image.
    """

    start: int
    num_tokens: int
    num_patches: int
    count: int = 1
    stride: int = 0

    def __post_init__(self) -> None:
        if min(self.num_tokens, self.num_patches, self.count) < 1 or self.start < 0:
            raise ValueError(f"{self} must have a start of at least 0 and at least 1 token, patch and image; drop it")
        if self.count > 1 and self.stride < self.num_tokens:
            raise ValueError(f"stride is {self.stride}, must be at least num_tokens {self.num_tokens}; space them out")

    @property
    def stop(self) -> int:
        """End of the last image's tokens, exclusive."""
        return self.start + (self.count - 1) * self.stride + self.num_tokens

    @property
    def encoder_pairs(self) -> int:
        """(patch, patch) pairs of the encoder's attention in one of its layers."""
        return self.count * self.num_patches**2

    def ranges(self) -> Iterator[tuple[int, int]]:
        """The tokens of each image, in order."""
        for first in range(self.start, self.start + self.count * max(self.stride, 1), max(self.stride, 1)):
            yield first, first + self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpec:
    """One sequence of a global batch, lengths only.

    `id` is the position of the sequence in its global batch, `[0, B)`. `num_targets` counts the tokens that enter the
    loss; it is `num_tokens - 1` for plain language modelling. `windows`: the kinds of layers that attend to it.
    `images`: the images that the vision encoder turns into tokens of the sequence, ascending.

    Raises:
        ValueError: there are no tokens, or runs of images overlap, are out of order or reach beyond the sequence.
    """

    id: int
    num_tokens: int
    num_targets: int
    windows: Windows = ()
    images: tuple[Images, ...] = ()

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(
                f"sequence {self.id}: num_tokens is {self.num_tokens}, must be at least 1; drop empty rows"
            )
        _check_images(self.images, sequence=self.id, num_tokens=self.num_tokens)

    @property
    def attention_pairs(self) -> float:
        """Visible (query, key) pairs, in the mean over layers: `L(L+1)/2`, fewer where a window is shorter than L.
        A whole number unless kinds of layers differ."""
        return self.block_pairs(0, self.num_tokens)

    def block_pairs(self, start: int, stop: int) -> float:
        """Pairs of the queries `[start, stop)`, in the mean over layers."""
        if len(self.windows) <= 1:
            return self.pairs(start, stop, window=self.windows[0][0] if self.windows else 0)
        layers = sum(count for _, count in self.windows)
        return sum(self.pairs(start, stop, window=window) * count for window, count in self.windows) / layers

    def pairs(self, start: int, stop: int, *, window: int = 0) -> int:
        """Pairs of the queries `[start, stop)` in a layer of this window (0: none)."""
        return visible_pairs(stop, stop, window=window) - visible_pairs(start, start, window=window)


Positions = TypeVar("Positions", int, "Ints")


def visible_pairs(queries: Positions, keys: Positions, *, window: int = 0) -> Positions:
    """Visible (query, key) pairs of the queries `[0, queries)` and keys `[0, keys)` of a sequence, in a layer of this
    window (0: none).

    The definition that cost, plan, program, simulation and checks share: pairs of a rectangle are sums and differences
    of these. Plain arithmetic, so that arrays broadcast.

    >>> [visible_pairs(5, 5, window=each) for each in (0, 1, 2, 5, 9)], visible_pairs(5, 3, window=2)
    ([15, 5, 9, 15, 15], 6)
    """
    pairs = _causal_pairs(queries, keys)
    if window == 0:
        return pairs
    hidden: Positions = _causal_pairs((queries - window + abs(queries - window)) // 2, keys)  # of max(0, queries - w)
    return pairs - hidden


def _causal_pairs(queries: Positions, keys: Positions) -> Positions:
    shared = (queries + keys - abs(queries - keys)) // 2  # the smaller of both
    pairs: Positions = shared * (shared + 1) // 2 + (queries - shared) * keys
    return pairs


def _check_images(images: Iterable[Images], *, sequence: int, num_tokens: int) -> None:
    end = 0
    for run in images:
        if run.start < end or run.stop > num_tokens:
            raise ValueError(
                f"sequence {sequence}: images have tokens [{run.start}, {run.stop}), must lie in "
                f"[{end}, {num_tokens}); sort them, and cut none"
            )
        end = run.stop
