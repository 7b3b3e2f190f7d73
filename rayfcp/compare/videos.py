"""Synthetic videos with captions, each set from what is published of its data set, and the sequences that a vision
model makes of them. Seeded.

The paper of Flexible Context Parallelism (Niu et al.) gives neither frames per second nor resolution, only the longest
sequence, 128K tokens. Both are assumed here: `IMAGES_PER_SECOND` images of frames of about `FRAME_PIXELS` pixels.
With these, static baselines of 8B models take degree 4 on MSR-VTT and 8 on OpenVid, as they do in the paper's Table 6.

A paper states a mean and a share or two, never the whole distribution: a comment at each says how the rest was filled
in.
"""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rayfcp.compare.distributions import Draw, between, lognormal, mixture, pareto
from rayfcp.values import Images, ModelProfile, SequenceSpec

IMAGES_PER_SECOND = 2.0
"""Images of Qwen3-VL are two frames each, those of InternVL one."""

FRAME_PIXELS = 512 * 512
"""Pixels of a frame whose size the model leaves free; InternVL's tile has 448 x 448 whatever it is cut from."""

FAMILIES: dict[int, tuple[int, int, int]] = {3 * 14 * 14: (14, 448, 6), 3 * 2 * 16 * 16: (16, 0, 9)}
"""Numbers of a patch -> edge of a patch, edge of a tile, tokens of text around an image; InternVL and Qwen3-VL.

InternVL: a tile of 448 x 448 pixels a frame, `Frame7: <img>` before it, `</img>` and a line break after it. Qwen3-VL:
pairs of frames in their own shape, `<3.5 seconds>` and a mark before each pair, a mark after it."""

TOKENS_PER_WORD = 4 / 3
"""Tokens of English text in a vocabulary of 150,000; assumed."""

PROMPT_TOKENS = 24
"""Roles, marks and the request of a chat before the video; assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frames:
    """`per_second` images with `marks` tokens of text around each. `tile`: edge in pixels of all frames, 0 where they
    keep their shape and take about `FRAME_PIXELS`. `merged_patches` patches of `patch` x `patch` pixels become a token.
    """

    patch: int
    merged_patches: int
    tile: int
    marks: int
    per_second: float

    def image(self, *, width: int, height: int) -> Images:
        """One image at token 0, from frames of `width` x `height` pixels; `stride` includes its marks.

        Edges become multiples of a token's pixels, rounded down, as in the library's processors of videos.
        """
        unit = self.patch * math.isqrt(self.merged_patches)
        if self.tile:
            width = height = self.tile
        else:
            scale = math.sqrt(FRAME_PIXELS / (width * height))
            width, height = (max(unit, int(edge * scale) // unit * unit) for edge in (width, height))
        tokens = (width // unit) * (height // unit)
        return Images(start=0, num_tokens=tokens, num_patches=tokens * self.merged_patches, stride=tokens + self.marks)


def frames_of(model: ModelProfile, *, per_second: float = IMAGES_PER_SECOND) -> Frames:
    """Frames of videos as the model's family takes them, which the size of a patch identifies.

    Raises:
        ValueError: The model has no vision encoder, or patches of another family.
    """
    vision = model.vision
    if vision is None:
        raise ValueError(f"model {model.name} has no vision encoder, which videos need; name another, as qwen3-vl-8b")
    if vision.patch_values not in FAMILIES:
        raise ValueError(
            f"vision.patch_values of model {model.name} is {vision.patch_values}, must be one of "
            f"{', '.join(map(str, FAMILIES))} for videos by name; give lengths with images in a file"
        )
    patch, tile, marks = FAMILIES[vision.patch_values]
    return Frames(patch=patch, merged_patches=vision.merged_patches, tile=tile, marks=marks, per_second=per_second)


@dataclass(frozen=True, slots=True, kw_only=True)
class Videos:
    """Clips of `width` x `height` pixels with a caption each; `seconds` draws durations, `words` lengths of
    captions."""

    seconds: Draw
    words: Draw
    width: int
    height: int

    def sample(self, count: int, *, frames: Frames, max_seqlen: int, seed: int) -> tuple[SequenceSpec, ...]:
        """Return `count` independent sequences: prompt, the clip's images, caption, which alone enters the loss. Fewer
        images are taken of a clip that is too long for `max_seqlen` tokens.

        Raises:
            ValueError: Not one image fits.
        """
        rng = np.random.default_rng(seed)
        seconds = self.seconds(rng, count)
        captions = np.maximum(np.rint(TOKENS_PER_WORD * self.words(rng, count)), 1).astype(int)
        image = frames.image(width=self.width, height=self.height)
        most_images = (max_seqlen - PROMPT_TOKENS - captions) // image.stride
        if most_images.min() < 1:
            raise ValueError(
                f"max_seqlen is {max_seqlen}, must be at least {PROMPT_TOKENS + captions.max() + image.stride} for an "
                "image and the caption of a clip; raise it"
            )
        counts = np.clip(np.floor(seconds * frames.per_second).astype(np.int64), 1, most_images)
        # Half of an image's marks come before it.
        first = dataclasses.replace(image, start=PROMPT_TOKENS + (frames.marks + 1) // 2)
        return tuple(
            SequenceSpec(
                id=number,
                num_tokens=PROMPT_TOKENS + count * image.stride + caption,
                num_targets=caption,
                images=(dataclasses.replace(first, count=count),),
            )
            for number, (count, caption) in enumerate(zip(counts.tolist(), captions.tolist(), strict=True))
        )


def decaying(low: float, high: float, *, scale: float) -> Draw:
    """Exponential from `low`, truncated at `high`: the density falls by e in every `scale`."""
    kept = 1 - np.exp((low - high) / scale)

    def draw(rng: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
        return np.asarray(low - scale * np.log(1 - kept * rng.random(count)), np.float64)

    return draw


# 85 % of the clips last up to 10 s; with 4.5 s in their mean, the mean of all is 11.7 s when the others follow this
# power law up to ten minutes.
_INTERNVID_ALPHA = 0.80323

VIDEOS = {
    # MSR-VTT (Xu et al., CVPR 2016): 10,000 clips of 10 to 30 s, 41.2 hours, 1,856,523 words in 200,000 sentences; the
    # density of durations falls exponentially, as fast as the mean of 14.8 s requires, and one sentence a clip,
    # lognormal with s = 0.4, assumed.
    "msrvtt": Videos(seconds=decaying(10, 30, scale=5.303), words=lognormal(9.28, sigma=0.4), width=320, height=240),
    # InternVid (Wang et al., ICLR 2024): 234 million clips, 760,000 hours, 85 % of up to 10 s, 4.1 billion words, 85 %
    # of the videos in 720p; lognormal below 10 s with s = 0.55, a power law up to 600 s, and captions with s = 0.7,
    # assumed.
    "internvid": Videos(
        seconds=mixture(
            (0.85, between(1, 10, part=lognormal(5.028, sigma=0.55))), (0.15, pareto(10, 600, alpha=_INTERNVID_ALPHA))
        ),
        words=lognormal(17.5, sigma=0.7),
        width=1280,
        height=720,
    ),
    # OpenVid-1M (Nan et al., ICLR 2025): one million clips of 7.2 s in the mean, of at least 512 x 512 pixels, with
    # long captions; lognormal with s = 0.7 between 1 and 128 s, 720p, and captions of 100 words with s = 0.4, assumed.
    "openvid": Videos(
        seconds=between(1, 128, part=lognormal(7.156, sigma=0.7)),
        words=lognormal(100, sigma=0.4),
        width=1280,
        height=720,
    ),
}
