"""Models of the transformers library by their configuration, and small copies of configurations for checks."""

import copy
import logging
import math
import re
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from rayfcp.config import ConfigError
from rayfcp.config.architecture import VISION_FAMILIES
from rayfcp.data.hub import check_no_adapter, locate, reason_of
from rayfcp.models.layers import (
    EXPERT_COUNTS,
    experts_per_token,
    first_sharing_layer,
    layer_configs,
    num_experts,
)
from rayfcp.models.recurrent import FAMILIES as RECURRENT

if TYPE_CHECKING:
    from rayfcp.models.vision import VisionFamily

HEADS = 2
FFN_SIZE = 64
ALIGNED = 8
"""Alignment in 16-bit elements that kernels for experts need of matrix sizes. A narrowed model keeps the alignment of
its model, so that it runs wherever that does."""

NUM_EXPERTS = 8
VOCAB_SIZE = 61
WINDOW = 7
_LATENT_SIZES = {"q_lora_rank": 40, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "v_head_dim": 20}
_NARROW = {
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), FFN_SIZE),
    **dict.fromkeys(("ffn_dim", "n_inner"), FFN_SIZE),
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB_SIZE),
    "hidden_size_per_layer_input": 8,
    "first_k_dense_replace": 1,
    **_LATENT_SIZES,
}
"""Sizes of `narrowed` models, and keys that are none larger in them."""

_LAYER_LISTS = ("layers", "h", "blocks")
"""Names of a decoder's list of layers, by family."""

_PER_LAYER = (
    *("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types", "attention_layers", "moe_layers"),
    *("no_rope_layers", "layer_rope_theta", "num_attention_heads_per_layer", "full_attn_idxs"),
    *("intermediate_size", "activation_sparsity_pattern"),
)
"""Keys of lists with an entry per layer; others, such as pairs of bounds, may be as long by chance."""


QUANTIZATION = "quantization_config"
"""Key of `config.json` for weights that are stored in another form."""

MARK = ".lora_"
"""In the names of all parameters of adapters, and of no others."""


REWARD_HEAD = "score"
"""Name of the head in the library's `*ForSequenceClassification`."""


def library_name(name: str) -> str:
    """Name in the library's own model of a module or parameter that an adapter may wrap.

    >>> library_name("model.layers.0.mlp.up_proj.base_layer.weight")
    'model.layers.0.mlp.up_proj.weight'
    """
    return re.sub(r"\.base_layer(?=\.|$)", "", name)


def lora_module() -> ModuleType:
    """`rayfcp.models.lora`, imported where there are adapters.

    Raises:
        ConfigError: PEFT is not installed.
    """
    if find_spec("peft") is None:
        raise ConfigError("model.lora.rank is set, whose package peft is not installed; pip install 'rayfcp[lora]'")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # PEFT imports it, and it misses an optional kernel
    return import_module("rayfcp.models.lora")


def config_at(path: str, *, key: str = "model.path") -> PreTrainedConfig:
    """Return the configuration of the model at `path`, which `key` names, with all of its parts, without quantization
    settings: weights are plain here (`pretrained.WeightFiles` refuses others).

    Raises:
        ConfigError: There is no model, or it has an adapter.
    """
    check_no_adapter(path, key=key)
    source, local_only = locate(path, key=key)
    try:
        found: PreTrainedConfig = AutoConfig.from_pretrained(
            source, local_files_only=local_only, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{key} is {path!r}, no Hugging Face model is there ({reason_of(error)}); give a folder"
        ) from error
    except Exception as error:  # whatever a family's own code raises
        raise ConfigError(
            f"{key} is {path!r}, its configuration cannot be read ({type(error).__name__}: {reason_of(error)}); "
            "correct its config.json"
        ) from error
    parts = (getattr(found, name, None) for name in found.sub_configs)
    for each in (found, *parts):
        if getattr(each, QUANTIZATION, None) is not None:
            delattr(each, QUANTIZATION)
    return found


def text_of(config: PreTrainedConfig) -> Any:
    """Configuration of the language model: all of it where there is nothing else."""
    return config.get_text_config()


def has_reward_head(config: PreTrainedConfig) -> bool:
    """True if the head gives a reward, one number, in place of logits: a classifier of one label in the library."""
    return bool(config.num_labels == 1)


def is_saved_classifier(config: PreTrainedConfig) -> bool:
    """True if the configuration was saved with the weights of a `*ForSequenceClassification`."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def kept_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers of the model's state, by name. No training changes them, and copies of the state hold parameters only."""
    return {
        f"{path}.{name}".removeprefix("."): buffer
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def vision_family(config: PreTrainedConfig) -> "type[VisionFamily] | None":
    """Record of a VLM's family; None for a text model, which never imports `rayfcp.models.vision`."""
    if config.model_type not in VISION_FAMILIES:
        return None
    from rayfcp.models.vision import FAMILIES

    return FAMILIES[config.model_type]


def make_library_model(config: PreTrainedConfig, *, attention: str | None = None, **keywords: Any) -> Any:
    """A model with a head for next tokens, or for a reward. `attention`: implementation in the language model, with
    which a vision encoder runs ours too; by default the library chooses."""
    auto: Any = AutoModelForImageTextToText if config.model_type in VISION_FAMILIES else AutoModelForCausalLM
    auto = AutoModelForSequenceClassification if has_reward_head(config) else auto
    if attention is not None and config.model_type in VISION_FAMILIES:
        from rayfcp.models.vision import IMPLEMENTATION

        keywords["attn_implementation"] = {"": attention, "text_config": attention, "vision_config": IMPLEMENTATION}
    elif attention is not None:
        keywords["attn_implementation"] = attention
    return auto.from_config(config, trust_remote_code=False, **keywords)


def make_language_model(text: PreTrainedConfig) -> Any:
    """A model by its `text_of`; without a head where the family has one only with an encoder."""
    known = type(text) in MODEL_FOR_CAUSAL_LM_MAPPING
    auto: Any = AutoModelForCausalLM if known else AutoModel
    return auto.from_config(text, trust_remote_code=False)


def decoder_of(library: Any) -> Any:
    """Embedding, layers and final norm of a model of the library."""
    candidates = (library.get_decoder(), library.base_model, getattr(library, "model", None))
    return next((each for each in candidates if isinstance(each, PreTrainedModel) and each is not library), library)


def decoder_layers(decoder: nn.Module) -> nn.ModuleList:
    """
    Raises:
        TypeError: The decoder has no list of layers.
    """
    for name in _LAYER_LISTS:
        if isinstance(found := getattr(decoder, name, None), nn.ModuleList):
            return found
    raise TypeError(f"{type(decoder).__name__} has no list of layers")


def keywords_of(config: PreTrainedConfig, *, dtype: str) -> dict[str, Any]:
    """Keywords of the library's model for `dtype`: grouped matrix products do not support fp64."""
    return {"experts_implementation": "eager"} if dtype == "float64" and num_experts(config) else {}


def _keys_of_layers(config: PreTrainedConfig) -> dict[int, dict[str, Any]]:
    """Values of the keys that differ between layers, by number of the layer."""
    names = getattr(config, "per_layer_attributes", None) or ()
    return {number: {name: getattr(each, name) for name in names} for number, each in enumerate(layer_configs(config))}


def with_layers(config: PreTrainedConfig, num_layers: int) -> PreTrainedConfig:
    """A copy with at most the first `num_layers` layers; `_PER_LAYER` lists are cut as well."""
    copied = copy.deepcopy(config)
    before = config.num_hidden_layers
    num_layers = min(num_layers, before)
    for name, value in vars(config).items():
        if name in _PER_LAYER and isinstance(value, list | tuple) and len(value) == before:
            setattr(copied, name, value[:num_layers])
    copied.num_hidden_layers = num_layers
    if getattr(config, "num_kv_shared_layers", None):
        copied.num_kv_shared_layers = max(num_layers - first_sharing_layer(config), 0)
    if own := _keys_of_layers(config):
        copied.per_layer_config = {number: own[number] for number in range(copied.num_hidden_layers)}
    return copied


def narrowed(config: PreTrainedConfig, num_layers: int) -> PreTrainedConfig:
    """A copy with few layers, heads, experts and words, narrow MLPs and short windows; at least as many layers as
    contain one of each type, and one of each of dense MLPs and experts. Heads keep their size, since tables of rotary
    factors and partial rotations are made for it; grouped heads stay grouped. A vision encoder is narrowed too."""
    family = vision_family(config)
    if family is not None:
        text = narrowed(text_of(config), num_layers)
        return family.narrowed(config, text=text, num_layers=num_layers)
    tiny, own = copy.deepcopy(config), _keys_of_layers(config)
    narrow = [_narrow_keys(each) for each in layer_configs(config)]
    for name, value in narrow[0].items():
        setattr(tiny, name, value)
    if own:
        tiny.per_layer_config = {
            number: {name: narrow[number].get(name, value) for name, value in keys.items()}
            for number, keys in own.items()
        }
    if config.model_type in RECURRENT:
        for name, value in RECURRENT[config.model_type].narrow(tiny).items():
            setattr(tiny, name, value)
    if not remove_padding(tiny):
        tiny.pad_token_id = tiny.vocab_size - 1
    return with_layers(tiny, max(num_layers, _layers_of_each_shape(tiny)))


def remove_padding(config: PreTrainedConfig) -> bool:
    """Set the padding id to none, since packing needs none; False if the family must have one, which stays."""
    try:
        config.pad_token_id = None
    except StrictDataclassFieldValidationError:
        return False
    return True


def _narrow_keys(config: Any) -> dict[str, int]:
    """Keys of a configuration in a narrowed model, or in a layer of it."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    alignment = math.gcd(ALIGNED, config.hidden_size)
    counts = (count for count in range(HEADS, 2 * ALIGNED) if math.gcd(ALIGNED, count * head_dim) == alignment)
    heads = next(counts, HEADS)
    found = {"hidden_size": heads * head_dim, "num_attention_heads": heads}
    kv_heads = getattr(config, "num_key_value_heads", None)
    if kv_heads is not None:
        found["num_key_value_heads"] = heads if kv_heads == config.num_attention_heads else 1
    for name, size in (_NARROW | _narrow_experts(config)).items():
        if value := getattr(config, name, None):
            spare = -value % ALIGNED if size == FFN_SIZE else 0
            found[name] = min(value, size - spare)
    return found


def _narrow_experts(config: PreTrainedConfig) -> dict[str, int]:
    """Numbers of experts of a narrowed model; those in groups keep theirs."""
    is_grouped = (getattr(config, "n_group", None) or 1) > 1
    count = num_experts(config) if is_grouped else max(NUM_EXPERTS, experts_per_token(config))
    return dict.fromkeys(EXPERT_COUNTS, count)


def _layers_of_each_shape(config: PreTrainedConfig) -> int:
    """Number of the first layers that contain one of each type with each shape of parameters."""
    with torch.device("meta"):
        layers = decoder_layers(decoder_of(make_language_model(config)))
    types = getattr(config, "layer_types", None) or [""] * len(layers)
    shapes = ([(name, each.shape) for name, each in layer.named_parameters()] for layer in layers)
    found = [(kind, tuple(shape)) for kind, shape in zip(types, shapes, strict=False)]
    return max(found.index(each) for each in set(found)) + 1
