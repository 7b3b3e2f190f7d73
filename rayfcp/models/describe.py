"""What a configuration says of a vision encoder: whether it runs, its shape, and one for random weights.

What a run's model looks like, from its configuration alone.
"""

import math
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from rayfcp.config import Config, ConfigError
from rayfcp.config.models import SEEING_FAMILIES, ArchitectureConfig, ModelConfig, VisionConfig
from rayfcp.models.library import (
    check_experts,
    check_layer_types,
    experts_of,
    layer_windows,
    make_language_model,
    num_experts,
    text_of,
    vision_of,
    with_layers,
)
from rayfcp.plan import model_profile
from rayfcp.values import ModelProfile, VisionProfile

MERGED = 2
"""Patches along each side of what becomes one token, in both families."""
COLOURS = 3
QWEN_TABLE_SIZE, INTERN_TILE_SIZE = 768, 448
"""Pixels, of the published models."""


def check_parts(config: PreTrainedConfig) -> None:
    """
    Raises:
        ConfigError: the model has other parts than a language model, or its encoder gives features that nobody makes.
    """
    if config.sub_configs and config.model_type not in SEEING_FAMILIES:
        parts = ", ".join(sorted(config.sub_configs))
        raise ConfigError(
            f"model: {config.model_type} has {parts}, only text runs, and pictures with {', '.join(SEEING_FAMILIES)}; "
            "choose another model"
        )
    layer = getattr(config, "vision_feature_layer", -1)
    if layer != -1:
        raise ConfigError(f"model: vision_feature_layer is {layer}, must be -1, the encoder's last; set it to -1")


def check_seeing(library: PreTrainedConfig, config: Config) -> None:
    """
    Raises:
        ConfigError: a model with a vision encoder is to be cut, or one without is to keep its encoder.
    """
    if vision_of(library) is None:
        if config.model.freeze_vision:
            raise ConfigError(
                f"model.freeze_vision is true, {library.model_type} has no vision encoder; set it to false"
            )
        return
    for name in ("pipeline_stages", "tensor_parallel"):
        if (value := getattr(config.cluster, name)) > 1:
            raise ConfigError(
                f"cluster.{name} is {value}, must be 1 for {library.model_type}, which has a vision encoder; set it to "
                "1, or choose a model of text alone"
            )


def vision_profile(config: PreTrainedConfig, *, frozen: bool) -> VisionProfile | None:
    """The encoder's shape as the cost model wants it, if there is one."""
    vision = vision_of(config)
    if vision is None:
        return None
    if config.model_type == "qwen3_vl":
        merged = vision.spatial_merge_size**2
        return VisionProfile(
            num_layers=vision.depth,
            hidden_size=vision.hidden_size,
            num_heads=vision.num_heads,
            ffn_size=vision.intermediate_size,
            patch_values=vision.in_channels * vision.temporal_patch_size * vision.patch_size**2,
            merged_patches=merged,
            merger_size=vision.hidden_size * merged,
            num_mergers=1 + len(vision.deepstack_visual_indexes),
            frozen=frozen,
        )
    height, width = vision.patch_size
    return VisionProfile(
        num_layers=vision.num_hidden_layers,
        hidden_size=vision.hidden_size,
        num_heads=vision.num_attention_heads,
        ffn_size=vision.intermediate_size,
        patch_values=vision.num_channels * height * width,
        merged_patches=round(1 / config.downsample_ratio) ** 2,
        merger_size=text_of(config).hidden_size,
        frozen=frozen,
    )


def named_vision(shape: VisionProfile, *, family: str) -> VisionConfig:
    """The encoder of a model that is known by name: of Qwen3-VL patches hold two frames, and features are taken after
    equal numbers of layers."""
    between = shape.num_mergers - 1
    frames, size = (2, QWEN_TABLE_SIZE) if family == "qwen3_vl" else (1, INTERN_TILE_SIZE)
    return VisionConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_heads=shape.num_heads,
        ffn_size=shape.ffn_size,
        patch_size=math.isqrt(shape.patch_values // (COLOURS * frames)),
        image_size=size,
        deepstack_layers=tuple((at + 1) * shape.num_layers // (between + 1) - 1 for at in range(between)),
    )


def seeing_keys(shape: ArchitectureConfig, text: dict[str, Any]) -> dict[str, Any]:
    """The library's keys for a model of this shape whose language model has the keys `text`."""
    vision = shape.vision
    assert vision is not None
    side = vision.image_size // vision.patch_size
    encoder: dict[str, Any] = {
        "hidden_size": vision.hidden_size,
        "intermediate_size": vision.ffn_size,
        "num_hidden_layers": vision.num_layers,
        "num_attention_heads": vision.num_heads,
    }
    image = vision.image_token if vision.image_token is not None else text["vocab_size"] - 1
    tied = {"tie_word_embeddings": text.pop("tie_word_embeddings")}
    if shape.model_type == "internvl":
        encoder |= {"patch_size": [vision.patch_size] * 2, "image_size": [vision.image_size] * 2}
        tokens = {"image_token_id": image, "image_seq_length": (side // MERGED) ** 2}
        return {"text_config": {"model_type": "qwen2", **text}, "vision_config": encoder, **tokens, **tied}
    encoder = {"depth": encoder.pop("num_hidden_layers"), "num_heads": encoder.pop("num_attention_heads"), **encoder}
    encoder |= {
        "patch_size": vision.patch_size,
        "spatial_merge_size": MERGED,
        "num_position_embeddings": side**2,
        "out_hidden_size": shape.hidden_size,
        "deepstack_visual_indexes": list(vision.deepstack_layers),
    }
    video = vision.video_token if vision.video_token is not None else text["vocab_size"] - 2
    tokens = {"image_token_id": image, "video_token_id": video}
    rope = {"rope_type": "default", "rope_theta": 5_000_000.0, "mrope_interleaved": True}
    text = text | {"rope_parameters": rope | {"mrope_section": _sections(shape.head_dim)}}
    return {"text_config": text, "vision_config": encoder, **tokens, **tied}


def _sections(head_dim: int) -> list[int]:
    """Frequencies that turn with time, height and width: shares of 24, 20 and 20 as in the published models."""
    each = head_dim // 2 * 20 // 64
    return [head_dim // 2 - 2 * each, each, each]


NAMED_POSITIONS = 131072
"""Positions of models given by name."""

_REFUSED = {
    "attn_logit_softcapping": "caps the logits of its attention, which kernels over several ranks do not",
    "final_logit_softcapping": "caps its logits, which the loss does not",
    "logit_scale": "scales its logits, which the loss does not",
}
"""Keys that must not be set, and why."""

_SINK = re.compile(r"\bsinks?\b")
"""Parameters of attention that takes part of its weights away from the keys."""

_SHAPE = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")


def model_config(config: ModelConfig, *, vocab_size: int) -> PreTrainedConfig:
    """The library's configuration of the run's model.

    Raises:
        ConfigError: the model cannot be found, or uses what we do not run (layers that attend neither to all before
            nor to a window, capped logits, attention sinks, losses of routers, dropout, parts for images or sound), or
            does not say its shape.
    """
    if config.path:
        found = _from_path(config.path)
    elif config.name:
        found = _from_architecture(_named(config.name), vocab_size=vocab_size)
    else:
        found = _from_architecture(config.architecture, vocab_size=vocab_size)
    # Families have padding ids of their own, which smaller vocabularies do not hold; packing needs none.
    text = text_of(found)
    if (getattr(text, "pad_token_id", None) or 0) >= (getattr(text, "vocab_size", None) or math.inf):
        text.pad_token_id = None
    check_parts(found)
    _check_runs(text)
    vision = vision_of(found)
    if vision is not None:
        _check_dropout(vision)
    return found


def check_limits(library: PreTrainedConfig, config: Config) -> None:
    """
    Raises:
        ConfigError: the run asks for more positions, stages or recomputed layers than its model has, or for what does
            not run with a vision encoder.
    """
    check_seeing(library, config)
    library = text_of(library)
    positions = getattr(library, "max_position_embeddings", None)
    if positions and config.data.max_seqlen > positions:
        raise ConfigError(f"data.max_seqlen is {config.data.max_seqlen}, the model has {positions} positions; lower it")
    if config.cluster.pipeline_stages > library.num_hidden_layers:
        raise ConfigError(
            f"cluster.pipeline_stages is {config.cluster.pipeline_stages}, must be at most the model's "
            f"{library.num_hidden_layers} layers; lower it"
        )
    if config.train.recompute_layers > library.num_hidden_layers:
        raise ConfigError(
            f"train.recompute_layers is {config.train.recompute_layers}, the model has {library.num_hidden_layers} "
            "layers; lower it"
        )


def _check_runs(found: PreTrainedConfig) -> None:
    check_layer_types(found)
    for name, why in _REFUSED.items():
        value = getattr(found, name, None)
        if value is not None:
            raise ConfigError(f"model: {found.model_type} {why} ({name}={value}); choose another model")
    if getattr(found, "logits_scaling", None) not in (None, 1.0):
        raise ConfigError(f"model: logits_scaling={found.logits_scaling} is not supported; choose another model")
    _check_dropout(found)
    for name in _SHAPE:
        if getattr(found, name, None) is None:
            raise ConfigError(f"model: {found.model_type} has no {name}, from which costs are computed; choose another")
    check_experts(found)
    _check_sinks(found, *_layer_parameters(found, num_layers=1))


def _check_sinks(found: PreTrainedConfig, layer: Iterable[str]) -> None:
    """`layer`: names of a layer's parameters."""
    sink = next((name for name in layer if _SINK.search(name)), None)
    if sink is not None:
        raise ConfigError(
            f"model: {found.model_type} has attention sinks ({sink}), which kernels over several ranks "
            "lack; choose another model"
        )


def _check_dropout(found: PreTrainedConfig) -> None:
    """Families name it differently; what belongs to heads for classification is not used."""
    for name, value in vars(found).items():
        is_rate = isinstance(value, int | float) and not isinstance(value, bool)
        if "drop" in name and not name.startswith(("classifier", "summary")) and is_rate and value:
            raise ConfigError(f"model: {name}={value}, must be 0; set it to 0 in the model's config")


def _from_path(path: str) -> PreTrainedConfig:
    try:
        found: PreTrainedConfig = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"model.path is {path!r}, no Hugging Face model is there ({first}); give a folder") from error
    return found


def _named(name: str) -> ArchitectureConfig:
    try:
        shape = model_profile(name)
    except ValueError as error:
        raise ConfigError(f"model.name: {error}") from error
    family = _family(name, shape)
    return ArchitectureConfig(
        model_type=family,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        ffn_size=shape.ffn_size,
        vocab_size=shape.vocab_size,
        max_positions=NAMED_POSITIONS,
        tied_embeddings=shape.tied_embeddings,
        num_experts=shape.num_experts,
        experts_per_token=shape.experts_per_token,
        vision=None if shape.vision is None else named_vision(shape.vision, family=family),
    )


def _family(name: str, shape: ModelProfile) -> str:
    """`internvl3-2b` is an internvl, `qwen3-vl-2b` a qwen3_vl, or a qwen3 where its shape is of text alone."""
    family = re.split(r"[0-9.-]", name)[0] + ("3" if name.startswith("qwen3") else "")
    sees = shape.vision is not None and family not in SEEING_FAMILIES
    return family + ("_moe" if shape.has_experts else "") + ("_vl" if sees else "")


def _from_architecture(shape: ArchitectureConfig, *, vocab_size: int) -> PreTrainedConfig:
    if shape.model_type in SEEING_FAMILIES and shape.vision is None:
        shape = shape.model_copy(update={"vision": VisionConfig()})
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
        **_experts_keywords(shape),
    }
    try:
        return AutoConfig.for_model(shape.model_type, **(seeing_keys(shape, keys) if shape.vision else keys))
    except ValueError as error:
        raise ConfigError(
            f"model.architecture.model_type is {shape.model_type!r}, transformers does not know it; try qwen3 or llama"
        ) from error


def _experts_keywords(shape: ArchitectureConfig) -> dict[str, int]:
    if shape.num_experts == 1:
        return {}
    return {
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.ffn_size,
    }


def profile_of(config: PreTrainedConfig, *, name: str, freeze_vision: bool = False) -> ModelProfile:
    """The model's shape as the cost model wants it.

    Of a model with a vision encoder, its language model's, and beside it the encoder's (`freeze_vision`: not trained).

    The cost model knows gated MLPs, of 3 matrices `[ffn_size, hidden_size]`. For what a family has instead
    `ffn_size` is chosen so that these count as many parameters: two thirds of the width of an MLP of 2. With
    experts it is the width of one, and what all tokens pass beside counts the same way.

    Raises:
        ConfigError: the library cannot make its layers, or those with experts are not equal.
    """
    is_tied, vision = bool(config.tie_word_embeddings), vision_profile(config, frozen=freeze_vision)
    config = text_of(config)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    attention = config.hidden_size * head_dim * 2 * (heads + kv_heads)
    layers = _layer_parameters(config, num_layers=config.num_hidden_layers if num_experts(config) else 1)
    experts, layer = experts_of(config, layers), layers[0]
    matrices = sum(parameter.numel() for parameter in layer.values() if parameter.ndim > 1)
    matrices -= experts.num_parameters if experts else 0
    plain_size = round((matrices - attention) / (3 * config.hidden_size))
    return ModelProfile(
        name=name,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=experts.ffn_size if experts else plain_size,
        vocab_size=config.vocab_size,
        tied_embeddings=is_tied,
        layer_windows=layer_windows(config),
        head_norms=any(re.search(r"\b(q|k|query|key)_(layer)?norm\b", name) for name in layer),
        num_experts=experts.count if experts else 1,
        experts_per_token=experts.per_token if experts else 1,
        shared_ffn_size=plain_size if experts else 0,
        vision=vision,
    )


def _layer_parameters(config: PreTrainedConfig, *, num_layers: int) -> list[dict[str, nn.Parameter]]:
    """Of the first layers of the library's model, by name.

    Raises:
        ConfigError: the library cannot make a layer of it.
    """
    try:
        with torch.device("meta"):
            model = make_language_model(with_layers(config, num_layers))
        return [dict(layer.named_parameters()) for layer in model.get_decoder().layers]
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"model: {config.model_type} layers cannot be made ({type(error).__name__}: {first}); choose another model"
        ) from error
