"""Our attention as an attention implementation of the transformers library, and recomputation per layer."""

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from rayfcp.execute.attention.function import AttentionContext, attention
from rayfcp.execute.attention.kept import KeptResults
from rayfcp.values import LayerKind

IMPLEMENTATION = "rayfcp"
"""Name under which the library finds our attention; it builds no mask for names that it does not know."""

KEYWORD = "rayfcp_attention"
"""Keyword argument of the model, its layers and their attention that carries the `AttentionContext`."""


class Carried:
    """An `AttentionContext` on its way through the library's modules.

    No dataclass: of these torch looks at each field, down to the lengths of all sequences. FSDP2 searches them for
    tensors in every call of a layer (torch 2.13), and compiled code is for one value of a frozen one, so that layers
    were compiled anew for each number of sequences and soon not at all (torch 2.11).
    """

    __slots__ = ("context",)

    def __init__(self, context: AttentionContext) -> None:
        self.context = context


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """`[1, heads, tokens, head_dim]` in, `[1, tokens, heads, head_dim]` out, as the library defines it."""
    carried: Carried | None = keywords.get(KEYWORD)
    if carried is None:
        raise ValueError(
            f"{type(module).__name__} was called without {KEYWORD}=; pass the AttentionContext to the model"
        )
    if keywords.get("softcap") is not None:
        raise ValueError(
            f"{type(module).__name__}: softcap={keywords['softcap']} is not supported; use a model without it"
        )
    context = carried.context.of_kind(LayerKind(window=keywords.get("sliding_window") or 0))
    query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    if torch.is_autocast_enabled(query.device.type):  # norms and rotation leave queries and keys in a wider dtype
        query, key, value = (each.to(torch.get_autocast_dtype(each.device.type)) for each in (query, key, value))
    return attention(query, key, value, context, scale=scaling).unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, _attend)


def follow_context(layers: Mapping[int, nn.Module]) -> None:
    """Let each layer of a stage, by its number in the model, pass that number to its attention, and recompute its
    activations in backward if the context of the call says so.

    The recomputed layers are a property of stage and microbatch, the same on every rank, so that recomputed exchanges
    match. Where attention is kept, recomputation takes its results from the forward pass and exchanges nothing.
    """
    for index, (number, layer) in enumerate(sorted(layers.items())):
        layer.forward = functools.partial(_forward, layer.forward, index, number)


def compile_around_attention(layer: nn.Module, *, backend: str) -> None:
    """Let `torch.compile` fuse what a layer that follows contexts computes before and after its attention, which stays
    as it is. Numbers of tokens are symbols."""
    AttentionInterface.register(IMPLEMENTATION, torch.compiler.disable(_attend))
    follows: Any = layer.forward
    original, *numbers = follows.args
    layer.forward = functools.partial(_forward, torch.compile(original, backend=backend, dynamic=True), *numbers)


def _forward(original: Any, index: int, number: int, *args: Any, **keywords: Any) -> Any:
    carried: Carried | None = keywords.get(KEYWORD)
    if carried is None:
        return original(*args, **keywords)
    context = carried.context
    recomputed = index < context.recomputed_layers
    kept = KeptResults() if recomputed and context.keeps_attention else None
    keywords[KEYWORD] = Carried(replace(context, layer=number, recomputed=recomputed, kept=kept))
    if not recomputed:
        return original(*args, **keywords)
    return checkpoint(original, *args, use_reentrant=False, preserve_rng_state=False, **keywords)
