"""Shapes of a model's layers: what the modules of the library's decoder and its configuration say of them."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from rayfcp.config import ConfigError
from rayfcp.models.layers import (
    experts_per_token,
    first_sharing_layer,
    has_layer_keys,
    kinds_of_layers,
    layer_configs,
    num_experts,
)
from rayfcp.models.library import decoder_layers, decoder_of, make_language_model, with_layers
from rayfcp.values import (
    FULL,
    AttentionProfile,
    LayerKind,
    LayerProfile,
    MixerProfile,
    RecurrenceProfile,
    RecurrentKind,
    attends,
)

_ATTENTION = re.compile(r"(^|\.)(self_attn|self_attention|attn|attention)\.")
_RECURRENCE = re.compile(r"(^|\.)(linear_attn|mamba|conv)\.")
_MIXER = re.compile(r"(^|\.)mixer\.")
"""Names of parameters of what mixes tokens; in families with a `mixer` it may also be an MLP."""

_NORM = re.compile(r"norm\w*\.weight$")
_MIXES = re.compile("|".join(each.pattern for each in (_ATTENTION, _RECURRENCE, _MIXER)))
"""Names of parameters of norms, and of all that is inside of what mixes tokens."""

_EXPERTS = re.compile(r"expert|router|(^|\.)gate\.")
"""Names of parameters of experts and routers."""

_OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj", "wo")
"""Names of the matrix behind attention."""

_HEAD_NORMS = re.compile(r"\b(q|k|query|key)_(layer)?norm\b")

_RECURRENCES: tuple[tuple[tuple[str, str, str], int], ...] = (
    (("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"), 2),
    (("linear_num_heads", "linear_head_dim", "linear_head_dim"), 2),
    (("mamba_num_heads", "ssm_state_size", "mamba_head_dim"), 0),
    (("mamba_n_heads", "mamba_d_state", "mamba_d_head"), 0),
    (("num_heads", "state_size", "head_dim"), 0),
)
"""Keys of a recurrence's heads, of the rows of their states, and of the columns, and of which power of the rows a
head's transition is: 2 of delta rules, 0 of Mamba-2."""


def decoder_modules(config: PreTrainedConfig, *, num_layers: int) -> list[nn.Module]:
    """The first layers of the library's model, on the meta device.

    Raises:
        ConfigError: The library cannot create a layer.
    """
    try:
        with torch.device("meta"):
            layers = decoder_layers(decoder_of(make_language_model(with_layers(config, num_layers))))
        if len(layers) != num_layers:
            raise ValueError(f"num_hidden_layers={num_layers} makes {len(layers)}")
        return list(layers)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise _not_made(config, error, what="layers cannot be made") from error


def layer_profiles(config: PreTrainedConfig) -> tuple[LayerProfile, ...]:
    """The shape of each layer of a language model.

    The MLP counts as a gated one, of 3 matrices `[ffn_size, hidden_size]`, with as many parameters as the family's: two
    thirds of the width of one of 2. With experts `ffn_size` is the width of one, and `shared_ffn_size` counts what all
    tokens pass in the same way.

    Raises:
        ConfigError: The library cannot create its layers, or its configuration does not say what mixes their tokens.
    """
    try:
        return _layer_profiles(config)
    except ConfigError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise _not_made(config, error, what="the shapes of its layers cannot be read") from error


def _not_made(config: PreTrainedConfig, error: Exception, *, what: str) -> ConfigError:
    first = (str(error).splitlines() or [""])[0]
    return ConfigError(f"model: {config.model_type} {what} ({type(error).__name__}: {first}); choose another model")


def _layer_profiles(config: PreTrainedConfig) -> tuple[LayerProfile, ...]:
    kinds = _kinds(config)
    modules = decoder_modules(config, num_layers=1 if _are_equal(config, kinds) else len(kinds))
    if len(modules) == 1:
        modules *= len(kinds)
    configs = layer_configs(config)
    found = [_Layer(own, module, kind=kind) for own, module, kind in zip(configs, modules, kinds, strict=True)]
    known: dict[Any, LayerProfile] = {}
    for each in found:
        if each.key not in known:
            known[each.key] = each.profile()
    # The library fills in a number of experts for models none of whose layers has any.
    count = num_experts(config) if any(each.routes for each in found) else 0
    if count > 1 and not any(each.has_experts for each in known.values()):
        raise ConfigError(
            f"model: {config.model_type} has no layers of {count} stacked experts, only such run; choose another, such "
            "as qwen3_moe"
        )
    return tuple(known[each.key] for each in found)


def _kinds(config: Any) -> tuple[LayerKind, ...]:
    return kinds_of_layers(config) or (FULL,) * int(config.num_hidden_layers)


def _are_equal(config: Any, kinds: Sequence[LayerKind]) -> bool:
    """Whether one layer stands for all."""
    differs = has_layer_keys(config) or first_sharing_layer(config) < len(kinds)
    return len(set(kinds)) == 1 and not num_experts(config) and not differs


class _Layer:
    """A layer of the library and its parameters in matrices."""

    def __init__(self, config: Any, module: nn.Module, *, kind: LayerKind) -> None:
        self._config, self._module, self._kind = config, module, kind
        parameters = dict(module.named_parameters())
        self._names = tuple(parameters)
        self._shapes = {name: tuple(each.shape) for name, each in parameters.items() if each.ndim > 1}
        self._lends_keys = any(getattr(each, "store_full_length_kv", False) for each in module.modules())
        self.key = kind, self._lends_keys, tuple(self._shapes.items())

    @property
    def routes(self) -> bool:
        """True if the parameters are of experts or of their router, stacked or not."""
        return any(_EXPERTS.search(name) for name in self._names)

    def profile(self) -> LayerProfile:
        """
        Raises:
            ConfigError: See `layer_profiles`.
        """
        hidden, own, count = self._config.hidden_size, dict(self._shapes), num_experts(self._config)
        mixers, left = self._mixers(own)
        stacked = [shape for shape in own.values() if len(shape) == 3 and shape[0] == count and count > 1]
        each = sum(map(math.prod, stacked)) // count if stacked else 0
        around = left + sum(map(math.prod, own.values()))
        inputs = getattr(self._config, "hidden_size_per_layer_input", None) or 0
        around += inputs * hidden  # the layer's rows of a matrix beside the layers
        others: dict[str, Any] = {"mixers": mixers, "hidden_size": hidden, "input_size": inputs}
        others["extra_norms"] = self._extra_norms(has_mlp=around > 0)
        if not stacked:
            return LayerProfile(ffn_size=max(round(around / (3 * hidden)), 0), **others)
        around -= count * (each + hidden)  # the router has a row for each expert
        return LayerProfile(
            ffn_size=round(each / (3 * hidden)),
            num_experts=count,
            experts_per_token=min(experts_per_token(self._config), count),
            shared_ffn_size=max(round(around / (3 * hidden)), 0),
            **others,
        )

    def _extra_norms(self, *, has_mlp: bool) -> int:
        """Norms of activations between layers, but for those that every layer has."""
        found = [name for name in self._names if _NORM.search(name) and not _MIXES.search(name)]
        return max(len(found) - ((attends(self._kind) or bool(self._kind.recurrence)) + has_mlp or 1), 0)

    def _mixers(self, own: dict[str, tuple[int, ...]]) -> tuple[tuple[MixerProfile, ...], int]:
        """What mixes tokens, whose parameters are taken out of `own`, and how many more it has than attention should
        have."""
        if not attends(self._kind) and not self._kind.recurrence:
            return (), 0
        recurrent = {name: own.pop(name) for name in list(own) if self._kind.recurrence and _RECURRENCE.search(name)}
        mixer = {name: own.pop(name) for name in list(own) if _MIXER.search(name) or _ATTENTION.search(name)}
        if not attends(self._kind):
            recurrent, mixer = recurrent | mixer, {}
        found: list[MixerProfile] = []
        if self._kind.recurrence:
            found = [self._recurrence(recurrent, kind=self._kind.recurrence)]
        if not attends(self._kind):
            return tuple(found), 0
        attention = self._attention(mixer)
        return (attention, *found), sum(map(math.prod, mixer.values())) - attention.parameters

    def _attention(self, mine: Mapping[str, tuple[int, ...]]) -> AttentionProfile:
        config, (heads, kv_heads, head_dim, value_dim) = self._config, self._heads(mine)
        latent = getattr(config, "kv_lora_rank", None) or 0
        found = AttentionProfile(
            kind=self._kind.mask,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            latent_size=latent,
            query_latent_size=(getattr(config, "q_lora_rank", None) or 0) if latent else 0,
            rope_size=config.qk_rope_head_dim if latent else 0,
            head_norms=any(_HEAD_NORMS.search(name) for name in self._names),
            gated=any(rows == 2 * heads * head_dim for rows in _rows(mine, ("q_proj",))),
            lends_keys=self._lends_keys,
        )
        count = sum(map(math.prod, mine.values()))
        each = [replace(found, key_matrices=few).with_parameters(config.hidden_size) for few in (2, 1, 0)]
        return next((one for one in each if one.parameters == count), each[0])

    def _heads(self, mine: Mapping[str, tuple[int, ...]]) -> tuple[int, int, int, int]:
        """Heads, heads of keys and values, and the sizes of both, of queries and of values."""
        config = self._config
        heads = getattr(config, "num_attention_heads", None)
        if not heads:
            raise ConfigError(
                f"model: {config.model_type} has no num_attention_heads, from which costs are computed; choose another"
            )
        if getattr(config, "kv_lora_rank", None):
            return heads, 1, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        own = (getattr(each, "head_dim", None) for each in self._module.modules() if hasattr(each, "q_proj"))
        head_dim = next((each for each in own if isinstance(each, int)), 0)
        head_dim = head_dim or getattr(config, "head_dim", None) or config.hidden_size // heads
        value_dim = getattr(config, "v_head_dim", None) or head_dim
        keys = _rows(mine, ("k_proj",))
        outputs = [shape[-1] for name, shape in mine.items() if name.removesuffix(".weight").endswith(_OUTPUTS)]
        if keys and outputs:
            kv_heads, heads = keys[0] // head_dim, outputs[0] // value_dim
        return heads, kv_heads, head_dim, value_dim

    def _recurrence(self, mine: Mapping[str, tuple[int, ...]], *, kind: RecurrentKind) -> RecurrenceProfile:
        config = self._config
        conv = next((shape[0] for shape in mine.values() if len(shape) == 3 and shape[1] == 1), 0)
        sizes: dict[str, Any] = {"kind": kind, "parameters": sum(map(math.prod, mine.values())), "conv_channels": conv}
        for keys, power in _RECURRENCES:
            heads, rows, columns = (int(getattr(config, key, None) or 0) for key in keys)
            if heads and rows and columns:
                return RecurrenceProfile(
                    num_heads=heads, key_dim=rows, value_dim=columns, transition_size=rows**power, **sizes
                )
        if conv:  # a short convolution alone
            return RecurrenceProfile(num_heads=1, key_dim=0, value_dim=conv, transition_size=0, **sizes)
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        return RecurrenceProfile(num_heads=heads, key_dim=size, value_dim=size, transition_size=0, **sizes)


def _rows(shapes: Mapping[str, tuple[int, ...]], names: tuple[str, ...]) -> list[int]:
    """Rows of the matrices of these names."""
    return [shape[0] for name, shape in shapes.items() if name.removesuffix(".weight").endswith(names)]
