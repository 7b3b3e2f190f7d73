"""Sequences as a planner knows them: lengths, targets, images, and the kinds of layers that they pass."""

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rayfcp.values.layers import LayerKinds, layers_work

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
    loss; it is `num_tokens - 1` for plain language modelling. `layer_kinds`: the kinds of layers that it passes.
    `images`: the images that the vision encoder turns into tokens of the sequence, ascending. Sequences of one `unit`
    stay together: `flex-ring` puts them into one group.

    Raises:
        ValueError: there are no tokens, or runs of images overlap, are out of order or reach beyond the sequence.
    """

    id: int
    num_tokens: int
    num_targets: int
    layer_kinds: LayerKinds = ()
    images: tuple[Images, ...] = ()
    unit: int | None = None

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(
                f"sequence {self.id}: num_tokens is {self.num_tokens}, must be at least 1; drop empty rows"
            )
        end = 0
        for run in self.images:
            if run.start < end or run.stop > self.num_tokens:
                raise ValueError(
                    f"sequence {self.id}: images have tokens [{run.start}, {run.stop}), must lie in "
                    f"[{end}, {self.num_tokens}); sort them, and cut none"
                )
            end = run.stop

    @property
    def num_head_tokens(self) -> int:
        """Tokens that the output head is counted for: those with targets, and the last one, which never has one, so
        that plain language modelling has all tokens."""
        return min(self.num_targets + 1, self.num_tokens)

    @property
    def attention_pairs(self) -> float:
        """Visible (query, key) pairs, in the mean over layers: `L(L+1)/2`, fewer where a window is shorter than L.
        A whole number unless kinds of layers differ."""
        return self.block_pairs(0, self.num_tokens)

    def block_pairs(self, start: int, stop: int) -> float:
        """Pairs of the queries `[start, stop)`, in the mean over layers."""
        pairs = layers_work(self.layer_kinds, start=start, stop=stop).pairs
        return float(pairs) if isinstance(pairs, float) else int(pairs)


def token_counts(lengths: Iterable[Any], *, name: str = "lengths") -> list[int]:
    """Lengths in tokens as plain numbers: of a list, a generator, or an array or column of numpy, pandas, arrow or
    torch, whose whole floats count as what they are.

    >>> token_counts((3, 2.0))
    [3, 2]

    Raises:
        ValueError: `name` is no series of numbers, or holds one that is not whole and at least 1.
    """
    if isinstance(lengths, str | bytes) or not isinstance(lengths, Iterable):
        raise ValueError(f"{name} is {lengths!r}, must be whole numbers; give the tokens of each sequence")
    return [_token_count(each, where=f"{name}[{at}]") for at, each in enumerate(lengths)]


def _token_count(given: Any, *, where: str) -> int:
    plain = getattr(given, "as_py", None) or getattr(given, "item", None)  # of arrow; of numpy and torch
    try:
        value = given if plain is None else plain()
        exact = isinstance(value, float) and value.is_integer()
        whole = int(value) if exact else operator.index(value) * (not isinstance(value, bool))
    except (TypeError, ValueError, RuntimeError):
        whole, value = 0, given
    if whole < 1:
        raise ValueError(f"{where} is {value!r}, must be a whole number of at least 1; give a sequence's tokens")
    return whole
