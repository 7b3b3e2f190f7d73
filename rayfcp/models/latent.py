"""Multi-head latent attention of the library's families: latents travel in place of keys and values.

All families expand them in a method `expand_kv(latent, rope_key)` of the attention module, right before attention, by
its `kv_b_proj`. It is replaced in each module, so that both reach our attention as they are, with the weight; names of
parameters do not change.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_EXPAND = "expand_kv"


def send_latents(layers: Iterable[nn.Module]) -> None:
    """Let the attention modules of `layers` that have latents pass them on."""
    for layer in layers:
        for module in layer.modules():
            if callable(getattr(module, _EXPAND, None)):
                setattr(module, _EXPAND, _as_they_are)


def _as_they_are(latent: Tensor, rope_key: Tensor) -> tuple[Tensor, Tensor]:
    return latent, rope_key


def up_projection(module: nn.Module, like: Tensor) -> Tensor | None:
    """`[heads, nope + value_dim, latent]` of an attention module whose latents, in the dtype of `like`, travel; None of
    others. Of a layer with an adapter, or with packed weights, it is the product with the identity."""
    if getattr(module, _EXPAND, None) is not _as_they_are:
        return None
    given: Any = module
    projection = given.kv_b_proj
    if type(projection) is nn.Linear:
        weight = projection.weight
    else:
        weight = projection(torch.eye(given.kv_lora_rank, dtype=like.dtype, device=like.device)).t()
    up: Tensor = weight.to(like.dtype).unflatten(0, (-1, given.qk_nope_head_dim + given.v_head_dim))
    return up
