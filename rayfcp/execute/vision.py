"""Vision inputs of a rank: decoded images, their encoder features, and the positions of their tokens.

Only runs with images come here. Features are encoded on the ranks that the plan says and exchanged for those of each
rank's own tokens, differentiably.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rayfcp.data import TokenReader
from rayfcp.data.rows import BadRow
from rayfcp.data.vision.decoding import DecodedImages, ImageDecoder, ImageRange, RotaryPositions, join_images
from rayfcp.data.vision.processors import load_processor
from rayfcp.execute.attention.reshuffle import to_loop, to_plan
from rayfcp.execute.attention.schedule import rows_of
from rayfcp.execute.parallel.transport import AttentionStats, Transport
from rayfcp.program import Encode, RankProgram, ReshuffleProgram
from rayfcp.program.instructions import wanted_images
from rayfcp.values import GlobalBatch


class ImageSource(Protocol):
    """Images of the sequences of one global batch, and the rotary positions of its tokens."""

    def pixels(self, sequence: int, /, *, first: int, last: int) -> DecodedImages:
        """Images `[first, last)` of a sequence, counted over all its runs (`SequenceSpec.images`)."""
        ...

    def positions(self, sequence: int, /, *, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Positions of tokens `[start, stop)`: `[3, tokens]` (time, height, width) where the model's positions have
        three axes, also in sequences without images; else `[tokens]`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedFeatures:
    """Image features on the rank of their tokens: `features`, `[rows, num_mergers x hidden]`, belong at `rows`,
    ascending, of the loaded tokens."""

    features: Tensor
    rows: Tensor


def pixels_of(item: Encode, images: ImageSource | None) -> DecodedImages | None:
    """Pixels of the images that a rank encodes, in order; None if it encodes none."""
    if images is None:
        raise ValueError(
            f"encode: microbatch {item.microbatch} encodes images, but there is no source of them; give images="
        )
    read = [images.pixels(each.sequence, first=each.first, last=each.last) for each in item.images]
    if not read:
        return None
    return join_images(read)


def place_features(features: Tensor, item: Encode, *, transport: Transport, stats: AttentionStats) -> PlacedFeatures:
    """Send rows of `features`, `[tokens encoded, width]`, to the ranks of their tokens; returns those of this rank's
    tokens. Differentiable: gradients take the same way back. Every rank must call it, and its result must stand in the
    graph of every rank or, with frozen encoders, of none."""
    program = item.features
    if len(features) != program.num_tokens:
        raise ValueError(
            f"encode: rank {program.rank} has features of {len(features)} tokens, its program {program.num_tokens}; "
            "give the images that were planned, in the sizes that were planned"
        )
    placed: Tensor = _ExchangeFeatures.apply(features, program, transport, stats)  # type: ignore[no-untyped-call]
    return PlacedFeatures(features=placed, rows=rows_of(item.rows, features.device))


class _ExchangeFeatures(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, features: Tensor, program: ReshuffleProgram, transport: Transport, stats: AttentionStats
    ) -> Tensor:
        ctx.program, ctx.transport, ctx.stats = program, transport, stats
        (placed,) = to_plan(program, (features.unsqueeze(1),), transport=transport, stats=stats)
        return placed[: program.num_placed].squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        program: ReshuffleProgram = ctx.program
        placed, num_rows = (gradient.unsqueeze(1),), program.num_tokens
        (returned,) = to_loop(program, placed, num_rows=num_rows, transport=ctx.transport, stats=ctx.stats)
        return returned.squeeze(1), None, None, None


class BatchImages:
    """See `ImageSource`."""

    def __init__(
        self, batch: GlobalBatch, *, decoded: Mapping[ImageRange, DecodedImages], positions: RotaryPositions
    ) -> None:
        self._batch, self._decoded, self._positions = batch, decoded, positions

    def pixels(self, sequence: int, *, first: int, last: int) -> DecodedImages:
        return self._decoded[sequence, first, last]

    def positions(self, sequence: int, *, start: int, stop: int) -> npt.NDArray[np.int64]:
        return self._positions.of(self._batch.samples[sequence], start=start, stop=stop)


class VisionLoader:
    """Prepares the images of batches by the library's `processor`.

    An image that cannot be decoded is grey, and no target of its row counts: all devices agree on these rows, whichever
    found them. `on_item` is called after each image or video that is decoded here.
    """

    def __init__(
        self,
        reader: TokenReader,
        processor: str,
        *,
        device: torch.device,
        on_item: Callable[[], None] = lambda: None,
    ) -> None:
        loaded = load_processor(processor)
        self._device = device
        self._decoder = ImageDecoder(reader, loaded, on_item=on_item)
        self._positions = RotaryPositions(reader, loaded)

    def prepare(
        self,
        program: RankProgram,
        batch: GlobalBatch,
        *,
        decoded: Mapping[ImageRange, DecodedImages] | None,
        sum_over: Callable[[Tensor], Tensor],
    ) -> tuple[GlobalBatch, BatchImages, tuple[BadRow, ...]]:
        """Return the batch without targets in rows with broken images, its images, and the rows with images that this
        device could not decode. Every device must call it. `decoded`: images of the program, if they were decoded
        elsewhere. `sum_over` sums a tensor of this device over all.

        Raises:
            UnreadableFileError: Bytes of an image cannot be read.
        """
        if decoded is None:
            decoded = self._decoder.decode(batch, wanted_images(program.instructions))
        images = BatchImages(batch, decoded=decoded, positions=self._positions)
        if not any(sample.images for sample in batch.samples):
            return batch, images, ()
        flags = torch.zeros(len(batch.samples))
        flags[[sequence for (sequence, *_), found in decoded.items() if found.broken]] = 1.0
        samples = list(batch.samples)
        for sequence in sum_over(flags.to(self._device)).nonzero().flatten().tolist():
            samples[sequence] = dataclasses.replace(samples[sequence], num_targets=0)
        broken = dict.fromkeys(row for found in decoded.values() for row in found.broken)
        return dataclasses.replace(batch, samples=tuple(samples)), images, tuple(broken)
