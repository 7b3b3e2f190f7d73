"""Vision-language models: the record of each family, its encoder, and the language model around it.

Imported only for models with a vision encoder (`library.vision_family`); text models do not need it.
"""

import copy
import importlib
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, PreTrainedConfig

from rayfcp.config.architecture import VisionConfig
from rayfcp.data.vision.decoding import DecodedImages
from rayfcp.execute.devices.backend import to_device
from rayfcp.execute.kernels import Pairs, pick_kernel
from rayfcp.execute.vision import PlacedFeatures
from rayfcp.models.causal_lm import CausalLM
from rayfcp.models.library import FFN_SIZE, HEADS, VOCAB_SIZE, text_of
from rayfcp.models.stages import Stage
from rayfcp.values import VisionProfile

IMPLEMENTATION = "rayfcp_images"
"""Name under which the library finds our attention inside images."""

LENGTHS = "rayfcp_lengths"
"""Keyword argument of the encoder, its layers and their attention: patches of each image in the row. Without it each
row of the batch is an image."""

Lengths = tuple[int, ...]

_MERGED = 2
"""Patches along each side of the square that becomes one token, in both families."""
_CHANNELS = 3
_EXAMPLE_SIDE = 4
"""Patches along a side of the example image: the least with several tokens."""
_VISION_LAYERS = 2
_BEFORE, _AFTER = 5, 4
"""Tokens of text around the example image."""


def _attend(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,  # noqa: ARG001  some families pass it by name
    *,
    scaling: float | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """`[rows, heads, patches, head_dim]` in, `[rows, patches, heads, head_dim]` out, as the library defines it."""
    rows, heads, patches, head_dim = query.shape
    lengths: Lengths = keywords.get(LENGTHS) or (patches,) * rows
    packed = (each.transpose(1, 2).reshape(rows * patches, heads, head_dim) for each in (query, key, value))
    out: Tensor = _ImageAttention.apply(*packed, lengths, head_dim**-0.5 if scaling is None else scaling)  # type: ignore[no-untyped-call]
    return out.view(rows, patches, heads, head_dim), None


AttentionInterface.register(IMPLEMENTATION, _attend)


class _ImageAttention(torch.autograd.Function):
    """Attention inside each of several images, by one call of our kernel."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, scale: float) -> Tensor:
        ctx.pairs = Pairs(query_lengths=lengths, key_lengths=lengths, causal=False, scale=scale)
        out, lse = pick_kernel(query.device.type).forward(query, key, value, pairs=ctx.pairs)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, *others = ctx.saved_tensors
        kernel = pick_kernel(query.device.type)
        found = kernel.backward(gradient.contiguous(), query, *others, pairs=ctx.pairs)
        return *(each.to(query.dtype) for each in found), None, None


class VisionFamily(ABC):
    """One family: class methods describe its configurations, an instance is a view of the encoder inside a library
    model. `modules`: all that only images pass; `layers`: those of them that are sharded one by one."""

    model_type: ClassVar[str]
    named_frames: ClassVar[int]
    """Frames of a video that share a patch, in the published models."""
    named_image_size: ClassVar[int]
    """Pixels along a side of a tile or of the table of positions, in the published models."""
    modules: tuple[nn.Module, ...]
    layers: tuple[nn.Module, ...]

    def __init__(self, library: Any) -> None:
        self._vision, self._merge = library.config.vision_config, self._merge_of(library.config)

    @abstractmethod
    def encode(self, pixels: DecodedImages, device: torch.device) -> Tensor:
        """Features `[tokens, num_mergers x hidden]` of images in their order; each attends to itself alone."""

    def blank(self, count: int = 1, *, side: int = 0) -> DecodedImages:
        """`count` empty images of `side` x `side` patches, of the least size if it is 0."""
        side = side or self._merge
        values = np.zeros(self._pixels_shape(self._vision, count=count, side=side), np.float32)
        return DecodedImages(values=values, grids=np.full((count, 2), side))

    @classmethod
    @abstractmethod
    def _merge_of(cls, config: Any) -> int:
        """Patches along each side of the square that becomes one token."""

    @classmethod
    @abstractmethod
    def _pixels_shape(cls, vision: Any, *, count: int, side: int) -> tuple[int, ...]:
        """Shape of the pixels of `count` images of `side` x `side` patches."""

    @classmethod
    @abstractmethod
    def _merger_size(cls, config: Any) -> int:
        """Width of the hidden layer of a merger."""

    @classmethod
    @abstractmethod
    def _add_keys(cls, keys: dict[str, Any], vision: VisionConfig) -> None:
        """Add what the family has of its own to the keys of `library_keys`."""

    @classmethod
    @abstractmethod
    def _narrow(cls, config: Any, *, num_layers: int) -> None:
        """Narrow what the family has of its own, in place; the language model is narrow already."""

    @classmethod
    def profile(cls, config: Any, *, frozen: bool) -> VisionProfile:
        """The encoder's shape for the cost model."""
        vision = config.vision_config
        return VisionProfile(
            num_layers=vision.num_hidden_layers,
            hidden_size=vision.hidden_size,
            num_heads=vision.num_attention_heads,
            ffn_size=vision.intermediate_size,
            patch_values=math.prod(cls._pixels_shape(vision, count=1, side=1)),
            merged_patches=cls._merge_of(config) ** 2,
            merger_size=cls._merger_size(config),
            num_mergers=1 + len(getattr(vision, "deepstack_visual_indexes", ())),
            frozen=frozen,
        )

    @classmethod
    def library_keys(cls, text: dict[str, Any], vision: VisionConfig) -> dict[str, Any]:
        """The library's keys for a model whose language model has the keys `text`."""
        keys = {
            # Embedding and head are tied by the model around the language model.
            "text_config": {name: value for name, value in text.items() if name != "tie_word_embeddings"},
            "tie_word_embeddings": text["tie_word_embeddings"],
            "image_token_id": text["vocab_size"] - 1 if vision.image_token is None else vision.image_token,
            "vision_config": {
                "num_hidden_layers": vision.num_layers,
                "hidden_size": vision.hidden_size,
                "num_attention_heads": vision.num_heads,
                "intermediate_size": vision.ffn_size,
            },
        }
        cls._add_keys(keys, vision)
        return keys

    @classmethod
    def named(cls, shape: VisionProfile) -> VisionConfig:
        """The encoder of a model that is given by name; features between layers are taken at equal distances."""
        between = shape.num_mergers - 1
        return VisionConfig(
            num_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            num_heads=shape.num_heads,
            ffn_size=shape.ffn_size,
            patch_size=math.isqrt(shape.patch_values // (_CHANNELS * cls.named_frames)),
            image_size=cls.named_image_size,
            deepstack_layers=tuple((at + 1) * shape.num_layers // (between + 1) - 1 for at in range(between)),
        )

    @classmethod
    def narrowed(cls, config: PreTrainedConfig, *, text: PreTrainedConfig, num_layers: int) -> PreTrainedConfig:
        """A copy with the narrow language model `text` and an encoder as narrow; see `library.narrowed`."""
        tiny: Any = copy.deepcopy(config)
        tiny.text_config, tiny.image_token_id = text, VOCAB_SIZE - 1
        vision = tiny.vision_config
        vision.hidden_size = HEADS * (vision.hidden_size // vision.num_attention_heads)
        vision.num_attention_heads, vision.intermediate_size = HEADS, FFN_SIZE
        vision.num_hidden_layers = min(vision.num_hidden_layers, _VISION_LAYERS)
        cls._narrow(tiny, num_layers=num_layers)
        return tiny  # type: ignore[no-any-return]

    @classmethod
    def example(cls, config: Any, generator: torch.Generator) -> "ImageExample":
        """A row with an image of random pixels, for a check of a `narrowed` model."""
        num_tokens = _EXAMPLE_SIDE**2 // _MERGED**2
        ids = torch.randint(0, text_of(config).vocab_size - 2, (_BEFORE + num_tokens + _AFTER,), generator=generator)
        ids[_BEFORE : _BEFORE + num_tokens] = config.image_token_id
        shape = cls._pixels_shape(config.vision_config, count=1, side=_EXAMPLE_SIDE)
        values = torch.randn(shape, generator=generator).numpy()
        pixels = DecodedImages(values=values, grids=np.array([[_EXAMPLE_SIDE, _EXAMPLE_SIDE]]))
        return ImageExample(ids=ids, num_image_tokens=num_tokens, pixels=pixels)


class Qwen3VL(VisionFamily):
    """Patches of any number of images in one row. Features: the last merger's, then those of the mergers between
    layers (deepstack), which the first layers of the language model add."""

    model_type = "qwen3_vl"
    named_frames, named_image_size = 2, 768

    def __init__(self, library: Any) -> None:
        super().__init__(library)
        self._visual = library.model.visual
        self.modules = (self._visual,)
        self.layers = tuple(self._visual.blocks)

    def encode(self, pixels: DecodedImages, device: torch.device) -> Tensor:
        frames = np.ones((len(pixels.grids), 1), np.int64)
        grids = torch.from_numpy(np.concatenate([frames, pixels.grids], axis=1))
        values = to_device(pixels.values, dtype=torch.float32, device=device)
        output = self._visual(values, grid_thw=grids.to(device), return_dict=True, **self._positions(grids, device))
        return torch.cat([output.pooler_output, *output.deepstack_features], dim=1)

    def _positions(self, grids: Tensor, device: torch.device) -> dict[str, Any]:
        """The library's functions of grids, evaluated on the host: in the model they would wait for the device in every
        layer. All images are one segment, which our attention takes apart. Early releases accept none of it."""
        if not hasattr(self._visual, "interpolation_mode"):
            return {}
        found = importlib.import_module("transformers.vision_utils")
        indices, weights = found.get_vision_interpolation_indices_and_weights(
            grids,
            num_grid_per_side=self._visual.num_grid_per_side,
            mode=self._visual.interpolation_mode,
            align_corners=self._visual.interpolation_align_corners,
            spatial_merge_size=self._merge,
        )
        places = found.get_vision_position_ids(grids, self._merge)
        on_device = {"interp_indices": indices, "interp_weights": weights, "position_ids": places}
        sent = {name: to_device(each.numpy(), dtype=each.dtype, device=device) for name, each in on_device.items()}
        sizes = grids.prod(1).tolist()
        return sent | {"cu_seqlens": torch.tensor([0, sum(sizes)], dtype=torch.int32), LENGTHS: tuple(sizes)}

    @classmethod
    def _merge_of(cls, config: Any) -> int:
        return int(config.vision_config.spatial_merge_size)

    @classmethod
    def _merger_size(cls, config: Any) -> int:
        return int(config.vision_config.hidden_size) * cls._merge_of(config) ** 2

    @classmethod
    def _pixels_shape(cls, vision: Any, *, count: int, side: int) -> tuple[int, ...]:
        return count * side**2, int(vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)

    @classmethod
    def _add_keys(cls, keys: dict[str, Any], vision: VisionConfig) -> None:
        text = keys["text_config"]
        # Rotary frequencies for time, height and width: shares of 24, 20 and 20 as in the published models.
        half, share = text["head_dim"] // 2, text["head_dim"] // 2 * 20 // 64
        text["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": 5_000_000.0,
            "mrope_interleaved": True,
            "mrope_section": [half - 2 * share, share, share],
        }
        keys["video_token_id"] = text["vocab_size"] - 2 if vision.video_token is None else vision.video_token
        keys["vision_config"] |= {
            "patch_size": vision.patch_size,
            "spatial_merge_size": _MERGED,
            "num_position_embeddings": (vision.image_size // vision.patch_size) ** 2,
            "out_hidden_size": text["hidden_size"],
            "deepstack_visual_indexes": list(vision.deepstack_layers),
        }

    @classmethod
    def _narrow(cls, config: Any, *, num_layers: int) -> None:
        vision = config.vision_config
        config.video_token_id = VOCAB_SIZE - 2
        vision.out_hidden_size = config.text_config.hidden_size
        count = min(len(vision.deepstack_visual_indexes), num_layers, vision.depth)
        vision.deepstack_visual_indexes = list(range(count))


class InternVL(VisionFamily):
    """Tiles of one size, along a batch dimension."""

    model_type = "internvl"
    named_frames, named_image_size = 1, 448

    def __init__(self, library: Any) -> None:
        super().__init__(library)
        self._model = library.model
        self.modules = (self._model.vision_tower, self._model.multi_modal_projector)
        self.layers = tuple(self._model.vision_tower.encoder.layer)

    def encode(self, pixels: DecodedImages, device: torch.device) -> Tensor:
        values = to_device(pixels.values, dtype=torch.float32, device=device)
        features: Tensor = self._model.get_image_features(values, return_dict=True).pooler_output
        return features.flatten(0, 1).clone()  # FSDP's hooks do not accept a view

    @classmethod
    def _merge_of(cls, config: Any) -> int:
        ratio: float = config.downsample_ratio
        return round(1 / ratio)

    @classmethod
    def _pixels_shape(cls, vision: Any, *, count: int, side: int) -> tuple[int, ...]:
        return count, vision.num_channels, *(side * each for each in vision.patch_size)

    @classmethod
    def _merger_size(cls, config: Any) -> int:
        return int(text_of(config).hidden_size)

    @classmethod
    def _add_keys(cls, keys: dict[str, Any], vision: VisionConfig) -> None:
        keys["text_config"]["model_type"] = "qwen2"
        keys["vision_config"] |= {"patch_size": [vision.patch_size] * 2, "image_size": [vision.image_size] * 2}
        keys["image_seq_length"] = (vision.image_size // vision.patch_size // _MERGED) ** 2

    @classmethod
    def _narrow(cls, config: Any, *, num_layers: int) -> None:  # noqa: ARG003
        config.vision_config.image_size = [_EXAMPLE_SIDE * each for each in config.vision_config.patch_size]


FAMILIES: dict[str, type[VisionFamily]] = {family.model_type: family for family in (Qwen3VL, InternVL)}
"""By the family's `model_type`, those of `config.models.VISION_FAMILIES`."""


class VisionLM(CausalLM):
    """Wraps a `*ForConditionalGeneration`; parameters are the library's own, under `model`.

    Args:
        model: As for `CausalLM`.
        stage: All layers, as long as pipeline stages do not run with images.
        freeze: The encoder, mergers and projector included, keeps its weights.
    """

    def __init__(self, model: Any, *, stage: Stage | None = None, freeze: bool = False) -> None:
        super().__init__(model, stage=stage)
        self.encoder = FAMILIES[model.config.model_type](model)
        self.is_frozen = freeze
        for module in self.encoder.modules if freeze else ():
            module.requires_grad_(False)
        decoder: Any = self.decoder
        if hasattr(decoder, "_deepstack_process"):
            # The library's own takes a mask of tokens, for whose positions the host would wait.
            decoder._deepstack_process = _add_features

    @property
    def occasional(self) -> tuple[nn.Parameter, ...]:
        found = (parameter for module in self.encoder.modules for parameter in module.parameters())
        return tuple(parameter for parameter in found if parameter.requires_grad)

    @property
    def sharded_parts(self) -> list[nn.Module]:
        return [*self.encoder.layers, *super().sharded_parts]

    def encode(self, pixels: DecodedImages | None) -> Tensor:
        """Features of the images' tokens, `[tokens, num_mergers x hidden]`, without a graph where the encoder is
        frozen. None: those of a small blank image, which only put the encoder into the graph."""
        device = next(self.parameters()).device
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.is_frozen):
            return self.encoder.encode(pixels or self.encoder.blank(), device)

    def blank_images(self, count: int, *, side: int) -> DecodedImages:
        return self.encoder.blank(count, side=side)

    def _decoder_inputs(self, inputs: Tensor, placed: PlacedFeatures | None) -> dict[str, Any]:
        if placed is None:
            return super()._decoder_inputs(inputs, None)
        embedded = self.model.get_input_embeddings()(inputs)
        first, *others = placed.features.to(embedded.dtype).split(embedded.shape[1], dim=1)
        given = {"inputs_embeds": embedded.index_copy(0, placed.rows, first).unsqueeze(0)}
        return given | ({"visual_pos_masks": placed.rows, "deepstack_visual_embeds": others} if others else {})


def _add_features(hidden: Tensor, rows: Tensor, features: Tensor) -> Tensor:
    """`hidden`, `[1, tokens, hidden]`, with `features` added at `rows`."""
    return hidden.index_add(1, rows, features.unsqueeze(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageExample:
    """A row with an image: `ids` `[tokens]`, of which `num_image_tokens` after the first five stand for `pixels`."""

    ids: Tensor
    num_image_tokens: int
    pixels: DecodedImages

    @property
    def library_inputs(self) -> dict[str, Any]:
        """Arguments of the library's model."""
        values, ids = torch.from_numpy(self.pixels.values), self.ids[None]
        if values.ndim > 2:
            return {"input_ids": ids, "pixel_values": values}
        grids = torch.cat([torch.ones(1, 1, dtype=torch.int64), torch.from_numpy(self.pixels.grids)], dim=1)
        types = torch.zeros_like(ids, dtype=torch.int32)
        types[:, _BEFORE : _BEFORE + self.num_image_tokens] = 1
        return {"input_ids": ids, "pixel_values": values, "image_grid_thw": grids, "mm_token_type_ids": types}

    def positions(self, library: Any) -> Tensor:
        """Rotary positions by the library: `[3, tokens]`, or `[tokens]`."""
        given = {name: value for name, value in self.library_inputs.items() if name != "pixel_values"}
        if "image_grid_thw" not in given:
            return torch.arange(len(self.ids))
        found: Tensor = library.model.get_rope_index(**given)[0]
        return found[:, 0]

    def placed(self, model: VisionLM, *, start: int) -> PlacedFeatures:
        """Features of the image, in a row that begins after `start` other tokens."""
        rows = torch.arange(start + _BEFORE, start + _BEFORE + self.num_image_tokens)
        return PlacedFeatures(features=model.encode(self.pixels), rows=rows)
