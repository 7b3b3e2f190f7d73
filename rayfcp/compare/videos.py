"""What a model with vision makes of a video's frames: how many images, and how large they are.

The paper of Flexible Context Parallelism (Niu et al.) gives neither frames per second nor resolution, only the longest
sequence, 128K tokens. Both are assumed here: `IMAGES_PER_SECOND` images of frames of about `FRAME_PIXELS` pixels.
With these, static baselines of 8B models take degree 4 on MSR-VTT and 8 on OpenVid, as they do in the paper's Table 6.

Synthetic videos with captions, each set from what is published of its data set, and the sequences that a model with
vision makes of them. Seeded.

A paper states a mean and a share or two, never the whole distribution: what fills the space between is said at each.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rayfcp.compare.distributions import Between, Draw, Lognormal, Mixture, Pareto
from rayfcp.cost.profiles import pick
from rayfcp.values import Images, ModelProfile, SequenceSpec, VisionProfile

IMAGES_PER_SECOND = 2.0
"""Qwen3-VL's are two frames each, InternVL's one."""

FRAME_PIXELS = 512 * 512
"""Of a frame whose size the model leaves free; InternVL's tile has 448 x 448 whatever it is cut from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frames:
    """`per_second` images; `marks` tokens of text stand around each. `tile`: the edge in pixels to which all frames
    are brought, 0 where they keep their shape and take about `FRAME_PIXELS`. `merged_patches` patches of `patch` x
    `patch` pixels become a token."""

    patch: int
    merged_patches: int
    tile: int
    marks: int
    per_second: float

    def images(self, seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """How many images clips of so many seconds give."""
        return np.maximum(np.floor(seconds * self.per_second), 1).astype(np.int64)

    def image(self, *, width: int, height: int) -> Images:
        """One image at token 0, from frames of `width` x `height` pixels; `stride` holds its marks too.

        Edges become multiples of a token's pixels, rounded down, as the library's processors of videos do.
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
            f"{', '.join(map(str, known))} for videos by name; give lengths with images in a file"
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


TOKENS_PER_WORD = 4 / 3
"""Of English text in a vocabulary of 150,000; assumed."""

PROMPT_TOKENS = 24
"""Roles, marks and the request of a chat before the video; assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decaying:
    """Exponential from `low`, cut at `high`: the density falls by e in every `scale`."""

    scale: float
    low: float
    high: float

    def __call__(self, rng: np.random.Generator, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        kept = 1 - np.exp((self.low - self.high) / self.scale)
        return np.asarray(self.low - self.scale * np.log(1 - kept * rng.random(count)), np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Videos:
    """Clips of `width` x `height` pixels with a caption each. `seconds` draws durations, `words` lengths of captions;
    `source` says what is stated and what was filled in."""

    name: str
    seconds: Draw
    words: Draw
    width: int
    height: int
    source: str

    def sample(self, count: int, *, frames: Frames, max_seqlen: int, seed: int) -> tuple[SequenceSpec, ...]:
        """`count` independent sequences: a prompt, the clip's images, its caption, which alone enters the loss. Of a
        clip that is too long for `max_seqlen` tokens fewer images are taken.

        Raises:
            ValueError: not one image fits.
        """
        rng = np.random.default_rng(seed)
        seconds = self.seconds(rng, count)
        captions = np.maximum(np.rint(TOKENS_PER_WORD * self.words(rng, count)), 1).astype(int)
        image = frames.image(width=self.width, height=self.height)
        room = (max_seqlen - PROMPT_TOKENS - captions) // image.stride
        if room.min() < 1:
            raise ValueError(
                f"max_seqlen is {max_seqlen}, must be at least {PROMPT_TOKENS + captions.max() + image.stride} for a "
                f"image and the caption of a clip of {self.name}; raise it"
            )
        images = np.clip(frames.images(seconds), 1, room)
        return tuple(
            _sequence(number, image=image, count=int(images[number]), caption=int(captions[number]))
            for number in range(count)
        )


def _sequence(number: int, *, image: Images, count: int, caption: int) -> SequenceSpec:
    """Prompt, `count` images with the text before each, and caption. Half of that text stands before the image."""
    marks = image.stride - image.num_tokens
    run = Images(
        start=PROMPT_TOKENS + marks - marks // 2,
        num_tokens=image.num_tokens,
        num_patches=image.num_patches,
        count=count,
        stride=image.stride,
    )
    tokens = PROMPT_TOKENS + count * image.stride + caption
    return SequenceSpec(id=number, num_tokens=tokens, num_targets=caption, images=(run,))


# 85 % of the clips last up to 10 s; with 4.5 s in their mean, the mean of all is 11.7 s when the others follow this
# power law up to ten minutes.
_INTERNVID_ALPHA = 0.80323

VIDEOS = {
    each.name: each
    for each in (
        Videos(
            name="msrvtt",
            seconds=Decaying(scale=5.303, low=10, high=30),
            words=Lognormal(mean_tokens=9.28, sigma=0.4),
            width=320,
            height=240,
            source="MSR-VTT (Xu et al., CVPR 2016): 10,000 clips of 10 to 30 s, 41.2 hours, 1,856,523 words in 200,000 "
            "sentences; the density of durations falls exponentially, as fast as the mean of 14.8 s asks, and one "
            "sentence a clip, lognormal with s = 0.4, assumed",
        ),
        Videos(
            name="internvid",
            seconds=Mixture(
                weights=(0.85, 0.15),
                parts=(
                    Between(part=Lognormal(mean_tokens=5.028, sigma=0.55), low=1, high=10),
                    Pareto(alpha=_INTERNVID_ALPHA, low=10, high=600),
                ),
            ),
            words=Lognormal(mean_tokens=17.5, sigma=0.7),
            width=1280,
            height=720,
            source="InternVid (Wang et al., ICLR 2024): 234 million clips, 760,000 hours, 85 % of up to 10 s, 4.1 "
            "billion words, 85 % of the videos in 720p; lognormal below 10 s with s = 0.55, a power law up to 600 s, "
            "and captions with s = 0.7, assumed",
        ),
        Videos(
            name="openvid",
            seconds=Between(part=Lognormal(mean_tokens=7.156, sigma=0.7), low=1, high=128),
            words=Lognormal(mean_tokens=100, sigma=0.4),
            width=1280,
            height=720,
            source="OpenVid-1M (Nan et al., ICLR 2025): one million clips of 7.2 s in the mean, of at least 512 x 512 "
            "pixels, with long captions; lognormal with s = 0.7 between 1 and 128 s, 720p, and captions of 100 words "
            "with s = 0.4, assumed",
        ),
    )
}


def videos(name: str) -> Videos:
    """The set of that name.

    Raises:
        ValueError: unknown; names the nearest known one.
    """
    return VIDEOS[pick(name, VIDEOS, what="set of videos")]
