"""Tiny VLMs, rows of text, images and videos, and results of the library alone for each row."""

import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoConfig, PreTrainedConfig

from rayfcp.data.vision.decoding import DecodedImages
from rayfcp.execute.interpreter import Tokens
from rayfcp.models.build import random_model
from rayfcp.models.library import make_library_model
from rayfcp.models.vision import VisionLM
from rayfcp.values import Images, SequenceSpec
from tests.execute.cases import SEED, Gradients
from tests.models.families import disturb

VOCAB = 61
WORDS = 54
"""Ids below are text."""
IMAGE, VIDEO = 58, 59
PATCH = 4
_TEXT = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}


def vlm_config(family: str) -> PreTrainedConfig:
    """Qwen3-VL with features between layers and tied embeddings, or InternVL over Qwen2 with tiles of 4 x 4 patches."""
    if family == "qwen3_vl":
        return AutoConfig.for_model(
            family,
            text_config={"model_type": "qwen3_vl_text", "head_dim": 8, "rope_parameters": _ROPE, **_TEXT},
            vision_config={
                "model_type": "qwen3_vl_vision",
                "depth": 3,
                "hidden_size": 32,
                "intermediate_size": 40,
                "num_heads": 4,
                "patch_size": PATCH,
                "out_hidden_size": 32,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0, 1],
            },
            tie_word_embeddings=True,
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_start_token_id=56,
            vision_end_token_id=57,
        )
    return AutoConfig.for_model(
        family,
        text_config={"model_type": "qwen2", **_TEXT},
        vision_config={
            "model_type": "internvl_vision",
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_attention_heads": 4,
            "patch_size": [PATCH, PATCH],
            "image_size": [4 * PATCH, 4 * PATCH],
        },
        image_token_id=IMAGE,
        tie_word_embeddings=False,
    )


def vlm_model(config: PreTrainedConfig, *, dtype: str, freeze: bool = False) -> VisionLM:
    """Whole, without weights that hide a difference; the same each time."""
    model = random_model(copy.deepcopy(config), dtype=dtype, seed=SEED, freeze_vision=freeze)
    disturb(model)
    assert isinstance(model, VisionLM)
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class Show:
    """`frames` images of `grid` patches, each behind `words` tokens of text. More than one frame: a video."""

    grid: tuple[int, int]
    words: int = 1
    frames: int = 1

    @property
    def num_tokens(self) -> int:
        """Tokens of one frame."""
        return self.grid[0] * self.grid[1] // 4


@dataclass(frozen=True, kw_only=True)
class Row:
    """Shows, and at the end `words` tokens of text."""

    words: int
    shows: tuple[Show, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.words + sum(show.frames * (show.words + show.num_tokens) for show in self.shows)

    @property
    def images(self) -> tuple[Images, ...]:
        found, at = [], 0
        for show in self.shows:
            stride = show.words + show.num_tokens
            found.append(
                Images(
                    start=at + show.words,
                    num_tokens=show.num_tokens,
                    num_patches=show.grid[0] * show.grid[1],
                    count=show.frames,
                    stride=stride if show.frames > 1 else 0,
                )
            )
            at += show.frames * stride
        return tuple(found)

    @property
    def grids(self) -> list[tuple[int, int]]:
        """Grid of each image."""
        return [show.grid for show in self.shows for _ in range(show.frames)]


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Random contents of rows for a family; a source of tokens and of images."""

    family: str
    rows: tuple[Row, ...]
    seed: int = 0

    @property
    def sequences(self) -> list[SequenceSpec]:
        return [
            SequenceSpec(id=at, num_tokens=row.num_tokens, num_targets=row.num_tokens - 1, images=row.images)
            for at, row in enumerate(self.rows)
        ]

    @property
    def num_targets(self) -> int:
        return sum(row.num_tokens - 1 for row in self.rows)

    @cached_property
    def ids(self) -> list[Tokens]:
        rng = np.random.default_rng(self.seed)
        found = []
        for row in self.rows:
            ids = rng.integers(0, WORDS, row.num_tokens)
            for run in row.images:
                for start, stop in run.ranges():
                    ids[start:stop] = VIDEO if run.count > 1 and self.family == "qwen3_vl" else IMAGE
            found.append(ids)
        return found

    @cached_property
    def values(self) -> list[list[np.ndarray]]:
        """Pixel values of each row's images."""
        rng = np.random.default_rng(self.seed + 1)
        return [[self._image(grid, rng) for grid in row.grids] for row in self.rows]

    def _image(self, grid: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
        if self.family == "qwen3_vl":
            return rng.standard_normal((grid[0] * grid[1], 3 * 2 * PATCH * PATCH)).astype(np.float32)
        return rng.standard_normal((1, 3, grid[0] * PATCH, grid[1] * PATCH)).astype(np.float32)

    def read(self, sequence: int, *, start: int, stop: int) -> tuple[Tokens, Tokens]:
        row = self.ids[sequence]
        return row[start:stop], np.append(row[1:], -100)[start:stop]

    def pixels(self, sequence: int, *, first: int, last: int) -> DecodedImages:
        grids = np.array(self.rows[sequence].grids[first:last])
        return DecodedImages(values=np.concatenate(self.values[sequence][first:last]), grids=grids)

    def positions(self, sequence: int, *, start: int, stop: int) -> Tokens:
        if self.family == "qwen3_vl":
            return self._positions[sequence][:, start:stop]
        return np.arange(start, stop)

    @cached_property
    def _positions(self) -> list[Tokens]:
        """As the library has them."""
        with torch.device("meta"):
            model = make_library_model(vlm_config(self.family))
        found = []
        for at in range(len(self.rows)):
            given = self.given(at)
            given = {name: value for name, value in given.items() if not name.startswith("pixel")}
            found.append(model.model.get_rope_index(**given)[0][:, 0].numpy())
        return found

    def given(self, at: int) -> dict[str, Any]:
        """Arguments of the library's model for one row."""
        row, ids = self.rows[at], torch.from_numpy(self.ids[at])[None]
        images = [torch.from_numpy(each) for each in self.values[at]]
        if self.family != "qwen3_vl":
            return {"input_ids": ids} | ({"pixel_values": torch.cat(images)} if images else {})
        left = iter(images)
        parts: dict[str, list[Any]] = {"image": [], "video": []}
        grids: dict[str, list[Any]] = {"image": [], "video": []}
        for show in row.shows:
            kind = "video" if show.frames > 1 else "image"
            parts[kind] += [next(left) for _ in range(show.frames)]
            grids[kind].append([show.frames, *show.grid])
        types = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
        given: dict[str, Any] = {"input_ids": ids, "mm_token_type_ids": types}
        for kind, suffix in (("image", ""), ("video", "_videos")):
            if parts[kind]:
                given |= {
                    f"pixel_values{suffix}": torch.cat(parts[kind]),
                    f"{kind}_grid_thw": torch.tensor(grids[kind]),
                }
        return given


def by_library(shown: Shown, *, dtype: str, freeze: bool) -> tuple[float, Gradients]:
    """Mean loss and its gradients, each row alone, by the library's own model and attention."""
    config = vlm_config(shown.family)
    ours = vlm_model(config, dtype=dtype, freeze=freeze)
    model = make_library_model(copy.deepcopy(config), attn_implementation="sdpa").to(getattr(torch, dtype)).train()
    model.load_state_dict(ours.model.state_dict())
    frozen = {name for name, parameter in ours.named_parameters() if not parameter.requires_grad}
    total = 0.0
    for at, row in enumerate(shown.rows):
        if row.num_tokens == 1:
            continue
        given = shown.given(at)
        logits = model(**given, use_cache=False).logits[0]
        loss = F.cross_entropy(logits[:-1], given["input_ids"][0, 1:], reduction="sum") / shown.num_targets
        loss.backward()
        total += float(loss.detach())
    named = {f"model.{name}": parameter.grad for name, parameter in model.named_parameters()}
    return total, {name: gradient for name, gradient in named.items() if name not in frozen}
