"""What a run's model looks like, from its configuration; needs neither weights nor torch."""

import re

from transformers import AutoConfig, PreTrainedConfig

from rayfcp.config import ConfigError
from rayfcp.config.models import ArchitectureConfig, ModelConfig
from rayfcp.plan import model_profile
from rayfcp.values import ModelProfile

NAMED_POSITIONS = 131072
"""Positions of models given by name."""

_UNSUPPORTED = {
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "logit_scale": None,
    "logits_scaling": None,
    "num_experts": None,
    "num_local_experts": None,
}

_DROPOUTS = ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "residual_dropout", "embedding_dropout")
_SHAPE = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")


def model_config(config: ModelConfig, *, vocab_size: int) -> PreTrainedConfig:
    """The library's configuration of the run's model.

    Raises:
        ConfigError: the model cannot be found, or uses what we do not run (sliding windows, capped logits,
            experts, dropout), or does not say its shape.
    """
    if config.path:
        found = _from_path(config.path)
    elif config.name:
        found = _from_architecture(_named(config.name), vocab_size=vocab_size)
    else:
        found = _from_architecture(config.architecture, vocab_size=vocab_size)
    _check_runs(found)
    return found


def _check_runs(found: PreTrainedConfig) -> None:
    kinds = set(getattr(found, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ConfigError(f"model.path: layer types {sorted(kinds)}, only full_attention runs; choose another model")
    for name, neutral in _UNSUPPORTED.items():
        if getattr(found, name, neutral) != neutral:
            raise ConfigError(f"model.path: {name}={getattr(found, name)} is not supported; choose another model")
    # Libraries without layer types slide in every layer.
    if getattr(found, "sliding_window", None) and not getattr(found, "layer_types", None):
        raise ConfigError(f"model: sliding_window={found.sliding_window} is not supported; choose another model")
    for name in _DROPOUTS:
        if getattr(found, name, 0.0):
            raise ConfigError(f"model: {name}={getattr(found, name)}, must be 0; set it to 0 in the model's config")
    for name in _SHAPE:
        if getattr(found, name, None) is None:
            raise ConfigError(f"model: {found.model_type} has no {name}, from which costs are computed; choose another")


def _from_path(path: str) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"model.path is {path!r}, no Hugging Face model is there ({first}); give a folder") from error


def _named(name: str) -> ArchitectureConfig:
    try:
        shape = model_profile(name)
    except ValueError as error:
        raise ConfigError(f"model.name: {error}") from error
    return ArchitectureConfig(
        model_type=re.split(r"[0-9.-]", name)[0] + ("3" if name.startswith("qwen3") else ""),
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        ffn_size=shape.ffn_size,
        vocab_size=shape.vocab_size,
        max_positions=NAMED_POSITIONS,
        tied_embeddings=shape.tied_embeddings,
    )


def _from_architecture(shape: ArchitectureConfig, *, vocab_size: int) -> PreTrainedConfig:
    try:
        return AutoConfig.for_model(
            shape.model_type,
            num_hidden_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            intermediate_size=shape.ffn_size,
            vocab_size=shape.vocab_size or vocab_size,
            max_position_embeddings=shape.max_positions,
            tie_word_embeddings=shape.tied_embeddings,
            attention_dropout=0.0,
        )
    except ValueError as error:
        raise ConfigError(
            f"model.architecture.model_type is {shape.model_type!r}, transformers does not know it; try qwen3 or llama"
        ) from error


def profile_of(config: PreTrainedConfig, *, name: str) -> ModelProfile:
    """The model's shape as the cost model wants it."""
    heads = config.num_attention_heads
    return ModelProfile(
        name=name,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        ffn_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        tied_embeddings=bool(config.tie_word_embeddings),
    )
