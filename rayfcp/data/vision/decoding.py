"""From the pictures that a rank encodes to their pixels; and where tokens stand, on three axes."""

import importlib
import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from rayfcp.data.shards import TokenReader
from rayfcp.data.vision.images import decoded
from rayfcp.data.vision.layout import Item
from rayfcp.data.vision.processors import PictureTokenizer, Values
from rayfcp.values import GlobalBatch, Sample

logger = logging.getLogger(__name__)

Integers = npt.NDArray[np.int64]
Wanted = tuple[int, int, int]
"""A sequence of a batch, and its pictures `[first, last)`, counted over all its runs."""

_KEPT_SAMPLES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """Pictures one after the other: `values` as `Family.unit_shape` says, `grids` `[pictures, 2]`, how many patches
    each is high and wide. `broken`: what could not be decoded and is grey instead, with the reason."""

    values: Values
    grids: Integers
    broken: tuple[str, ...] = ()


class PictureDecoder:
    """Reads and decodes pictures of samples."""

    def __init__(self, reader: TokenReader, processor: PictureTokenizer) -> None:
        self._reader, self._family = reader, processor.family

    def decode(self, batch: GlobalBatch, wanted: Iterable[Wanted]) -> dict[Wanted, Decoded]:
        """Each of `wanted`. An item that is wanted in several parts, one after the other, is decoded once."""
        found: dict[Wanted, Decoded] = {}
        last: tuple[tuple[int, int], Decoded] | None = None
        for sequence, first, stop in wanted:
            pieces = []
            for number, item, places, units in self._overlaps(batch.samples[sequence], first, stop):
                if last is None or last[0] != (sequence, number):
                    last = ((sequence, number), self._item(batch.samples[sequence], item, places))
                pieces.append(_cut(last[1], item, units))
            found[sequence, first, stop] = _joined(pieces)
        return found

    def _overlaps(self, sample: Sample, first: int, stop: int) -> Iterator[tuple[int, Item, Integers, tuple[int, int]]]:
        """Items with units in `[first, stop)`, and which of their own these are."""
        before = 0
        for number, (item, places) in enumerate(self._reader.items(sample)):
            low, high = max(first - before, 0), min(stop - before, item.units)
            if low < high:
                yield number, item, places, (low, high)
            before += item.units

    def _item(self, sample: Sample, item: Item, places: Integers) -> Decoded:
        shape = self._family.unit_shape(item.height, item.width)
        grids = np.tile(np.array([[item.height, item.width]], dtype=np.int64), (item.units, 1))
        try:
            frames = [
                decoded(self._reader.part(sample, first=int(first), num_bytes=int(size))) for first, size in places
            ]
            values = self._family.video_values(frames) if item.is_video else self._family.image_values(frames[0])
            if values.shape != (item.units * shape[0], *shape[1:]):
                raise ValueError(f"gives {values.shape[0]} rows, its header promised {item.units * shape[0]}")
        except Exception as error:  # formats' readers raise all kinds for broken bytes
            name = f"{self._reader.name_of(sample)}: {' '.join(str(error).split())[:120] or type(error).__name__}"
            logger.warning("a picture is grey and its row weighs nothing, %s", name)
            grey = np.zeros((item.units * shape[0], *shape[1:]), dtype=np.float32)
            return Decoded(values=grey, grids=grids, broken=(name,))
        return Decoded(values=values, grids=grids)


def _cut(whole: Decoded, item: Item, units: tuple[int, int]) -> Decoded:
    first, stop = units
    rows = whole.values.shape[0] // item.units
    values = whole.values[first * rows : stop * rows]
    return Decoded(values=values, grids=whole.grids[first:stop], broken=whole.broken)


def _joined(pieces: list[Decoded]) -> Decoded:
    if len(pieces) == 1:
        return pieces[0]
    return Decoded(
        values=np.concatenate([piece.values for piece in pieces]),
        grids=np.concatenate([piece.grids for piece in pieces]),
        broken=tuple(name for piece in pieces for name in piece.broken),
    )


class Positions:
    """Where the tokens of samples stand for rotary factors; keeps what it computed last."""

    def __init__(self, reader: TokenReader, processor: PictureTokenizer) -> None:
        self._reader, self._family = reader, processor.family
        self._kept: OrderedDict[Sample, Integers] = OrderedDict()

    def of(self, sample: Sample, *, start: int, stop: int) -> Integers:
        """Of tokens `[start, stop)`: `[3, tokens]` for families whose positions have three axes, else `[tokens]`."""
        if not self._family.has_grid_positions:
            return np.arange(start, stop)
        if not sample.pictures:
            return np.tile(np.arange(start, stop), (3, 1))
        if sample not in self._kept:
            self._kept[sample] = self._whole(sample)
            if len(self._kept) > _KEPT_SAMPLES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(sample)
        return self._kept[sample][:, start:stop]

    def _whole(self, sample: Sample) -> Integers:
        """By the library's own rule, asked without a model."""
        import torch

        library: Any = importlib.import_module("transformers.models.qwen3_vl.modeling_qwen3_vl").Qwen3VLModel
        processor = self._family.processor
        merge = processor.image_processor.merge_size
        asked = SimpleNamespace(
            config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=merge)),
            get_vision_position_ids=partial(library.get_vision_position_ids, None),
        )
        tokens = torch.from_numpy(self._reader.read(sample, start=0, stop=sample.num_tokens)[0])
        kinds = (tokens == processor.image_token_id) + 2 * (tokens == processor.video_token_id)
        grids: dict[bool, list[tuple[int, int, int]]] = {False: [], True: []}
        for item, _ in self._reader.items(sample):
            grids[bool(item.is_video)].append((item.units, item.height, item.width))
        images, videos = (torch.tensor(grids[kind]) if grids[kind] else None for kind in (False, True))
        found, _ = library.get_rope_index(
            asked, tokens[None], kinds[None], image_grid_thw=images, video_grid_thw=videos
        )
        return found[:, 0].numpy()  # type: ignore[no-any-return]
