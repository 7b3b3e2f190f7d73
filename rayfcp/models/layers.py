"""Kinds of decoder layers that a configuration describes: attention windows, and MLPs of experts."""

from collections.abc import Iterable, Mapping

from torch import Tensor
from transformers import PreTrainedConfig

from rayfcp.config import ConfigError
from rayfcp.values import FULL, LayerKind

_FULL, _SLIDING, _INDEXED = "full_attention", "sliding_attention", "indexed_attention"
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of the number of experts, by family."""


def check_layer_types(config: PreTrainedConfig) -> None:
    """
    Raises:
        ConfigError: A layer's attention is neither full nor over a window of known size.
    """
    types = getattr(config, "layer_types", None) or []
    if _INDEXED in types:
        raise ConfigError(
            f"model: {config.model_type} has an indexer, which takes the top k of all keys of a query, of which a rank "
            "has a part; choose another model, such as deepseek_v3"
        )
    unknown = sorted(set(types) - {_FULL, _SLIDING})
    if unknown:
        raise ConfigError(
            f"model: layers are of types {unknown}, only {_FULL} and {_SLIDING} run; choose another model"
        )
    window = getattr(config, "sliding_window", None)
    if (_SLIDING in types and not window) or (window or 0) < 0:
        raise ConfigError(
            f"model: sliding_window is {window}, must be at least 1 where layers slide; set it in the model's config"
        )


def kinds_of_layers(config: PreTrainedConfig) -> tuple[LayerKind, ...]:
    """Kind of each layer, by its type; empty where all have full attention.

    Configurations without types of layers mean all layers with `sliding_window`.
    """
    window = getattr(config, "sliding_window", None) or 0
    types = getattr(config, "layer_types", None) or [_SLIDING] * config.num_hidden_layers
    kinds = tuple(LayerKind(window=window) if each == _SLIDING else FULL for each in types[: config.num_hidden_layers])
    return kinds if set(kinds) != {FULL} else ()


def layers_of_each_type(config: PreTrainedConfig) -> int:
    """Number of the first layers that contain one of each type."""
    types = getattr(config, "layer_types", None) or [_FULL]
    return max(types.index(each) for each in set(types)) + 1


def num_experts(config: PreTrainedConfig) -> int:
    """Experts of a layer, 0 if the model has none."""
    return max(int(getattr(config, name, None) or 0) for name in _EXPERT_COUNTS)


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
    if num_experts(config) and not getattr(config, "num_experts_per_tok", None):
        raise ConfigError(f"model: {config.model_type} has no num_experts_per_tok, from which costs are computed")


def expert_matrices(config: PreTrainedConfig, layers: Iterable[Mapping[str, Tensor]]) -> int:
    """Elements of the matrices of one expert of `layers`, each the parameters of one by name.

    Raises:
        ConfigError: Layers differ, or experts are modules of their own and not slices of one parameter.
    """
    first, *others = ({name: tuple(each.shape) for name, each in layer.items()} for layer in layers)
    if any(other != first for other in others):
        raise ConfigError(
            f"model: {config.model_type} has layers with experts and layers without, only equal layers run; choose "
            "another model"
        )
    count = num_experts(config)
    stacked = [shape for shape in first.values() if len(shape) == 3 and shape[0] == count]
    if not stacked:
        raise ConfigError(
            f"model: {config.model_type} has no layers of {count} stacked experts, only such run; choose another, "
            "such as qwen3_moe"
        )
    return sum(rows * columns for _, rows, columns in stacked)
