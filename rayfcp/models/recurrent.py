"""Families of the transformers library with recurrent layers: the kinds of their layers, and sizes of small copies."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from rayfcp.values import HybridKind, LayerKind, RecurrentKind, TokenwiseKind

STATE_SIZE = 16
"""Channels of a head's state in narrowed models."""

_RECURRENT = ("linear_attention", "conv")
"""The library's types of layers with a state or a causal convolution, and no attention."""

_HYBRID = "hybrid"
"""Its type of layers with both."""

_TOKENWISE = ("mlp", "moe")
"""Its types of layers that mix no tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentFamily:
    """A family with recurrent layers.

    `width`: key of its configuration for the width of causal convolutions; without one it has none. `num_outputs`:
    length of the tuple that a layer returns; 0 for activations alone. `fp32_residual`: key of its configuration by
    which activations between layers are in fp32 in a model of any dtype. `narrow`: keys of a narrowed configuration,
    which has its hidden size, and their values.
    """

    width: str | None
    num_outputs: int = 0
    fp32_residual: str = ""
    narrow: Callable[[Any], dict[str, int]] = lambda _config: {}


def _delta(_config: Any) -> dict[str, int]:
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    return {**heads, "linear_key_head_dim": STATE_SIZE, "linear_value_head_dim": STATE_SIZE}


def _equal_delta(_config: Any) -> dict[str, int]:
    return _delta(_config) | {"linear_num_key_heads": 4}


def _kimi(_config: Any) -> dict[str, int]:
    return {"linear_num_heads": 2, "linear_head_dim": STATE_SIZE}


def _mamba(config: Any) -> dict[str, int]:
    inner, heads = config.mamba_expand * config.hidden_size, 2 * config.mamba_n_groups
    sizes = {"mamba_n_heads": heads, "mamba_d_head": inner // heads, "mamba_d_state": STATE_SIZE}
    return sizes | ({"mamba_d_ssm": inner} if getattr(config, "mamba_d_ssm", None) else {})


def _nemotron(config: Any) -> dict[str, int]:
    return {"mamba_num_heads": 2 * config.n_groups, "mamba_head_dim": STATE_SIZE, "ssm_state_size": STATE_SIZE}


def _mamba2(config: Any) -> dict[str, int]:
    return {"num_heads": config.expand * config.hidden_size // config.head_dim, "state_size": STATE_SIZE, "n_groups": 2}


FAMILIES: dict[str, RecurrentFamily] = {
    "qwen3_next": RecurrentFamily(width="linear_conv_kernel_dim", narrow=_delta),
    "qwen3_5_text": RecurrentFamily(width="linear_conv_kernel_dim", narrow=_delta),
    "qwen3_5_moe_text": RecurrentFamily(width="linear_conv_kernel_dim", narrow=_delta),
    "olmo_hybrid": RecurrentFamily(width="linear_conv_kernel_dim", narrow=_equal_delta),
    "kimi_linear": RecurrentFamily(width="linear_conv_kernel_dim", narrow=_kimi),
    "bailing_hybrid": RecurrentFamily(width="short_conv_kernel_size", narrow=_kimi),
    "nemotron_h": RecurrentFamily(width="conv_kernel", narrow=_nemotron),
    "bamba": RecurrentFamily(width="mamba_d_conv", num_outputs=2, narrow=_mamba),
    "granitemoehybrid": RecurrentFamily(width="mamba_d_conv", narrow=_mamba),
    "falcon_h1": RecurrentFamily(width="mamba_d_conv", num_outputs=1, narrow=_mamba),
    "mamba2": RecurrentFamily(width="conv_kernel", fp32_residual="residual_in_fp32", narrow=_mamba2),
    "minimax": RecurrentFamily(width=None),
    "lfm2": RecurrentFamily(width="conv_L_cache"),
    "lfm2_moe": RecurrentFamily(width="conv_L_cache"),
    "lfm3": RecurrentFamily(width="conv_L_cache"),
}
"""By `model_type`."""


def recurrence_of(config: PreTrainedConfig) -> RecurrentKind | None:
    """The kind of a family's recurrent layers; None for a family without."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        return None
    return RecurrentKind(halo=getattr(config, family.width) - 1 if family.width else 0)


def mixing_of(config: PreTrainedConfig, layer_type: str) -> LayerKind | None:
    """The kind of a family's layers of the library's type `layer_type`; None if it is not one of this module."""
    found = recurrence_of(config)
    if found is None or layer_type not in (*_RECURRENT, *_TOKENWISE, _HYBRID):
        return None
    if layer_type == _HYBRID:
        return HybridKind(halo=found.halo)
    return found if layer_type in _RECURRENT else TokenwiseKind()


def has_fp32_residual(config: PreTrainedConfig) -> bool:
    """True if activations between layers are in fp32 in a model of any dtype."""
    family = FAMILIES.get(config.model_type)
    return family is not None and bool(getattr(config, family.fp32_residual, False))
