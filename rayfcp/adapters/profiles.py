"""Profiles of models from Hugging Face configurations, read without transformers or torch."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayfcp.config import ConfigError
from rayfcp.plan import model_profile
from rayfcp.values import FULL, LayerKind, ModelProfile

ModelSource = ModelProfile | Mapping[str, Any] | str | os.PathLike[str]
"""A profile; a Hugging Face configuration as a mapping, its file, or the folder that it is in; or the name or YAML file
of a profile."""

NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
"""Keys of a configuration without which nothing is known of a model's work."""


def profile_of(model: ModelSource) -> ModelProfile:
    """Return the profile of a model; of a VLM, that of its language model.

    All layers count as gated MLPs with the attention that the configuration names. Layers without experts among layers
    with experts count as layers with experts: refits correct what that misses.

    Raises:
        ConfigError: An unknown name, a file without a configuration, a key that is missing, or layers that are neither
            full nor sliding-window attention.
    """
    if isinstance(model, ModelProfile):
        return model
    if isinstance(model, Mapping):
        return _from_config(model, name=str(model.get("model_type", "model")))
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if path.suffix != ".json":
        return model_profile(os.fspath(model))
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model is {str(model)!r}, no config.json can be read there ({error}); correct it") from error
    if not isinstance(config, dict):
        raise ConfigError(f"model is {str(model)!r}, must hold a mapping of keys; give a Hugging Face config.json")
    return _from_config(config, name=path.parent.name or "model")


_OTHER_MIXERS = ("kv_lora_rank", "linear_num_value_heads", "linear_num_heads", "mamba_n_heads", "mamba_num_heads")
"""Keys of layers that are no plain attention."""


def _from_config(config: Mapping[str, Any], *, name: str) -> ModelProfile:
    keys: Mapping[str, Any] = {**config, **config["text_config"]} if config.get("text_config") else config
    missing = [key for key in NEEDED if not keys.get(key)]
    if missing:
        raise ConfigError(
            f"model {name!r} has no {missing[0]}, must have all of {', '.join(NEEDED)}; give a profile as a YAML file"
        )
    other = next((key for key in _OTHER_MIXERS if keys.get(key)), None)
    if other is not None:
        raise ConfigError(
            f"model {name!r} has {other}, layers with latents or a recurrence; give a profile of them as a YAML file"
        )
    heads = keys["num_attention_heads"]
    return ModelProfile(
        name=name,
        num_layers=keys["num_hidden_layers"],
        hidden_size=keys["hidden_size"],
        num_heads=heads,
        num_kv_heads=keys.get("num_key_value_heads") or heads,
        head_dim=keys.get("head_dim") or keys["hidden_size"] // heads,
        vocab_size=keys["vocab_size"],
        tied_embeddings=bool(keys.get("tie_word_embeddings")),
        kind_of_layer=_kinds(keys, name=name),
        **_widths(keys),
    )


def _widths(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a profile on MLPs: with experts `ffn_size` is the width of one."""
    counts = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = max(int(keys.get(key) or 0) for key in counts)
    if not experts:
        return {"ffn_size": keys["intermediate_size"]}
    each = keys.get("moe_intermediate_size") or keys["intermediate_size"]
    return {
        "ffn_size": each,
        "num_experts": experts,
        "experts_per_token": keys.get("num_experts_per_tok") or 1,
        "shared_ffn_size": keys.get("shared_expert_intermediate_size") or (keys.get("n_shared_experts") or 0) * each,
    }


def _kinds(keys: Mapping[str, Any], *, name: str) -> tuple[LayerKind, ...]:
    """Kind of each layer; empty where all have full attention. Without `layer_types`, all layers have the window, or
    all but those that `sliding_window_pattern` or `max_window_layers` names."""
    count, window = keys["num_hidden_layers"], keys.get("sliding_window")
    if not window or not keys.get("use_sliding_window", True):
        window = 0
    types = keys.get("layer_types")
    if types is None:
        pattern, first = keys.get("sliding_window_pattern") or count + 1, keys.get("max_window_layers") or 0
        first = first if "use_sliding_window" in keys else 0
        types = [
            "sliding_attention" if layer >= first and (layer + 1) % pattern else "full_attention"
            for layer in range(count)
        ]
    unknown = sorted(set(types) - {"sliding_attention", "full_attention"})
    if unknown:
        raise ConfigError(
            f"model {name!r} has layers of type {unknown[0]}, must be full_attention or sliding_attention; give a "
            "profile of the attention layers as a YAML file"
        )
    kinds = tuple(LayerKind(window=window) if each == "sliding_attention" and window else FULL for each in types)
    return kinds if set(kinds) != {FULL} else ()
