"""VLMs by their configuration: shapes for costs, and what is refused before anything starts."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoConfig

from rayfcp.config import Config, ConfigError
from rayfcp.config.architecture import VISION_FAMILIES, ArchitectureConfig
from rayfcp.config.models import ModelConfig
from rayfcp.models import describe
from rayfcp.models.describe import check_limits, model_config, profile_of
from rayfcp.models.library import make_library_model
from rayfcp.plan import model_profile
from rayfcp.values import VisionProfile
from tests.models.vlm import vlm_config

VOCAB = 300


def of_shape(family: str, **keys: Any) -> ModelConfig:
    return ModelConfig.model_validate({"architecture": {"model_type": family, **keys}})


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_the_profile_counts_the_matrices_of_the_real_model(family: str, ours: bool) -> None:
    """But for learned positions; and the language model's as if it were alone."""
    config = model_config(of_shape(family), vocab_size=VOCAB) if ours else vlm_config(family)
    profile = profile_of(config, name="tiny", freeze_vision=ours)
    with torch.device("meta"):
        model = make_library_model(config)
    matrices = {name: parameter.numel() for name, parameter in model.named_parameters() if parameter.ndim > 1}
    language = [name for name in matrices if "language_model" in name or "lm_head" in name]
    places = [name for name in matrices if re.search(r"pos_embed|position_embeddings|cls_token", name)]
    assert profile.num_parameters == sum(matrices[name] for name in language)
    assert profile.vision is not None and profile.vision.frozen == ours
    rest = matrices.keys() - {*language, *places}
    assert profile.vision.num_parameters(profile.hidden_size) == sum(matrices[name] for name in rest)


def test_features_between_layers_are_mergers_of_their_own() -> None:
    shape = {"vision": {"deepstack_layers": [0, 2], "num_layers": 3}}
    profile = profile_of(model_config(of_shape("qwen3_vl", **shape), vocab_size=VOCAB), name="tiny")
    assert profile.vision is not None and profile.vision.num_mergers == 3


NAMED = {
    "qwen3-vl-2b": {"patch_values": 1536, "merger_size": 4096, "num_mergers": 4},
    "internvl2.5-4b": {"patch_values": 588, "merger_size": 2048},
}


@pytest.mark.parametrize("name", NAMED)
def test_models_known_by_name_have_the_encoders_of_their_profiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"num_layers": 24, "hidden_size": 1024, "num_heads": 16, "ffn_size": 4096, "merged_patches": 4}
    named = replace(model_profile(name), vision=VisionProfile(**sizes, **NAMED[name]))
    monkeypatch.setattr(describe, "model_profile", lambda _: named)
    found = profile_of(model_config(ModelConfig(name=name), vocab_size=VOCAB), name=name)
    assert replace(found, head_norms=named.head_norms, ffn_size=named.ffn_size) == named


REFUSED = {
    "stages": (
        {"model": {"architecture": {"model_type": "qwen3_vl"}}, "cluster": {"num_workers": 2, "pipeline_stages": 2}},
        "cluster.pipeline_stages is 2, must be 1 for qwen3_vl, which has a vision encoder",
    ),
    "split layers": (
        {"model": {"architecture": {"model_type": "internvl"}}, "cluster": {"num_workers": 2, "tensor_parallel": 2}},
        "cluster.tensor_parallel is 2, must be 1 for internvl, which has a vision encoder",
    ),
    "nothing to freeze": (
        {"model": {"freeze_vision": True}},
        "model.freeze_vision is true, qwen3 has no vision encoder",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_run_is_refused_in_one_line(what: str) -> None:
    keys, message = REFUSED[what]
    config = Config.model_validate({"data": {"paths": ["."]}, **keys})
    with pytest.raises(ConfigError, match=message) as caught:
        check_limits(model_config(config.model, vocab_size=VOCAB), config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"vision_feature_layer": -2}, "vision_feature_layer is -2, must be -1"),
        ({"vision_config": {"hidden_dropout_prob": 0.1}}, "hidden_dropout_prob=0.1, must be 0"),
        ({"text_config": {"model_type": "qwen2", "attention_dropout": 0.1}}, "attention_dropout=0.1, must be 0"),
    ],
)
def test_what_an_encoder_does_that_we_do_not_is_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    AutoConfig.for_model("internvl", **keys).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=message):
        model_config(ModelConfig(path=str(tmp_path)), vocab_size=VOCAB)


def test_other_families_with_parts_are_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("qwen2_5_vl").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"qwen2_5_vl has .*vision_config, only text runs, and images with"):
        model_config(ModelConfig(path=str(tmp_path)), vocab_size=VOCAB)


def test_a_family_with_several_text_parts_is_refused(tmp_path: Path) -> None:
    """The library cannot say which of them is the language model."""
    parts = {"text_encoder": "t5", "audio_encoder": "encodec", "decoder": "musicgen_decoder"}
    parts_of = {name: AutoConfig.for_model(kind).to_dict() for name, kind in parts.items()}
    AutoConfig.for_model("musicgen", **parts_of).save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as caught:
        model_config(ModelConfig(path=str(tmp_path)), vocab_size=VOCAB)
    assert str(caught.value) == (
        f"model.path is {str(tmp_path)!r}, musicgen has an encoder, only decoders alone run; choose another model"
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "llama", "vision": {}}, "vision is set, must be absent for model_type 'llama'"),
        ({"model_type": "internvl", "vision": {"deepstack_layers": [0]}}, r"deepstack_layers is \(0,\), must be none"),
        ({"model_type": "qwen3_vl", "vision": {"deepstack_layers": [7]}}, r"deepstack_layers is \(7,\), must lie in"),
        ({"model_type": "qwen3_vl", "vision": {"image_size": 40}}, "image_size is 40, must be a multiple of 2 x"),
        ({"model_type": "qwen3_vl", "vision": {"hidden_size": 40}}, "hidden_size is 40, must be a multiple of 4 x"),
    ],
)
def test_shapes_that_cannot_be_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ArchitectureConfig.model_validate(keys)
