"""Pixels of the images that a rank encodes, and rotary positions of tokens on three axes."""

import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from rayfcp.config import ConfigError
from rayfcp.data.manifest import image_file
from rayfcp.data.rows import BadReason, BadRow, BadRowError
from rayfcp.data.shards import ShardReader, TokenReader
from rayfcp.data.storage import read_prepared
from rayfcp.data.vision.images import decoded
from rayfcp.data.vision.layout import MediaItem, items_of
from rayfcp.data.vision.processors import ImageTokenizer, PixelArray
from rayfcp.values import GlobalBatch, Sample

Integers = npt.NDArray[np.int64]
ImageRange = tuple[int, int, int]
"""A sequence of a batch, and its images `[first, last)`, counted over all its runs."""

_KEPT_SAMPLES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedImages:
    """Images one after the other, as the library's processor makes them.

    `values`: `[patches, patch_values]` where sizes differ (Qwen3-VL), `[images, channels, height, width]` where all are
    tiles (InternVL). `grids`: `[images, 2]`, height and width in patches. `broken`: rows of the shards with images
    that cannot be decoded and are grey instead.
    """

    values: PixelArray
    grids: Integers
    broken: tuple[BadRow, ...] = ()


def sample_items(reader: TokenReader, sample: Sample) -> list[tuple[MediaItem, Integers]]:
    """Images and videos of a sample, their tokens counted from its first one, each with first byte and size `[parts,
    2]` of its parts; see `read_part`."""
    shard = reader.shard(sample)
    if not shard.info.has_images:
        return []
    parts = shard.values(sample.row, "parts").reshape(-1, 2)
    found, taken = [], 0
    for item in items_of(shard.values(sample.row, "items")):
        if sample.start <= item.start < sample.stop:
            own = item._replace(start=item.start - sample.start, stop=item.stop - sample.start)
            found.append((own, parts[taken : taken + item.parts]))
        taken += item.parts
    return found


def read_part(reader: TokenReader, sample: Sample, *, first: int, num_bytes: int) -> bytes:
    """Bytes of an image or a frame of the sample, by one read.

    Raises:
        OSError: The file ends before them.
    """
    shard = reader.shard(sample)
    found = bytes(shard.fs.cat_file(image_file(shard.path), start=first, end=first + num_bytes))
    if len(found) != num_bytes:
        raise OSError(f"it gives {len(found)} of {num_bytes} bytes from byte {first} on")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """Units `[low, high)` of an item that a range needs. `key`: equal for items with the same values."""

    key: Any
    item: MediaItem
    places: Integers
    low: int
    high: int

    def part_of(self, whole: DecodedImages, *, row: int) -> DecodedImages:
        """Return these units of the decoded item `whole`, as part of `row` of its shard."""
        rows = whole.values.shape[0] // self.item.units
        values = whole.values[self.low * rows : self.high * rows]
        broken = tuple(replace(each, row=row) for each in whole.broken)
        return DecodedImages(values=values, grids=whole.grids[self.low : self.high], broken=broken)


class ImageDecoder:
    """Reads and decodes images of samples. `on_item` is called after each image or video."""

    def __init__(
        self, reader: TokenReader, processor: ImageTokenizer, *, on_item: Callable[[], None] = lambda: None
    ) -> None:
        self._reader, self._family, self._on_item = reader, processor.family, on_item

    def decode(self, batch: GlobalBatch, wanted: Iterable[ImageRange]) -> dict[ImageRange, DecodedImages]:
        """Decode each of `wanted`. An item that several ranges need is decoded once, also if it is in several rows.

        Raises:
            UnreadableFileError: Bytes of an image cannot be read.
        """
        uses = {each: list(self._uses(batch, each)) for each in wanted}
        left = Counter(use.key for own in uses.values() for use in own)
        kept: dict[Any, DecodedImages] = {}
        found: dict[ImageRange, DecodedImages] = {}
        for each, own in uses.items():
            pieces = []
            for use in own:
                sample = batch.samples[each[0]]
                whole = kept.pop(use.key, None)
                if whole is None:
                    whole = self._read(sample, use.item, use.places)
                    self._on_item()
                left[use.key] -= 1
                if left[use.key]:
                    kept[use.key] = whole
                pieces.append(use.part_of(whole, row=sample.row))
            found[each] = join_images(pieces)
        return found

    def _uses(self, batch: GlobalBatch, wanted: ImageRange) -> Iterator[_Use]:
        sequence, first, stop = wanted
        sample, before = batch.samples[sequence], 0
        for item, places in sample_items(self._reader, sample):
            low, high = max(first - before, 0), min(stop - before, item.units)
            before += item.units
            if low < high:
                key = (sample.shard, item[:4], places.tobytes())
                yield _Use(key=key, item=item, places=places, low=low, high=high)

    def _read(self, sample: Sample, item: MediaItem, places: Integers) -> DecodedImages:
        """Return a decoded item. Failed reads, and decoding without enough memory, are tried again."""
        shard = self._reader.shard(sample)
        return read_prepared(lambda: self._item(sample, item, places), fs=shard.fs, path=image_file(shard.path))

    def _item(self, sample: Sample, item: MediaItem, places: Integers) -> DecodedImages:
        parts = [read_part(self._reader, sample, first=int(first), num_bytes=int(size)) for first, size in places]
        shape = self._family.unit_shape(item.height, item.width)
        grids = np.tile(np.array([[item.height, item.width]], dtype=np.int64), (item.units, 1))
        try:
            frames = [decoded(part) for part in parts]
            values = self._family.video_values(frames) if item.is_video else self._family.image_values(frames[0])
            if values.shape != (item.units * shape[0], *shape[1:]):
                raise ValueError(f"gives {values.shape[0]} rows, its header promised {item.units * shape[0]}")
        except Exception as error:  # the formats' readers raise errors of all kinds for broken bytes
            shard = self._reader.shard(sample)
            _check_bytes_are_to_blame(error, shard)
            broken = BadRowError(BadReason.IMAGE_BROKEN, error).at(shard.info.name, row=sample.row)
            grey = np.zeros((item.units * shape[0], *shape[1:]), dtype=np.float32)
            return DecodedImages(values=grey, grids=grids, broken=(broken,))
        return DecodedImages(values=values, grids=grids)


def _check_bytes_are_to_blame(error: Exception, shard: ShardReader) -> None:
    """Raise `error` if the machine failed: its errors have an errno, errors of the formats' readers have none. Raise
    OSError if the image file is not the one that was prepared."""
    of_system = isinstance(error, OSError) and (error.errno is not None or "out of memory" in str(error))
    if of_system or isinstance(error, MemoryError | ConfigError):
        raise error
    if (size := shard.fs.size(image_file(shard.path))) != shard.info.picture_bytes:
        raise OSError(f"it holds {size} bytes, must be {shard.info.picture_bytes} as it was prepared")


def join_images(pieces: Sequence[DecodedImages]) -> DecodedImages:
    """All images, in order."""
    return DecodedImages(
        values=np.concatenate([piece.values for piece in pieces]),
        grids=np.concatenate([piece.grids for piece in pieces]),
        broken=tuple(row for piece in pieces for row in piece.broken),
    )


class RotaryPositions:
    """Rotary positions of the tokens of samples; those of the last samples with images are kept."""

    def __init__(self, reader: TokenReader, processor: ImageTokenizer) -> None:
        self._reader, self._family = reader, processor.family
        self._of_whole = lru_cache(_KEPT_SAMPLES)(self._whole)

    def of(self, sample: Sample, *, start: int, stop: int) -> Integers:
        """Positions of tokens `[start, stop)`: `[3, tokens]` for families with three axes, else `[tokens]`."""
        if not self._family.has_grid_positions:
            return np.arange(start, stop)
        if not sample.images:
            return np.tile(np.arange(start, stop), (3, 1))
        return self._of_whole(sample)[:, start:stop]

    def _whole(self, sample: Sample) -> Integers:
        """Positions by the library's own rule, called without a model."""
        import torch

        library: Any = importlib.import_module("transformers.models.qwen3_vl.modeling_qwen3_vl").Qwen3VLModel
        processor = self._family.processor
        vision = SimpleNamespace(spatial_merge_size=processor.image_processor.merge_size)
        model = SimpleNamespace(
            config=SimpleNamespace(vision_config=vision),
            get_vision_position_ids=partial(library.get_vision_position_ids, None),
        )
        tokens = torch.from_numpy(self._reader.read(sample, start=0, stop=sample.num_tokens)[0])
        kinds = (tokens == processor.image_token_id) + 2 * (tokens == processor.video_token_id)
        grids: dict[bool, list[tuple[int, int, int]]] = {False: [], True: []}
        for item, _ in sample_items(self._reader, sample):
            grids[bool(item.is_video)].append((item.units, item.height, item.width))
        images, videos = (torch.tensor(grids[kind]) if grids[kind] else None for kind in (False, True))
        found, _ = library.get_rope_index(
            model, tokens[None], kinds[None], image_grid_thw=images, video_grid_thw=videos
        )
        return found[:, 0].numpy()  # type: ignore[no-any-return]
