"""Kinds of decoder layers that a configuration describes: attention windows, recurrence, and MLPs of experts."""

from typing import Any

from transformers import PreTrainedConfig

from rayfcp.config import ConfigError
from rayfcp.models.recurrent import mixing_of
from rayfcp.values import FULL, LayerKind

_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_INDEXED = "indexed_attention"
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_OF_TOKENS = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
"""Keys of the number of experts, and of those that a token passes, by family."""

_SELECTIVE = "its recurrence, Mamba's selective scan, decays each number of a state on its own, for which there is no "
_BIASED = (
    "its attention adds a bias by relative position to its scores, for which there is no kernel over several ranks"
)
_TWICE = "its layers attend twice, which costs and kept keys and values do not know"
_REFUSED = {
    "gemma3n_text": "its layers have several streams of activations, of which memory is counted as of one",
    **dict.fromkeys(("jamba", "zamba", "mamba", "falcon_mamba"), f"{_SELECTIVE}kernel over several ranks"),
    **dict.fromkeys(("inkling_text", "inkling2_text"), _BIASED),
    **dict.fromkeys(("diffllama", "longcat_flash"), _TWICE),
    "recurrent_gemma": "its recurrence (RG-LRU) has no kernel over several ranks",
    "rwkv": "its recurrence (WKV) has no kernel over several ranks",
    "xlstm": "its recurrence (mLSTM) has no kernel over several ranks",
    "zamba2": "its layers share the weights of their attention",
    "zaya": "its convolutions of queries and keys are code of its own, and its routers take states of earlier layers",
}
"""Families that cannot run, with the reason."""


def check_layer_types(config: PreTrainedConfig) -> None:
    """
    Raises:
        ConfigError: A layer's attention is neither full nor over a window or chunks of known size, or the family cannot
            run.
    """
    if config.model_type in _REFUSED:
        raise ConfigError(f"model: {config.model_type} does not run, {_REFUSED[config.model_type]}; choose another")
    types = getattr(config, "layer_types", None) or []
    if _INDEXED in types:
        raise ConfigError(
            f"model: {config.model_type} has an indexer, which takes the top k of all keys of a query, of which a rank "
            "has a part; choose another model, such as deepseek_v3"
        )
    known = (_FULL, _SLIDING, _CHUNKED)
    unknown = sorted({each for each in types if each not in known and not mixing_of(config, each)})
    if unknown:
        raise ConfigError(f"model: layers are of types {unknown}, only {', '.join(known)} run; choose another model")
    for name, layer_type in (("sliding_window", _SLIDING), ("attention_chunk_size", _CHUNKED)):
        size = getattr(config, name, None)
        if (layer_type in types and not size) or (size or 0) < 0:
            raise ConfigError(
                f"model: {name} is {size}, must be at least 1 where layers have {layer_type}; set it in the model's "
                "config"
            )


def kinds_of_layers(config: PreTrainedConfig) -> tuple[LayerKind, ...]:
    """Kind of each layer, by its type; empty where all have full attention.

    Configurations without types of layers mean all layers with `sliding_window`.
    """
    window = getattr(config, "sliding_window", None) or 0
    types = getattr(config, "layer_types", None) or [_SLIDING] * config.num_hidden_layers
    chunk = getattr(config, "attention_chunk_size", None) or 0
    attends = {_FULL: FULL, _SLIDING: LayerKind(window=window), _CHUNKED: LayerKind(chunk=chunk)}
    kinds = tuple(mixing_of(config, each) or attends.get(each, FULL) for each in types[: config.num_hidden_layers])
    return kinds if set(kinds) != {FULL} else ()


def first_sharing_layer(config: PreTrainedConfig) -> int:
    """Number of the first layer that attends to keys and values of an earlier one, of its type, as all later ones do;
    that of all layers if there is none."""
    return int(config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0))


def shared_by_layers(config: PreTrainedConfig) -> str:
    """What layers get beside activations, which pipeline stages do not send; empty for most families."""
    if first_sharing_layer(config) < config.num_hidden_layers:
        return f"keys and values (num_kv_shared_layers={config.num_kv_shared_layers})"
    if width := getattr(config, "hidden_size_per_layer_input", None):
        return f"embeddings of the tokens (hidden_size_per_layer_input={width})"
    return ""


def has_layer_keys(config: PreTrainedConfig) -> bool:
    """True if the library has keys, such as sizes of heads, that differ between layers."""
    return bool(getattr(config, "is_heterogeneous", False))


def layer_configs(config: PreTrainedConfig) -> list[Any]:
    """The configuration of each layer: the model's, but where it `has_layer_keys`."""
    return list(config.per_layer_config) if has_layer_keys(config) else [config] * config.num_hidden_layers


def num_experts(config: PreTrainedConfig) -> int:
    """Experts of a layer, 0 if the model has none."""
    return max(int(getattr(config, name, None) or 0) for name in EXPERT_COUNTS)


def check_experts(config: PreTrainedConfig) -> None:
    """
    Raises:
        ConfigError: A loss of the router is requested, or the number of experts per token is absent.
    """
    if num_experts(config) and getattr(config, "output_router_logits", False):
        raise ConfigError(
            f"model: {config.model_type} asks for an auxiliary loss of its router (output_router_logits=True), which "
            "is not computed; set output_router_logits to false in its config.json"
        )
    experts_per_token(config)


def experts_per_token(config: PreTrainedConfig) -> int:
    """Experts that a token passes, 1 if the model has none.

    Raises:
        ConfigError: Their number is absent.
    """
    if not num_experts(config):
        return 1
    found = max(int(getattr(config, name, None) or 0) for name in _EXPERTS_OF_TOKENS)
    if not found:
        raise ConfigError(f"model: {config.model_type} has no num_experts_per_tok, from which costs are computed")
    return found
