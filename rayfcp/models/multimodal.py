"""The text part of a multimodal model of the library: its configuration, and its place in the whole model.

Where the language model of a multimodal family is a causal LM of its own, it is trained alone. The whole model is only
created on the meta device, for the names of weights in files and for the encoders' weights in an export.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from rayfcp.config import ConfigError
from rayfcp.config.architecture import VISION_FAMILIES
from rayfcp.models.library import (
    VOCAB_SIZE,
    config_at,
    decoder_of,
    has_reward_head,
    make_library_model,
    narrowed,
    text_of,
)
from rayfcp.models.stages import is_tied

_TOLERANCE = 1e-4
"""Relative difference of logits that fp32 explains."""
_TOKENS = 19
_LAYERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    """Where the modules of a text model are in `whole`, the multimodal model, which is on the meta device."""

    whole: Any
    paths: dict[str, str]
    """By path in the text model: decoder and head."""

    def outer(self, name: str) -> str | None:
        """Name in the whole model of a module or tensor of the text model; None if it has none."""
        return _moved(name, self.paths)

    def inner(self, name: str) -> str | None:
        """Name in the text model of a module or tensor of the whole; None for those of encoders."""
        return _moved(name, {outer: inner for inner, outer in self.paths.items()})

    def others(self) -> set[str]:
        """Names in the whole model of tensors that are not in the text model."""
        return {name for name in self.whole.state_dict() if self.inner(name) is None}


def _moved(name: str, paths: dict[str, str]) -> str | None:
    return next((f"{new}.{name[len(old) + 1 :]}" for old, new in paths.items() if name.startswith(f"{old}.")), None)


def text_part(found: PreTrainedConfig) -> PreTrainedConfig:
    """Configuration of the causal LM in a multimodal model that we run as text; `found` itself where there is none, or
    where images run. Embedding and head are tied if they are in the whole model.

    Raises:
        ConfigError: The library cannot create the whole model.
    """
    if not found.sub_configs or found.model_type in VISION_FAMILIES or found.is_encoder_decoder:
        return found
    name, whole_class = _text_name(found), _whole_class(found)
    if name is None or whole_class is None or type(getattr(found, name)) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return found
    text: PreTrainedConfig = copy.deepcopy(getattr(found, name))
    text.tie_word_embeddings = is_tied(_on_meta(whole_class, found))
    return text


def part_at(path: str, config: PreTrainedConfig) -> TextPart | None:
    """Where a text model of `config` is in the multimodal model at `path`, which has these weights; None if the model
    there has no other parts.

    Raises:
        ConfigError: No model is there, or the library cannot create it.
    """
    found = config_at(path)
    return _part_of(found, config) if text_part(found) is not found and found.model_type != config.model_type else None


def check_text_alone(found: PreTrainedConfig, text: PreTrainedConfig) -> None:
    """Compare logits of a tiny text model of `text` with those of a model of `found`, of which it is the text part,
    with the same weights. Encoders have none, since text does not pass them.

    Raises:
        ConfigError: They differ: the family does more with text than its language model alone.
    """
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            config = narrowed(text, _LAYERS)
            config.num_labels = 2  # of a reward model's too, logits are compared
            config.pad_token_id = 0  # which some families put in place of images before they look up tokens
            alone = make_library_model(copy.deepcopy(config), attn_implementation="eager").float().eval()
            part = _part_of(found, config, attn_implementation="eager")
            for inner, outer in part.paths.items():
                part.whole.set_submodule(outer, alone.get_submodule(inner))
            _fill_others(part.whole)
            ids = torch.randint(0, VOCAB_SIZE, (1, _TOKENS))
            want, got = (model.eval()(input_ids=ids, use_cache=False).logits for model in (part.whole, alone))
    except Exception as error:  # whatever a family's own code raises
        raise _refused(found, f"cannot be run on text ({type(error).__name__}: {error})") from error
    difference = float((got - want).norm() / want.norm())
    if not difference <= _TOLERANCE:
        raise _refused(found, f"gives logits that differ by {difference:.2g} from {text.model_type} alone")


def _fill_others(whole: nn.Module) -> None:
    """Put NaN in place of parameters on the meta device, in no memory: the library asks for the device of the first."""
    for module in whole.modules():
        for name, each in module._parameters.items():
            if each is not None and each.is_meta:
                empty = torch.full((), torch.nan, dtype=each.dtype).expand(each.shape)
                module._parameters[name] = nn.Parameter(empty, requires_grad=False)


def _part_of(found: PreTrainedConfig, text: PreTrainedConfig, **keywords: Any) -> TextPart:
    """The text model of `text` in a model of `found` that has this text part."""
    config = copy.deepcopy(found)
    setattr(config, _text_name(found) or "", copy.deepcopy(text))
    whole = _on_meta(_whole_class(found), config, **keywords)
    with torch.device("meta"):
        alone = make_library_model(copy.deepcopy(text))
    decoder = decoder_of(alone)
    like = next((each for each in whole.modules() if type(each) is type(decoder)), None)
    if like is None:
        raise _refused(found, f"has no {type(decoder).__name__}")
    paths = {_path(alone, decoder): _path(whole, like)}
    if not has_reward_head(text):
        paths[_path(alone, alone.get_output_embeddings())] = _path(whole, whole.get_output_embeddings())
    return TextPart(whole=whole, paths=paths)


def _path(model: nn.Module, wanted: nn.Module) -> str:
    found: str = next(name for name, module in model.named_modules() if module is wanted)
    return found


def _text_name(found: PreTrainedConfig) -> str | None:
    """Key of the language model's configuration; None if it has none."""
    text, names = text_of(found), sorted(found.sub_configs)
    return next((name for name in names if getattr(found, name, None) is text), None)


def _whole_class(found: PreTrainedConfig) -> Any:
    """The library's class with all parts and a head for tokens, None if it has none."""
    # Imported here: runs of text models need none of this recent part of the library.
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

    return MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(found), None)


def _on_meta(whole_class: Any, config: PreTrainedConfig, **keywords: Any) -> Any:
    try:
        with torch.device("meta"):
            whole: Any = whole_class._from_config(copy.deepcopy(config), **keywords)
    except Exception as error:  # an encoder's package is missing, or sizes do not fit
        raise _refused(config, f"cannot be made ({type(error).__name__}: {error})") from error
    return whole


def _refused(found: PreTrainedConfig, why: str) -> ConfigError:
    return ConfigError(f"model: {found.model_type} {' '.join(why.split())[:300]}; choose another model")
