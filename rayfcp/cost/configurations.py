"""Profiles of models from Hugging Face configurations, read without transformers or torch."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rayfcp.config import ConfigError
from rayfcp.values import FULL, LayerKind, ModelProfile

NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
"""Keys of a configuration without which nothing is known of a model's work."""


def read_configuration(path: Path) -> ModelProfile:
    """Return the profile of the model of a `config.json`, or of the folder that it is in.

    Raises:
        ConfigError: A file without a configuration, or as `profile_of_configuration`.
    """
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model is {str(path)!r}, no config.json can be read there ({error}); correct it") from error
    if not isinstance(config, dict):
        raise ConfigError(f"model is {str(path)!r}, must hold a mapping of keys; give a Hugging Face config.json")
    return profile_of_configuration(config, name=path.parent.name or "model")


GATED = (
    *("bitnet", "cohere", "cohere2", "cohere2_moe", "cwm", "ernie4_5", "exaone4", "flex_olmo", "gemma", "gemma2"),
    *("gemma3_text", "glm", "glm4", "glm4v_text", "gpt_oss", "granite", "granite_swa", "granitemoe"),
    *("granitemoe_swa", "granitemoeshared", "helium", "hyperclovax", "internlm3", "iquestcoder", "llama"),
    *("mellum", "minimax_m2", "ministral3", "mistral", "mixtral", "modernbert-decoder", "olmo", "olmo2", "olmo3"),
    *("olmoe", "phi3", "phimoe", "qwen2", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl_text", "qwen3", "qwen3_moe"),
    *("qwen3_vl_moe_text", "qwen3_vl_text", "seed_oss", "smollm3", "stablelm", "vaultgemma"),
)
"""Families (`model_type`) whose layers are attention and a gated MLP or gated experts, as the keys say: they have as
many parameters as the library's, within 0.5 %. Others have keys that look alike and mean something else."""

UNGATED = ("apertus", "arcee", "gpt_neox", "jais2", "nanochat", "persimmon", "phi", "starcoder2")
"""Families whose MLPs have two matrices; likewise."""

SOME_DENSE = {"decoder_sparse_step": 1, "first_k_dense_replace": 0}
"""Keys above these values, of layers without experts among layers with them."""


def _check_family(keys: Mapping[str, Any], *, name: str) -> None:
    """
    Raises:
        ConfigError: The keys do not describe all layers.
    """
    family = keys.get("model_type")
    if family is not None and family not in GATED + UNGATED:
        what = f"is of family {family}, whose layers are not read from its keys"
    else:
        dense = [key for key, most in SOME_DENSE.items() if (keys.get(key) or 0) > most]
        dense += ["mlp_only_layers"] if keys.get("mlp_only_layers") else []
        other = dense or [key for key in keys if keys[key] and _OTHER_LAYERS.fullmatch(key)]
        if not other:
            return
        what = f"has {other[0]}, layers unlike the others or unlike attention with gated MLPs"
    raise ConfigError(
        f"model {name!r} {what}; give a profile of its layers as a YAML file, or to compare, the configuration of a run"
    )


_OTHER_LAYERS = re.compile(
    r"kv_lora_rank|linear_(attn|num|key|value)_.*|(n_)?mamba_.*|n_mamba_heads|lru_width|conv_L_cache|ssm_.*|rwkv.*"
    r"|moe_(k|num_experts|num_shared_experts|topk)|(attn|expert)_layer_period|shared_intermediate_size"
    r"|intermediate_size_mlp|ffn_config|num_mem_blocks|block_types|layers_block_type"
)
"""Keys of other mixers, experts and widths, where the family is not named."""


def profile_of_configuration(config: Mapping[str, Any], *, name: str) -> ModelProfile:
    """Return the profile of the model of a configuration; of a VLM, that of its language model.

    Raises:
        ConfigError: A key that is missing, a family whose layers the keys do not describe, or layers that are neither
            full nor sliding-window attention.
    """
    keys: Mapping[str, Any] = {**config, **config["text_config"]} if config.get("text_config") else config
    missing = [key for key in NEEDED if not keys.get(key)]
    if missing:
        raise ConfigError(
            f"model {name!r} has no {missing[0]}, must have all of {', '.join(NEEDED)}; give a profile as a YAML file"
        )
    uneven = [key for key in NEEDED if not isinstance(keys[key], int)]
    if uneven:
        raise ConfigError(
            f"model {name!r} has {uneven[0]} {keys[uneven[0]]!r}, must be one whole number for all layers; give a "
            "profile of its layers as a YAML file"
        )
    _check_family(keys, name=name)
    heads = keys["num_attention_heads"]
    profile = ModelProfile(
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
    if keys.get("model_type") not in UNGATED:
        return profile
    return replace(profile, layers=tuple(replace(each, mlp_matrices=2) for each in profile.every_layer))


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
