"""Attention inside pictures, all in one call of our kernel, as an implementation of the transformers library.

The library's vision encoders: pictures of several sizes in, features of their tokens out.
"""

import importlib
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface

from rayfcp.execute.devices.device import moved
from rayfcp.execute.interpreter import Pixels
from rayfcp.execute.kernels import Pairs, pick_kernel

PICTURES = "rayfcp_pictures"
"""Name under which the library finds it."""

LENGTHS = "rayfcp_lengths"
"""Keyword argument of the encoder, its layers and their attention: patches of each picture in the row; each row of the
batch is a picture without it."""

Lengths = tuple[int, ...]


def _attend(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,  # noqa: ARG001  some families name it
    *,
    scaling: float | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """`[rows, heads, patches, head_dim]` in, `[rows, patches, heads, head_dim]` out, as the library wants it."""
    rows, heads, patches, head_dim = query.shape
    lengths: Lengths = keywords.get(LENGTHS) or (patches,) * rows
    packed = (each.transpose(1, 2).reshape(rows * patches, heads, head_dim) for each in (query, key, value))
    out: Tensor = _Pictures.apply(*packed, lengths, head_dim**-0.5 if scaling is None else scaling)  # type: ignore[no-untyped-call]
    return out.view(rows, patches, heads, head_dim), None


AttentionInterface.register(PICTURES, _attend)


class _Pictures(torch.autograd.Function):
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


class VisionEncoder(Protocol):
    """A view of the encoder inside a library model. `modules`: all that only pictures pass; `layers`: those of them
    that are sharded one by one."""

    modules: tuple[nn.Module, ...]
    layers: tuple[nn.Module, ...]

    def encode(self, pixels: Pixels, device: torch.device) -> Tensor:
        """`[tokens, num_mergers x hidden]`, pictures in their order; each is alone in its attention."""
        ...

    def blank(self, count: int = 1, *, side: int = 0) -> Pixels:
        """Pictures of `side` x `side` patches without contents; as small as can be if it is 0."""
        ...


class Qwen3VLEncoder(VisionEncoder):
    """Patches of any number of pictures in one row. Features: the last merger's, then those of the mergers between
    layers (deepstack), which the first layers of the language model add."""

    def __init__(self, library: Any) -> None:
        self._visual, config = library.model.visual, library.config.vision_config
        self.modules = (self._visual,)
        self.layers = tuple(self._visual.blocks)
        self._merge = config.spatial_merge_size
        self._patch_values = config.in_channels * config.temporal_patch_size * config.patch_size**2

    def encode(self, pixels: Pixels, device: torch.device) -> Tensor:
        frames = np.ones((len(pixels.grids), 1), np.int64)
        grids = torch.from_numpy(np.concatenate([frames, pixels.grids], axis=1))
        values = moved(pixels.values, dtype=torch.float32, device=device)
        output = self._visual(values, grid_thw=grids.to(device), return_dict=True, **self._places(grids, device))
        return torch.cat([output.pooler_output, *output.deepstack_features], dim=1)

    def _places(self, grids: Tensor, device: torch.device) -> dict[str, Any]:
        """What the library makes of grids, made on the host: it would wait for the device in every layer. All pictures
        are one segment, which our attention takes apart. Early releases take none of it."""
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
        sent = {name: moved(each.numpy(), dtype=each.dtype, device=device) for name, each in on_device.items()}
        sizes = grids.prod(1).tolist()
        return sent | {"cu_seqlens": torch.tensor([0, sum(sizes)], dtype=torch.int32), LENGTHS: tuple(sizes)}

    def blank(self, count: int = 1, *, side: int = 0) -> Pixels:
        side = side or self._merge
        values = np.zeros((count * side * side, self._patch_values), np.float32)
        return Pixels(values=values, grids=np.full((count, 2), side))


class InternVLEncoder(VisionEncoder):
    """Tiles of one size, along a batch dimension."""

    def __init__(self, library: Any) -> None:
        self._model, config = library.model, library.config
        self.modules = (self._model.vision_tower, self._model.multi_modal_projector)
        self.layers = tuple(self._model.vision_tower.encoder.layer)
        self._merge = round(1 / config.downsample_ratio)
        self._patch, self._channels = config.vision_config.patch_size, config.vision_config.num_channels

    def encode(self, pixels: Pixels, device: torch.device) -> Tensor:
        values = moved(pixels.values, dtype=torch.float32, device=device)
        features: Tensor = self._model.get_image_features(values, return_dict=True).pooler_output
        return features.flatten(0, 1).clone()  # since FSDP's hooks want no view

    def blank(self, count: int = 1, *, side: int = 0) -> Pixels:
        side = side or self._merge
        height, width = (side * each for each in self._patch)
        values = np.zeros((count, self._channels, height, width), np.float32)
        return Pixels(values=values, grids=np.full((count, 2), side))


ENCODERS: dict[str, Callable[[Any], VisionEncoder]] = {"qwen3_vl": Qwen3VLEncoder, "internvl": InternVLEncoder}
"""By the family's `model_type`."""
