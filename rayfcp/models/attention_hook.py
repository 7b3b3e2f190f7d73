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

_MASK = "attention_mask"
"""Argument that also is `Carried` in layers that attend: some families' layers pass their attention nothing else."""


class Carried:
    """An `AttentionContext` on its way through the library's modules, and the positions of its tokens, `[tokens]` or
    `[axes, tokens]`.

    No dataclass: of these torch looks at each field, down to the lengths of all sequences. FSDP2 searches them for
    tensors in every call of a layer (torch 2.13), and compiled code is for one value of a frozen one, so that layers
    were compiled anew for each number of sequences and soon not at all (torch 2.11).
    """

    __slots__ = ("context", "positions")

    def __init__(self, context: AttentionContext, positions: Tensor | None = None) -> None:
        self.context, self.positions = context, positions


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Carried | None = None,
    *,
    scaling: float | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """`[1, heads, tokens, head_dim]` in, `[1, tokens, heads, value_dim]` out, as the library defines it; keys and
    values may be latents (`rayfcp.models.latent`)."""
    carried = keywords.get(KEYWORD, attention_mask)
    if not isinstance(carried, Carried):
        raise ValueError(
            f"{type(module).__name__} was called without {KEYWORD}=; pass the AttentionContext to the model"
        )
    context = carried.context
    window = keywords.get("sliding_window", context.kind.window) or 0  # PhiMoE passes its window only in masks
    if window != context.kind.window:
        context = context.of_kind(LayerKind(window=window))
    query = _scaled_by_position(module, query, positions=carried.positions)
    query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    device = query.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)  # norms and rotation leave queries and keys in a wider one
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    options: dict[str, Any] = {"softcap": keywords.get("softcap") or 0.0, "sinks": keywords.get("s_aux")}
    options["up_projection"] = up_projection(module, query)
    return attention(query, key, value, context, scale=scaling, **options).unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, _attend)


def _scaled_by_position(module: nn.Module, query: Tensor, *, positions: Tensor | None) -> Tensor:
    """`query`, `[1, heads, tokens, head_dim]`, scaled by `positions`, `[tokens]`, in place of rows if the module scales
    by these, as Llama 4's attention without rotation does. A row in the batch is the position in a batch of one
    sequence only. (Nakanishi, "Scalable-Softmax Is Superior for Attention", 2025, arXiv:2501.19399.)

    Raises:
        ValueError: It does, and there are no positions.
    """
    given: Any = module
    if not getattr(given, "attn_temperature_tuning", False) or given.use_rope:
        return query
    if positions is None:
        raise ValueError(f"{type(module).__name__} scales queries by position; pass Carried(context, positions)")
    rows = torch.arange(query.shape[-2], device=query.device)
    wanted, found = (_scales(given, each) for each in (positions.to(query.device), rows))
    return (query * (wanted / found).unsqueeze(-1)).to(query.dtype)


def _scales(module: Any, positions: Tensor) -> Tensor:
    scales: Tensor = torch.log1p(torch.floor((positions.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
    return scales


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


def pass_contexts(layers: nn.ModuleList, *, kinds: Sequence[LayerKind]) -> None:
    """Let the layers of a whole model, called by the library, pass their context in all arguments that reach attention.
    `kinds`: as of `follow_context`."""
    for layer, kind in zip(layers, kinds or [FULL] * len(layers), strict=True):
        layer.register_forward_pre_hook(functools.partial(_pass_context, kind), with_kwargs=True)


def _pass_context(kind: LayerKind, _layer: nn.Module, args: Any, keywords: dict[str, Any]) -> Any:
    carried: Carried | None = keywords.get(KEYWORD)
    if carried is None:
        return None
    own = Carried(_of_layer(carried.context, kind), carried.positions)
    return args, _passing(own, keywords, kind=kind)


def _of_layer(context: AttentionContext, kind: LayerKind) -> AttentionContext:
    return context.of_kind(kind) if attends(kind) else context


def _passing(carried: Carried, keywords: dict[str, Any], *, kind: LayerKind) -> dict[str, Any]:
    """Keywords of a layer's call with `carried`: also as the mask, unless a recurrence would multiply by it."""
    masks = {_MASK: carried} if _MASK in keywords and not kind.recurrence else {}
    return keywords | masks | {KEYWORD: carried}


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
    context = _of_layer(carried.context, kind)
    recomputed = index < context.recomputed_layers
    kept = KeptResults() if recomputed and context.keeps_attention else None

    def run(*args: Any, **keywords: Any) -> Any:
        own = replace(context, layer=number, recomputed=recomputed, kept=kept, calls=Counter())
        return original(*args, **_passing(Carried(own, carried.positions), keywords, kind=kind))

    if not recomputed:
        return run(*args, **keywords)
    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **keywords)
