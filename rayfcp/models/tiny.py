"""Small copies of a model's configuration: the same kind of layers, fewer and narrower."""

import copy
from typing import Any, cast

from transformers import PreTrainedConfig

from rayfcp.models.library import text_of, vision_of
from rayfcp.models.windows import layers_of_each_type

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
    copied: Any = copy.deepcopy(config)
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
    tiny: Any = with_layers(config, max(num_layers, layers_of_each_type(config)))
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
