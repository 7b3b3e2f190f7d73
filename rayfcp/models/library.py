"""The transformers library's models by their configuration: those that only read, and those that see as well.

Which layers of a model have a window, from its configuration.

Small copies of a model's configuration: the same kind of layers, fewer and narrower.

Layers whose MLP is many experts, of which each token takes a few: what a configuration says of them, what runs.
"""

import copy
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
)

from rayfcp.config import ConfigError
from rayfcp.config.models import SEEING_FAMILIES
from rayfcp.values import Windows


def text_of(config: PreTrainedConfig) -> Any:
    """What a configuration says of the language model: all of it where there is nothing else."""
    return config.get_text_config()


def vision_of(config: PreTrainedConfig) -> Any | None:
    """What it says of the vision encoder, if there is one that runs."""
    return config.vision_config if config.model_type in SEEING_FAMILIES else None


def make_library_model(
    config: PreTrainedConfig, *, attention: str | None = None, inside: str | None = None, **keywords: Any
) -> Any:
    """A model with a head for next tokens. `attention`: the implementation in the language model; `inside` pictures,
    that of a vision encoder; without them the library chooses."""
    if config.model_type not in SEEING_FAMILIES:
        chosen = {} if attention is None else {"attn_implementation": attention}
        return AutoModelForCausalLM.from_config(config, **chosen, **keywords)
    if attention is not None:
        keywords["attn_implementation"] = {"": attention, "text_config": attention, "vision_config": inside}
    return AutoModelForImageTextToText.from_config(config, **keywords)


def make_language_model(text: PreTrainedConfig) -> Any:
    """A model by what `text_of` gave; without a head where the family has one only beside an encoder."""
    known = type(text) in MODEL_FOR_CAUSAL_LM_MAPPING
    auto: Any = AutoModelForCausalLM if known else AutoModel
    return auto.from_config(text)


_WHOLE, _SLIDING = "full_attention", "sliding_attention"


def check_layer_types(config: PreTrainedConfig) -> None:
    """
    Raises:
        ConfigError: a layer's attention is neither whole nor over a window of a known size.
    """
    types = getattr(config, "layer_types", None) or []
    unknown = sorted(set(types) - {_WHOLE, _SLIDING})
    if unknown:
        raise ConfigError(
            f"model: layers are of types {unknown}, only {_WHOLE} and {_SLIDING} run; choose another model"
        )
    window = getattr(config, "sliding_window", None)
    if (_SLIDING in types and not window) or (window or 0) < 0:
        raise ConfigError(
            f"model: sliding_window is {window}, must be at least 1 where layers slide; set it in the model's config"
        )


def layer_windows(config: PreTrainedConfig) -> tuple[int, ...]:
    """Of each layer how many keys a query sees, itself included (0: all before it); none where no layer has a window.

    Configurations without types of layers mean all of them.
    """
    window = getattr(config, "sliding_window", None) or 0
    types = getattr(config, "layer_types", None) or [_SLIDING] * config.num_hidden_layers
    found = tuple(window if each == _SLIDING else 0 for each in types[: config.num_hidden_layers])
    return found if any(found) else ()


def windows_of(config: PreTrainedConfig) -> Windows:
    """Kinds of layers."""
    return tuple(sorted(Counter(layer_windows(config)).items()))


def layers_of_each_type(config: PreTrainedConfig) -> int:
    """How many of the first layers hold one of each type that there is."""
    types = getattr(config, "layer_types", None) or [_WHOLE]
    return max(types.index(each) for each in set(types)) + 1


HEADS = 2
FFN_SIZE = 64
VOCAB_SIZE = 61
WINDOW = 7
"""Keys that a query sees where layers slide."""
VISION_LAYERS = 2
TILE_SIDE = 4
"""Patches along a side of a tile."""


def with_layers(config: PreTrainedConfig, num_layers: int) -> PreTrainedConfig:
    """A copy with the first layers only, at most those that there are; what is listed per layer is cut as well."""
    copied = copy.deepcopy(config)
    before = config.num_hidden_layers
    num_layers = min(num_layers, before)
    for name, value in vars(config).items():
        if isinstance(value, list | tuple) and len(value) == before and name != "architectures":
            setattr(copied, name, value[:num_layers])
    copied.num_hidden_layers = num_layers
    return copied


def narrowed(config: PreTrainedConfig, num_layers: int) -> PreTrainedConfig:
    """A copy with few layers, heads and words, narrow MLPs and short windows; at least as many layers as hold one of
    each type. Heads keep their size, since tables of rotary factors and partial rotations are made for it; grouped
    heads stay grouped. A vision encoder gets as narrow."""
    if vision_of(config) is not None:
        return _narrowed_seeing(config, num_layers)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None)
    tiny = with_layers(config, max(num_layers, layers_of_each_type(config)))
    tiny.hidden_size = HEADS * head_dim
    tiny.num_attention_heads = HEADS
    if kv_heads is not None:
        tiny.num_key_value_heads = HEADS if kv_heads == config.num_attention_heads else HEADS // 2
    for name in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        if getattr(config, name, None) is not None:
            setattr(tiny, name, FFN_SIZE)
    tiny.vocab_size = VOCAB_SIZE
    if getattr(config, "sliding_window", None):
        tiny.sliding_window = min(tiny.sliding_window, WINDOW)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(tiny, name, None)
    return tiny


def _narrowed_seeing(config: PreTrainedConfig, num_layers: int) -> PreTrainedConfig:
    tiny: Any = copy.deepcopy(config)
    tiny.text_config = narrowed(text_of(config), num_layers)
    tiny.image_token_id = VOCAB_SIZE - 1
    vision = tiny.vision_config
    vision.hidden_size = HEADS * (vision.hidden_size // vision.num_attention_heads)
    vision.num_attention_heads, vision.intermediate_size = HEADS, FFN_SIZE
    vision.num_hidden_layers = min(vision.num_hidden_layers, VISION_LAYERS)
    if config.model_type == "qwen3_vl":
        tiny.video_token_id = VOCAB_SIZE - 2
        vision.out_hidden_size = tiny.text_config.hidden_size
        count = min(len(vision.deepstack_visual_indexes), num_layers, vision.depth)
        vision.deepstack_visual_indexes = list(range(count))
    else:
        vision.image_size = [TILE_SIDE * each for each in vision.patch_size]
    return cast(PreTrainedConfig, tiny)


_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Families name them differently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """`ffn_size`: the width of one, of `count`; each token takes `per_token`. Beside their 3 matrices a layer has
    `num_parameters` in all for experts and their router."""

    count: int
    per_token: int
    ffn_size: int
    num_parameters: int


def num_experts(config: PreTrainedConfig) -> int:
    """Of a layer; 0 if the model has none."""
    return max(int(getattr(config, name, None) or 0) for name in _COUNTS)


def check_experts(config: PreTrainedConfig) -> None:
    """
    Raises:
        ConfigError: a loss of the router is asked for, or the number of experts of a token is not said.
    """
    if num_experts(config) and getattr(config, "output_router_logits", False):
        raise ConfigError(
            f"model: {config.model_type} asks for an auxiliary loss of its router (output_router_logits=True), which "
            "is not computed; set output_router_logits to false in its config.json"
        )
    if num_experts(config) and not getattr(config, "num_experts_per_tok", None):
        raise ConfigError(f"model: {config.model_type} has no num_experts_per_tok, from which costs are computed")


def experts_of(config: PreTrainedConfig, layers: Iterable[Mapping[str, Tensor]]) -> Experts | None:
    """Of `layers`, each the parameters of one by name; none if there are no experts.

    Raises:
        ConfigError: layers differ, or experts are modules of their own and not parts of one parameter.
    """
    count = num_experts(config)
    if not count:
        return None
    first, *others = ({name: tuple(each.shape) for name, each in layer.items()} for layer in layers)
    if any(other != first for other in others):
        raise ConfigError(
            f"model: {config.model_type} has layers with experts and layers without, only equal layers run; choose "
            "another model"
        )
    stacked = {name: shape for name, shape in first.items() if len(shape) == 3 and shape[0] == count}
    if not stacked:
        raise ConfigError(
            f"model: {config.model_type} has no layers of {count} stacked experts, only such run; choose another, "
            "such as qwen3_moe"
        )
    each = sum(rows * columns for _, rows, columns in stacked.values())
    router = count * config.hidden_size
    return Experts(
        count=count,
        per_token=config.num_experts_per_tok,
        ffn_size=round(each / (3 * config.hidden_size)),
        num_parameters=count * each + router,
    )


def keywords_of(config: PreTrainedConfig, *, dtype: str) -> dict[str, Any]:
    """For the library's model: grouped products of matrices know no fp64."""
    return {"experts_implementation": "eager"} if dtype == "float64" and num_experts(config) else {}
