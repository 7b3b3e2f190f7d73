"""Small copies of a model's configuration: the same kind of layers, fewer and narrower."""

import copy
from typing import Any

from transformers import PreTrainedConfig

from rayfcp.models.windows import layers_of_each_type

HEADS = 2
FFN_SIZE = 64
VOCAB_SIZE = 61
WINDOW = 7
"""Keys that a query sees where layers slide."""


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
    heads stay grouped."""
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
