"""The transformers library's models by their configuration: those that only read, and those that see as well."""

from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
)

from rayfcp.config.architecture import SEEING_FAMILIES


def text_of(config: PreTrainedConfig) -> Any:
    """What a configuration says of the language model: all of it where there is nothing else."""
    return config.get_text_config()


def vision_of(config: PreTrainedConfig) -> Any | None:
    """What it says of the vision encoder, if there is one that runs."""
    return config.vision_config if config.model_type in SEEING_FAMILIES else None  # type: ignore[attr-defined]


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
    return (AutoModelForCausalLM if known else AutoModel).from_config(text)
