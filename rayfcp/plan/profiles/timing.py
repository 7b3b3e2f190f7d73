"""A timed pass."""

from dataclasses import dataclass

from rayfcp.values import Primitive


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one forward, backward and reduction in which every group of `degree` ranks runs sequences of
    `num_tokens` tokens and `num_cells` mask cells together. In them are `num_pictures` of `num_patches` patches each,
    which a rank encodes."""

    degree: int
    num_tokens: int
    num_cells: float
    seconds: float
    primitive: Primitive = Primitive.RING
    num_pictures: int = 0
    num_patches: int = 0
