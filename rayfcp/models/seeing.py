"""What a configuration says of a vision encoder: whether it runs, its shape, and one for random weights."""

import math
from typing import Any

from transformers import PreTrainedConfig

from rayfcp.config import Config, ConfigError
from rayfcp.config.architecture import SEEING_FAMILIES, ArchitectureConfig, VisionConfig
from rayfcp.models.library import text_of, vision_of
from rayfcp.values import VisionProfile

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
        merged_patches=round(1 / config.downsample_ratio) ** 2,  # type: ignore[attr-defined]
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
    encoder = {
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
