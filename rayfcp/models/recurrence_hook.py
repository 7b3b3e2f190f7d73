"""Our recurrence and causal convolution in place of the functions that the transformers library's families call.

These functions are global names of a family's module, and the attention program reaches them as it reaches attention,
as a keyword of the call. Without it they do what they did.
"""

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rayfcp.execute.attention.function import AttentionContext
from rayfcp.execute.recurrence.convolution import causal_convolution
from rayfcp.execute.recurrence.function import linear_recurrence
from rayfcp.models.attention_hook import KEYWORD, Carried
from rayfcp.models.library import text_of
from rayfcp.models.recurrent import recurrence_of
from rayfcp.values import RecurrentKind

_NORM_EPSILON = 1e-6
"""As in the library's functions, and in flash-linear-attention's."""


def hook_recurrence(library: Any, *, compiled: bool = False) -> None:
    """Let the family of a library's model call our recurrence; nothing for families without recurrent layers.
    `compiled`: its layers are, but not these calls."""
    if recurrence_of(text_of(library.config)) is None:
        return
    module = sys.modules[type(library).__module__]
    for name, own in _OURS.items():
        holder, _, attribute = name.rpartition(".")
        found = getattr(module, holder, None) if holder else module
        original = getattr(found, attribute, None)
        if original is not None:
            original = getattr(original, "replaced", original)
            call = _instead_of(original, torch.compiler.disable(own) if compiled else own)
            setattr(found, attribute, call)


def _instead_of(original: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `own` if it is given an attention program, and `original` otherwise."""

    @functools.wraps(original)
    def call(*args: Any, **keywords: Any) -> Any:
        carried: Carried | None = keywords.get(KEYWORD)
        if carried is None:
            return original(*args, **keywords)
        return own(carried.context, *args, **keywords)

    vars(call)["replaced"] = original
    return call


def _kind(context: AttentionContext) -> RecurrentKind:
    """The kind of the calling layer: no family has recurrent layers of several kinds. Notes that the layer calls."""
    context.stats.recurrent_layers.add(context.layer)
    if len(context.scans) != 1:
        raise ValueError(
            f"recurrence: the program is of {len(context.scans)} kinds of recurrent layers, must be of 1; give "
            "sequences the model's layer_kinds and lower again"
        )
    return next(iter(context.scans))


def _wide(tensor: Tensor) -> Tensor:
    """In fp32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _normed(heads: Tensor) -> Tensor:
    wide = _wide(heads)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + _NORM_EPSILON)).to(heads.dtype)


def _delta_rule(
    context: AttentionContext,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_keywords: Any,
) -> tuple[Tensor, None]:
    """The gated delta rule, with gates `[1, tokens, heads]`, or those of KDA with a further dimension of keys."""
    if use_qk_l2norm_in_kernel:
        query, key = _normed(query), _normed(key)
    scale = query.shape[-1] ** -0.5
    parts = (each.squeeze(0) for each in (query, key, value, g, beta))
    return linear_recurrence(*parts, context=context, kind=_kind(context), scale=scale).unsqueeze(0), None


def _state_space(
    context: AttentionContext,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803  the library's names
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    *,
    D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    **_keywords: Any,
) -> Tensor:
    """Mamba-2 as gated linear attention: C asks, B is the key, a step of x the value, and the step decays by A."""
    steps = _wide(dt)
    steps = steps if dt_bias is None else steps + dt_bias
    steps = (F.softplus(steps) if dt_softplus else steps).clamp(*dt_limit)
    values = (hidden_states * steps.unsqueeze(-1)).to(hidden_states.dtype)
    parts = (each.squeeze(0) for each in (C, B, values, A * steps))
    out = linear_recurrence(*parts, context=context, kind=_kind(context)).unsqueeze(0)
    if D is not None:
        out = torch.addcmul(out, hidden_states, D.to(out.dtype).unsqueeze(-1))
    return out


def _unfused(_context: AttentionContext, *_args: Any, **_keywords: Any) -> None:
    """The library computes convolution and recurrence one by one."""


def _convolved(
    context: AttentionContext,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    **_keywords: Any,
) -> Tensor:
    """`hidden_states`: `[1, channels, tokens]`."""
    rows = hidden_states.squeeze(0).transpose(0, 1)
    out = causal_convolution(rows, weight, bias, context=context, kind=_kind(context), activation=activation)
    return out.transpose(0, 1).unsqueeze(0)


def _lightning(context: AttentionContext, mixer: Any, hidden_states: Tensor, **_keywords: Any) -> tuple[Tensor, None]:
    """MiniMax's lightning attention, which is a method and no function: a constant decay by head."""
    mixed = mixer.act_fn(mixer.qkv_proj(hidden_states.squeeze(0))).unflatten(-1, (mixer.num_attention_heads, -1))
    decay = -mixer.slope_rate.flatten().expand(len(mixed), -1)
    query, key, value = mixed.split(mixer.head_dim, dim=-1)
    out = linear_recurrence(query, key, value, decay, context=context, kind=_kind(context))
    gate = F.sigmoid(mixer.output_gate(hidden_states))
    return mixer.out_proj(gate * mixer.norm(out.flatten(1).unsqueeze(0))), None


_OURS: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _state_space,
    "mamba2_split_conv1d_scan_combined": _unfused,
    "causal_conv1d_fn": _convolved,
    "MiniMaxLightningAttention.forward": _lightning,
}
"""By name in a family's module."""
