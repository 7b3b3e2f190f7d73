"""Batches for `predict.py`: texts of a configuration's data, or drawn ones of texts, images and video frames."""

import functools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayfcp.cluster.actors.planner import sequences_of
from rayfcp.cluster.dataset import Dataset
from rayfcp.data import TokenReader
from rayfcp.data.rows import IGNORED
from rayfcp.data.vision.decoding import DecodedImages
from rayfcp.execute.engine import RankEngine
from rayfcp.execute.interpreter import BatchTokens, Tokens, TokenSource
from rayfcp.execute.vision import ImageSource
from rayfcp.values import Images, SequenceSpec, VisionProfile

BETWEEN = 6
"""Tokens of text between the frames of a video: their time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A global batch and what its steps read. `images`: None where the model has no eyes."""

    sequences: tuple[SequenceSpec, ...]
    tokens: TokenSource
    images: ImageSource | None = None


def text_batches(data: Dataset, *, data_dir: str, count: int) -> list[Batch]:
    """The first of a run."""
    reader, found = TokenReader.open(data_dir), []
    for number in range(1, count + 1):
        batch = data.sampler.batch(number)
        sequences = sequences_of(batch, layer_kinds=data.model.layer_kinds)
        found.append(Batch(sequences=sequences, tokens=BatchTokens(reader, batch)))
    return found


def image_batches(
    engine: RankEngine, vision: VisionProfile, rows: "Rows", *, vocab_size: int, size: int, count: int
) -> list[Batch]:
    """`count` batches of `size` rows each, the same on all ranks."""
    found = []
    for number in range(count):
        sequences = rows.batch(size, vision=vision, seed=number)
        tokens = DrawnTokens(sequences, vocab_size=vocab_size, seed=number)
        found.append(Batch(sequences=sequences, tokens=tokens, images=DrawnImages(engine, sequences, seed=number)))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Source of rows: a third of them texts, a third images between texts, a third videos.

    Sides are in patches. `tile`: the side of all images, where a family cuts images into tiles and takes a frame for
    one; 0: images have sides of `sides`, frames of the lower half of these. `most_images`: images of a row, or tiles
    of an image; a video has three times as many frames at most. `most_tokens`: of a text.
    """

    most_tokens: int
    sides: tuple[int, ...] = ()
    tile: int = 0
    most_images: int = 4

    def batch(self, size: int, *, vision: VisionProfile, seed: int) -> tuple[SequenceSpec, ...]:
        """Each kind of row comes in turn, so that every batch has all."""
        draw = random.Random(seed)
        kinds = (self._text, self._images, self._video)
        drawn = [kinds[number % 3](draw, vision.merged_patches) for number in range(size)]
        draw.shuffle(drawn)
        return tuple(_row(number, *each) for number, each in enumerate(drawn))

    def _text(self, draw: random.Random, _merged: int) -> tuple[int, list[Images]]:
        return _between(draw, self.most_tokens / 16, self.most_tokens), []

    def _images(self, draw: random.Random, merged: int) -> tuple[int, list[Images]]:
        """Text, and before each image a little more."""
        at, found = 0, []
        for _ in range(1 if self.tile else draw.randint(1, self.most_images)):
            at += draw.randint(1, 32)
            side = self.tile or draw.choice(self.sides)
            found.append(_run(at, side, draw.randint(1, self.most_images) if self.tile else 1, merged=merged, gap=0))
            at = found[-1].stop
        return at + _between(draw, 8, self.most_tokens / 8), found

    def _video(self, draw: random.Random, merged: int) -> tuple[int, list[Images]]:
        side = self.tile or draw.choice(self.sides[: -(-len(self.sides) // 2)])
        count = draw.randint(2, 3 * self.most_images)
        run = _run(draw.randint(1, 32), side, count, merged=merged, gap=BETWEEN)
        return run.stop + _between(draw, 8, self.most_tokens / 8), [run]


def _between(draw: random.Random, least: float, most: float) -> int:
    """Draw uniformly over octaves."""
    return round(math.exp(draw.uniform(math.log(least), math.log(max(most, least)))))


def _run(start: int, side: int, count: int, *, merged: int, gap: int) -> Images:
    tokens = side**2 // merged
    return Images(start=start, num_tokens=tokens, num_patches=side**2, count=count, stride=tokens + gap)


def _row(number: int, num_tokens: int, runs: Sequence[Images]) -> SequenceSpec:
    num_tokens += 2  # at least one target
    seen = sum(run.count * run.num_tokens for run in runs)
    return SequenceSpec(id=number, num_tokens=num_tokens, num_targets=num_tokens - seen - 1, images=tuple(runs))


class DrawnTokens:
    """Any ids; tokens of images are no targets. See `TokenSource`."""

    def __init__(self, sequences: Sequence[SequenceSpec], *, vocab_size: int, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self._ids = [draw.integers(0, vocab_size, each.num_tokens) for each in sequences]
        self._targets = [np.append(ids[1:], IGNORED) for ids in self._ids]
        for targets, sequence in zip(self._targets, sequences, strict=True):
            for start, stop in (each for run in sequence.images for each in run.ranges()):
                targets[max(start - 1, 0) : stop - 1] = IGNORED

    def read(self, sequence: int, /, *, start: int, stop: int) -> tuple[Tokens, Tokens]:
        return self._ids[sequence][start:stop], self._targets[sequence][start:stop]


class DrawnImages:
    """Noise, made once, as decoders have images ready ahead of a step. See `ImageSource`."""

    def __init__(self, engine: RankEngine, sequences: Sequence[SequenceSpec], *, seed: int) -> None:
        self._engine, self._seed = engine, seed
        self._sides = [list(_sides(each)) for each in sequences]
        self.pixels = functools.cache(self._pixels)

    def _pixels(self, sequence: int, /, *, first: int, last: int) -> DecodedImages:
        draw = np.random.default_rng((self._seed, sequence, first))
        blank = [
            self._engine.generation.module.blank_images(1, side=side) for side in self._sides[sequence][first:last]
        ]
        shape = (sum(len(each.values) for each in blank), *blank[0].values.shape[1:])
        values = draw.standard_normal(shape, np.float32)
        return DecodedImages(values=values, grids=np.concatenate([each.grids for each in blank]))

    def positions(self, _sequence: int, /, *, start: int, stop: int) -> Tokens:
        """Costs what any positions cost."""
        return np.arange(start, stop)


def _sides(sequence: SequenceSpec) -> Iterator[int]:
    for run in sequence.images:
        yield from (math.isqrt(run.num_patches),) * run.count


SHAPE: dict[str, Any] = {"num_layers": 4, "hidden_size": 128, "num_heads": 4, "ffn_size": 512}
"""Shape of an encoder that takes about as long as the language model of `jobs/quickstart.yaml`."""

EYES: dict[str, tuple[dict[str, Any], Rows]] = {
    "qwen3_vl": (
        SHAPE | {"patch_size": 16, "image_size": 512, "deepstack_layers": (1, 2)},
        Rows(most_tokens=2048, sides=(8, 12, 16, 20, 24, 32)),
    ),
    "internvl": (SHAPE | {"patch_size": 14, "image_size": 224}, Rows(most_tokens=2048, tile=16, most_images=6)),
}
"""Encoder's shape and rows for it, by family."""

SMALL: dict[str, tuple[dict[str, Any], Rows]] = {
    "qwen3_vl": (
        {"num_layers": 2, "image_size": 64, "deepstack_layers": (1,)},
        Rows(most_tokens=64, sides=(2, 4), most_images=2),
    ),
    "internvl": ({"num_layers": 2, "image_size": 64}, Rows(most_tokens=64, tile=4, most_images=2)),
}
"""The same in a moment."""
