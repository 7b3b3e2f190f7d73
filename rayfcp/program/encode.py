"""The instruction for a vision encoder: which pictures a rank encodes, and where their features go."""

from collections.abc import Iterable
from dataclasses import dataclass

from rayfcp.program.parcels import Range, ReshuffleProgram


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPictures:
    """Pictures `[first, last)` of `sequence`, counted over all its runs: each `num_patches` patches, which become
    `num_tokens` rows of features."""

    sequence: int
    first: int
    last: int
    num_patches: int
    num_tokens: int

    @property
    def count(self) -> int:
        return self.last - self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class Encode:
    """Encode `pictures`, in this order, and hand the features, a row for each of their tokens, to the ranks that hold
    the tokens.

    `features` brings rows from the order in which the rank encodes them to the order of its own tokens: those that
    arrive take the place of the rows `rows` (ascending) of what was loaded. All ranks have an `Encode` for a microbatch
    if any has; without pictures a rank encodes one that weighs nothing, so that the encoder's shards are gathered
    everywhere. Where any microbatch has one the last one has, whose backward pass sums gradients over ranks.
    `Backward` takes the gradients of the features the same way back and then, unless the encoder is frozen, through it.
    """

    microbatch: int
    pictures: tuple[EncodedPictures, ...]
    features: ReshuffleProgram
    rows: tuple[Range, ...]


def wanted_pictures(instructions: Iterable[object]) -> tuple[tuple[int, int, int], ...]:
    """Sequence, first and last of all pictures that a program encodes, in order, each once."""
    encodes = (item for item in instructions if isinstance(item, Encode))
    return tuple(dict.fromkeys((each.sequence, each.first, each.last) for item in encodes for each in item.pictures))
