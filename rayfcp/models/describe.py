"""The run's model from its configuration alone: the library's configuration, what it may not contain, its profile."""

import math
import re
from typing import Any

from transformers import CONFIG_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoConfig, PreTrainedConfig

from rayfcp.config import Config, ConfigError
from rayfcp.config.adapting import LoraConfig
from rayfcp.config.architecture import VISION_FAMILIES, ArchitectureConfig, VisionConfig
from rayfcp.config.models import ModelConfig
from rayfcp.models.layers import check_experts, check_layer_types, num_experts, shared_by_layers
from rayfcp.models.library import (
    config_at,
    has_reward_head,
    is_saved_classifier,
    lora_module,
    remove_padding,
    text_of,
    vision_family,
)
from rayfcp.models.multimodal import text_part
from rayfcp.models.recurrent import has_fp32_residual
from rayfcp.models.rope import has_rope, original_positions, set_rope
from rayfcp.models.shapes import decoder_modules, layer_profiles
from rayfcp.plan import model_profile
from rayfcp.values import ModelProfile

NAMED_POSITIONS = 131072
"""Positions of models given by name."""

_SAME_NAMES = (
    *("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_size", "vocab_size"),
    *("tied_embeddings", "num_experts", "experts_per_token"),
)
"""Fields that mean the same in `ModelProfile` and `ArchitectureConfig`."""

_SHAPE = ("num_hidden_layers", "hidden_size", "vocab_size")


def model_config(
    config: ModelConfig, *, vocab_size: int, max_seqlen: int | None = None, is_reward: bool = False
) -> PreTrainedConfig:
    """The library's configuration of the run's model, which `has_reward_head` if `is_reward`: of a multimodal model at
    `model.path` its text part, except for `VISION_FAMILIES`. `max_seqlen`: of the run, for positions that depend on it
    (`rope.set_rope`).

    Raises:
        ConfigError: The model cannot be found, does not state its shape, or uses what we do not run (attention that is
            neither full nor over a window, capped logits, attention sinks, router losses, dropout, other modalities),
            `model.rope` does not fit it, or it cannot have the head of a reward model, or must have it.
    """
    if config.path:
        found = text_part(config_at(config.path))
    elif config.name:
        found = _from_architecture(_named(config.name), vocab_size=vocab_size)
    else:
        found = _from_architecture(config.architecture, vocab_size=vocab_size)
    field, value = ("path", config.path) if config.path else ("architecture.model_type", found.model_type)
    check_text_only(found, given=f"model.{field} is {value!r}")
    # Families have default padding ids, which smaller vocabularies do not contain; packing needs none.
    text = text_of(found)
    pad, words = getattr(text, "pad_token_id", None) or 0, getattr(text, "vocab_size", None) or math.inf
    if pad >= words and not remove_padding(text):
        raise ConfigError(
            f"model: pad_token_id is {pad}, must be below vocab_size {words} for {text.model_type}, which cannot be "
            "without; set one of them in the model's config.json"
        )
    set_rope(found, config.rope, max_seqlen=max_seqlen)
    _set_head(found, config, is_reward=is_reward)
    check_runs(text)
    if found.model_type in VISION_FAMILIES:
        layer = getattr(found, "vision_feature_layer", -1)
        if layer != -1:
            raise ConfigError(f"model: vision_feature_layer is {layer}, must be -1, the encoder's last; set it to -1")
        _check_dropout(found.vision_config)
    return found


def check_text_only(found: PreTrainedConfig, *, given: str) -> None:
    """
    Raises:
        ConfigError: The model, which is `given` by the user, has parts that neither text nor a known encoder needs.
    """
    if found.is_encoder_decoder:
        raise ConfigError(f"{given}, {found.model_type} has an encoder, only decoders alone run; choose another model")
    if found.sub_configs and found.model_type not in VISION_FAMILIES:
        raise ConfigError(
            f"{given}, {found.model_type} has {', '.join(sorted(found.sub_configs))}, only text runs, and images with "
            f"{', '.join(VISION_FAMILIES)}; choose another model"
        )


def configured_model(config: Config, *, vocab_size: int) -> PreTrainedConfig:
    """`model_config` of a run."""
    is_reward = config.loss.type == "reward"
    max_seqlen = config.data.max_seqlen
    return model_config(config.model, vocab_size=vocab_size, max_seqlen=max_seqlen, is_reward=is_reward)


def check_limits(library: PreTrainedConfig, config: Config) -> None:
    """
    Raises:
        ConfigError: More positions, stages or recomputed layers than the model has, or what does not run with a vision
            encoder.
    """
    if library.model_type in VISION_FAMILIES:
        for name in ("pipeline_stages", "tensor_parallel"):
            if (value := getattr(config.cluster, name)) > 1:
                raise ConfigError(
                    f"cluster.{name} is {value}, must be 1 for {library.model_type}, which has a vision encoder; set "
                    "it to 1, or choose a text model"
                )
    elif config.model.freeze_vision:
        raise ConfigError(f"model.freeze_vision is true, {library.model_type} has no vision encoder; set it to false")
    text = text_of(library)
    positions, num_layers = getattr(text, "max_position_embeddings", None), text.num_hidden_layers
    if positions and config.data.max_seqlen > positions:
        remedy = _longer(text, config)
        raise ConfigError(
            f"data.max_seqlen is {config.data.max_seqlen}, the model has {positions} positions; lower it{remedy}"
        )
    if config.cluster.pipeline_stages > num_layers:
        raise ConfigError(
            f"cluster.pipeline_stages is {config.cluster.pipeline_stages}, must be at most the model's "
            f"{num_layers} layers; lower it"
        )
    if config.cluster.pipeline_stages > 1 and (shared := shared_by_layers(text)):
        raise ConfigError(
            f"cluster.pipeline_stages is {config.cluster.pipeline_stages}, must be 1 with {text.model_type}, whose "
            f"layers share {shared}; set it to 1"
        )
    if config.train.recompute_layers > num_layers:
        raise ConfigError(
            f"train.recompute_layers is {config.train.recompute_layers}, the model has {num_layers} layers; lower it"
        )


def _set_head(found: PreTrainedConfig, config: ModelConfig, *, is_reward: bool) -> None:
    """
    Raises:
        ConfigError: See `model_config`.
    """
    labels, is_vlm = found.num_labels, found.model_type in VISION_FAMILIES
    if config.init == "pretrained" and is_saved_classifier(found) and not (is_reward and labels == 1):
        raise ConfigError(
            f"model.path is {config.path!r}, a classifier with num_labels {labels}, must be a causal LM, or one "
            "with num_labels 1 and loss.type=reward; give another folder"
        )
    if is_reward and (is_vlm or type(found) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING):
        why = "has a vision encoder" if is_vlm else "has no sequence classifier in transformers"
        raise ConfigError(
            f"loss.type is 'reward', which does not run with {found.model_type}: it {why}; choose another model, e.g. "
            "a qwen3 or llama"
        )
    found.num_labels = 1 if is_reward else 2


def _longer(text: Any, config: Config) -> str:
    """How a model that has too few positions gets more; empty if it cannot."""
    if not has_rope(text):
        return ""
    factor = math.ceil(config.data.max_seqlen / original_positions(text))
    if config.model.rope.type is None:
        return f", or extend them, e.g. by model.rope.type=yarn and model.rope.factor={factor}"
    return f", or set model.rope.factor={factor}"


def check_runs(found: PreTrainedConfig) -> None:
    """
    Raises:
        ConfigError: The language model uses what we do not run, or does not state its shape (see `model_config`).
    """
    check_layer_types(found)
    _check_dropout(found)
    for name in _SHAPE:
        if getattr(found, name, None) is None:
            raise ConfigError(f"model: {found.model_type} has no {name}, from which costs are computed; choose another")
    check_experts(found)
    decoder_modules(found, num_layers=1)


def dropout_keys(found: PreTrainedConfig) -> list[str]:
    """Keys of rates of dropout, and of a router's random jitter, that are not 0, under all names that families give
    them; that of classification heads is not used."""
    numbers = {name: value for name, value in vars(found).items() if isinstance(value, int | float)}
    rates = {name: value for name, value in numbers.items() if "drop" in name or "jitter" in name}
    return [
        name
        for name, value in rates.items()
        if value and not isinstance(value, bool) and not name.startswith(("classifier", "summary"))
    ]


def _check_dropout(found: PreTrainedConfig) -> None:
    for name in dropout_keys(found):
        raise ConfigError(f"model: {name}={getattr(found, name)}, must be 0; set it to 0 in the model's config")


def _named(name: str) -> ArchitectureConfig:
    try:
        shape = model_profile(name)
    except ValueError as error:
        raise ConfigError(f"model.name: {error}") from error
    if shape.layers or shape.kind_of_layer:
        raise ConfigError(
            f"model.name is {name!r}, whose layers are not all equal, which an architecture cannot say; give the "
            "folder of its configuration as model.path"
        )
    family, vision = _family(name, shape), None
    if shape.vision is not None:
        from rayfcp.models.vision import FAMILIES

        vision = FAMILIES[family].named(shape.vision)
    return ArchitectureConfig(
        model_type=family,
        max_positions=NAMED_POSITIONS,
        vision=vision,
        **{name: getattr(shape, name) for name in _SAME_NAMES},
    )


def _family(name: str, shape: ModelProfile) -> str:
    """`internvl3-2b` is an internvl; `qwen3-vl-2b` a qwen3_vl, or a qwen3 if its profile has no vision encoder."""
    family = re.split(r"[0-9.-]", name)[0] + ("3" if name.startswith("qwen3") else "")
    is_vlm = shape.vision is not None and family not in VISION_FAMILIES
    return family + ("_moe" if shape.has_experts else "") + ("_vl" if is_vlm else "")


def _from_architecture(shape: ArchitectureConfig, *, vocab_size: int) -> PreTrainedConfig:
    keys = {
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn_size,
        "vocab_size": shape.vocab_size or vocab_size,
        "max_position_embeddings": shape.max_positions,
        "tie_word_embeddings": shape.tied_embeddings,
        "attention_dropout": 0.0,
    }
    if shape.num_experts > 1:
        keys |= {"num_experts": shape.num_experts, "num_experts_per_tok": shape.experts_per_token}
        keys |= {"moe_intermediate_size": shape.ffn_size}
    if shape.model_type in VISION_FAMILIES:
        from rayfcp.models.vision import FAMILIES

        keys = FAMILIES[shape.model_type].library_keys(keys, shape.vision or VisionConfig())
    try:
        if shape.num_experts > 1 and not num_experts(AutoConfig.for_model(shape.model_type)):
            raise ConfigError(
                f"model.architecture.num_experts is {shape.num_experts}, must be 1 for model_type "
                f"{shape.model_type!r}, whose layers have no experts; choose another, such as qwen3_moe"
            )
        return AutoConfig.for_model(shape.model_type, **keys)
    except ConfigError:
        raise
    except Exception as error:  # families check their sizes by errors of many kinds
        if shape.model_type in CONFIG_MAPPING:
            raise ConfigError(
                f"model.architecture does not fit model_type {shape.model_type!r}: {' '.join(str(error).split())}; "
                "change its sizes, or give the folder of a configuration as model.path"
            ) from error
        raise ConfigError(
            f"model.architecture.model_type is {shape.model_type!r}, transformers does not know it; try qwen3 or llama"
        ) from error


def profile_of(
    config: PreTrainedConfig,
    *,
    name: str,
    freeze_vision: bool = False,
    keeps_attention: bool = False,
    lora: LoraConfig | None = None,
) -> ModelProfile:
    """The model's shape for the cost model: that of the language model, and the vision encoder's
    (`freeze_vision`: not trained), with the adapters of `lora`.

    Raises:
        ConfigError: The library cannot create its layers, they do not say their shapes (`layer_profiles`), or adapters
            do not fit.
    """
    around = _around(config, freeze_vision=freeze_vision, lora=lora)
    config = text_of(config)
    return ModelProfile.of_layers(
        layer_profiles(config),
        name=name,
        vocab_size=config.vocab_size,
        keeps_attention=keeps_attention,
        **around,
    )


def _around(config: PreTrainedConfig, *, freeze_vision: bool, lora: LoraConfig | None) -> dict[str, Any]:
    """Fields of a profile that the language model's configuration does not tell."""
    has_adapters, family = lora is not None and lora.rank is not None, vision_family(config)
    return {
        "tied_embeddings": bool(getattr(config, "tie_word_embeddings", False)) and not has_reward_head(config),
        "num_outputs": 1 if has_reward_head(config) else None,
        "vision": None if family is None else family.profile(config, frozen=freeze_vision or has_adapters),
        "adapter": lora_module().adapter_profile(config, lora) if has_adapters else None,
        "fp32_residual": has_fp32_residual(text_of(config)),
    }
