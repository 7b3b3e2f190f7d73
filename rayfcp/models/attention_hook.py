"""Our attention as an attention implementation of the transformers library, and recomputation per layer."""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from rayfcp.execute.attention.function import AttentionContext, attention
from rayfcp.execute.attention.kept import KeptResults
from rayfcp.models.latent import up_projection
from rayfcp.values import FULL, LayerKind, attends

IMPLEMENTATION = "rayfcp"
"""Name under which the library finds our attention; it builds no mask for names that it does not know."""

KEYWORD = "rayfcp_attention"
"""Keyword argument of the model, its layers and their attention that is `Carried`."""


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
    attention_mask: Tensor | None = None,  # noqa: ARG001  the library has none for us
    *,
    scaling: float | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """`[1, heads, tokens, head_dim]` in, `[1, tokens, heads, value_dim]` out, as the library defines it; keys and
    values may be latents (`rayfcp.models.latent`)."""
    carried: Carried | None = keywords.get(KEYWORD)
    if carried is None:
        raise ValueError(
            f"{type(module).__name__} was called without {KEYWORD}=; pass the AttentionContext to the model"
        )
    context, window = carried.context, keywords.get("sliding_window") or 0
    if window != context.kind.window:
        context = context.of_kind(LayerKind(window=window))
    query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    device = query.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)  # norms and rotation leave queries and keys in a wider one
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    options: dict[str, Any] = {"softcap": keywords.get("softcap") or 0.0, "sinks": keywords.get("s_aux")}
    options["up_projection"] = up_projection(module, query)
    return attention(query, key, value, context, scale=scaling, **options).unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, _attend)


def follow_context(layers: Mapping[int, nn.Module], *, kinds: Sequence[LayerKind] = ()) -> None:
    """Let each layer of a stage, by its number in the model, pass that number and the program of its kind to its
    attention, and recompute its activations in backward if the context of the call says so. `kinds`: of all layers of
    the model; full attention in all if empty.

    The recomputed layers are a property of stage and microbatch, the same on every rank, so that recomputed exchanges
    match. Where attention is kept, recomputation takes its results from the forward pass and exchanges nothing.
    """
    for index, (number, layer) in enumerate(sorted(layers.items())):
        kind = kinds[number] if kinds else FULL
        layer.forward = functools.partial(_forward, layer.forward, index, number, kind)


def compile_around_attention(layer: nn.Module, *, backend: str) -> None:
    """Let `torch.compile` fuse what a layer that follows contexts computes before and after its attention, which stays
    as it is. Numbers of tokens are symbols."""
    AttentionInterface.register(IMPLEMENTATION, torch.compiler.disable(_attend))
    follows: Any = layer.forward
    original, *numbers = follows.args
    layer.forward = functools.partial(_forward, torch.compile(original, backend=backend, dynamic=True), *numbers)


def _forward(original: Any, index: int, number: int, kind: LayerKind, *args: Any, **keywords: Any) -> Any:
    carried: Carried | None = keywords.get(KEYWORD)
    if carried is None:
        return original(*args, **keywords)
    context = carried.context.of_kind(kind) if attends(kind) else carried.context
    recomputed = index < context.recomputed_layers
    kept = KeptResults() if recomputed and context.keeps_attention else None

    def run(*args: Any, **keywords: Any) -> Any:
        own = replace(context, layer=number, recomputed=recomputed, kept=kept, calls=Counter())
        return original(*args, **keywords | {KEYWORD: Carried(own)})

    if not recomputed:
        return run(*args, **keywords)
    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **keywords)
