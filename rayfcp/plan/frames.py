"""What a model with vision makes of a video's frames: how many pictures, and how large they are.

The paper of Flexible Context Parallelism (Niu et al.) gives neither frames per second nor resolution, only the longest
sequence, 128K tokens. Both are assumed here: `PICTURES_PER_SECOND` pictures of frames of about `FRAME_PIXELS` pixels.
With these, static baselines of 8B models take degree 4 on MSR-VTT and 8 on OpenVid, as they do in the paper's Table 6.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rayfcp.values import ModelProfile, Pictures, VisionProfile

PICTURES_PER_SECOND = 2.0
"""Qwen3-VL's are two frames each, InternVL's one."""

FRAME_PIXELS = 512 * 512
"""Of a frame whose size the model leaves free; InternVL's tile has 448 x 448 whatever it is cut from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frames:
    """`per_second` pictures; `marks` tokens of text stand around each. `tile`: the edge in pixels to which all frames
    are brought, 0 where they keep their shape and take about `FRAME_PIXELS`. `merged_patches` patches of `patch` x
    `patch` pixels become a token."""

    patch: int
    merged_patches: int
    tile: int
    marks: int
    per_second: float

    def pictures(self, seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """How many pictures clips of so many seconds give."""
        return np.maximum(np.floor(seconds * self.per_second), 1).astype(np.int64)

    def picture(self, *, width: int, height: int) -> Pictures:
        """One picture at token 0, from frames of `width` x `height` pixels; `stride` holds its marks too.

        Edges become multiples of a token's pixels, rounded down, as the library's processors of videos do.
        """
        unit = self.patch * math.isqrt(self.merged_patches)
        if self.tile:
            width = height = self.tile
        else:
            scale = math.sqrt(FRAME_PIXELS / (width * height))
            width, height = (max(unit, int(edge * scale) // unit * unit) for edge in (width, height))
        tokens = (width // unit) * (height // unit)
        return Pictures(
            start=0, num_tokens=tokens, num_patches=tokens * self.merged_patches, stride=tokens + self.marks
        )


def frames_of(model: ModelProfile, *, per_second: float = PICTURES_PER_SECOND) -> Frames:
    """How the model sees videos; its family is told by how many numbers make a patch.

    InternVL: a tile of 448 x 448 pixels a frame, `Frame7: <img>` before it and `</img>` and a line break behind it.
    Qwen3-VL: pairs of frames in their own shape, `<3.5 seconds>` and a mark before each pair and a mark behind it.

    Raises:
        ValueError: the model has no vision, or patches of another family.
    """
    vision = model.vision
    if vision is None:
        raise ValueError(f"model {model.name} has no vision encoder, which videos need; name another, as qwen3-vl-8b")
    known = {3 * 14 * 14: _internvl, 3 * 2 * 16 * 16: _qwen3_vl}
    if vision.patch_values not in known:
        raise ValueError(
            f"vision.patch_values of model {model.name} is {vision.patch_values}, must be one of "
            f"{', '.join(map(str, known))} for videos by name; give lengths with pictures in a file"
        )
    return known[vision.patch_values](vision, per_second)


def _internvl(vision: VisionProfile, per_second: float) -> Frames:
    return Frames(
        patch=14,
        merged_patches=vision.merged_patches,
        tile=448,
        marks=6,
        per_second=per_second,
    )


def _qwen3_vl(vision: VisionProfile, per_second: float) -> Frames:
    return Frames(
        patch=16,
        merged_patches=vision.merged_patches,
        tile=0,
        marks=9,
        per_second=per_second,
    )
