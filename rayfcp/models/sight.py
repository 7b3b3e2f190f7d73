"""A row of tokens with a picture in it, for a check of a model that sees: as the library takes it, and as we do."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from rayfcp.execute.interfaces import Pixels, Placed
from rayfcp.models.library import text_of
from rayfcp.models.vision_lm import VisionLM

_BEFORE, _BEHIND = 5, 4
"""Tokens of text around the picture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """`ids`, `[tokens]`, of which `num_seen` from the sixth on stand for the picture `pixels`."""

    ids: Tensor
    num_seen: int
    pixels: Pixels

    @property
    def given(self) -> dict[str, Any]:
        """Arguments of the library's model."""
        values, ids = torch.from_numpy(self.pixels.values), self.ids[None]
        if values.ndim > 2:
            return {"input_ids": ids, "pixel_values": values}
        shape = torch.cat([torch.ones(1, 1, dtype=torch.int64), torch.from_numpy(self.pixels.grids)], dim=1)
        return {"input_ids": ids, "pixel_values": values, "image_grid_thw": shape, "mm_token_type_ids": self._types}

    @property
    def _types(self) -> Tensor:
        types = torch.zeros_like(self.ids)
        types[_BEFORE : _BEFORE + self.num_seen] = 1
        return types[None].int()

    def positions(self, library: Any) -> Tensor:
        """`[3, tokens]` as the library has them, or `[tokens]`."""
        given = {name: value for name, value in self.given.items() if name != "pixel_values"}
        if "image_grid_thw" not in given:
            return torch.arange(len(self.ids))
        found: Tensor = library.model.get_rope_index(**given)[0]
        return found[:, 0]

    def placed(self, model: VisionLM, *, start: int) -> Placed:
        """Its features, in a row that begins `start` tokens after the first of all."""
        rows = torch.arange(start + _BEFORE, start + _BEFORE + self.num_seen)
        return Placed(features=model.encode(self.pixels), rows=rows)


def make_sight(config: PreTrainedConfig, generator: torch.Generator) -> Sight:
    """With a picture of random pixels: 4 x 4 patches, as large as a tile of `narrowed` models."""
    vision, side = config.vision_config, 4  # type: ignore[attr-defined]
    num_seen = side * side // 4
    ids = torch.randint(0, text_of(config).vocab_size - 2, (_BEFORE + num_seen + _BEHIND,), generator=generator)
    ids[_BEFORE : _BEFORE + num_seen] = config.image_token_id  # type: ignore[attr-defined]
    if config.model_type == "qwen3_vl":
        shape: tuple[int, ...] = (side * side, vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)
    else:
        shape = (1, vision.num_channels, *(side * each for each in vision.patch_size))
    values = torch.randn(shape, generator=generator).numpy()
    return Sight(ids=ids, num_seen=num_seen, pixels=Pixels(values=values, grids=np.array([[side, side]])))
