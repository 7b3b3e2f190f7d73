"""Which layers of a model have a window, from its configuration."""

from collections import Counter

from transformers import PreTrainedConfig

from rayfcp.config import ConfigError
from rayfcp.values import Windows

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
