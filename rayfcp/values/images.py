"""Pictures inside sequences: what the vision encoder works on, and which tokens its features become."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """A run of `count` equal pictures in a sequence: an image, its tiles, or frames of a video.

    Picture k of the run has tokens `[start + k stride, start + k stride + num_tokens)` of the sequence. To the vision
    encoder it is `num_patches` patches, which attend to one another and to no other picture. `mutual`: its tokens
    see one another in the language model too, whatever their order.
    """

    start: int
    num_tokens: int
    num_patches: int
    count: int = 1
    stride: int = 0
    mutual: bool = False

    def __post_init__(self) -> None:
        if min(self.num_tokens, self.num_patches, self.count) < 1 or self.start < 0:
            raise ValueError(f"{self} must have a start of at least 0 and at least 1 token, patch and picture; drop it")
        if self.count > 1 and self.stride < self.num_tokens:
            raise ValueError(f"stride is {self.stride}, must be at least num_tokens {self.num_tokens}; space them out")

    @property
    def stop(self) -> int:
        """Behind the last token of the last picture."""
        return self.start + (self.count - 1) * self.stride + self.num_tokens

    @property
    def encoder_cells(self) -> int:
        """(patch, patch) cells of the encoder's attention in one of its layers."""
        return self.count * self.num_patches**2

    def ranges(self) -> Iterator[tuple[int, int]]:
        """The tokens of each picture, in order."""
        for first in range(self.start, self.start + self.count * max(self.stride, 1), max(self.stride, 1)):
            yield first, first + self.num_tokens


def check_pictures(pictures: Iterable[Pictures], *, sequence: int, num_tokens: int) -> None:
    """Runs are in order, apart, and within the sequence.

    Raises:
        ValueError: says which run is not.
    """
    behind = 0
    for run in pictures:
        if run.start < behind or run.stop > num_tokens:
            raise ValueError(
                f"sequence {sequence}: pictures have tokens [{run.start}, {run.stop}), must lie in "
                f"[{behind}, {num_tokens}); sort them, and cut none"
            )
        behind = run.stop
