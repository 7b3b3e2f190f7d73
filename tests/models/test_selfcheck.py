"""Which families compute here what they compute in the library; the others are refused before a run."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.qwen3 import modeling_qwen3

from rayfcp.config import ConfigError
from rayfcp.config.architecture import VISION_FAMILIES, ArchitectureConfig
from rayfcp.config.models import ModelConfig
from rayfcp.models import vision
from rayfcp.models.describe import model_config
from rayfcp.models.selfcheck import check_supported
from tests.models.helpers import FAMILIES
from tests.models.vlm import vlm_config

QUIET = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "hidden_dropout_prob", "layerdrop"), 0.0)
QUIET |= dict.fromkeys(("attention_probs_dropout_prob", "resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.0)


def library(family: str, **keys: Any) -> PreTrainedConfig:
    """A family as it comes, of its own size, without dropout."""
    return AutoConfig.for_model(family, **{**QUIET, **keys})


@pytest.mark.parametrize(
    "family",
    [
        *FAMILIES,
        "phi3",
        "granite",
        "gemma",
        "olmo2",
        "starcoder2",
        "gpt_neox",
        "smollm3",
        "glm",
        "biogpt",
        "qwen3_moe",
        "olmoe",
        "stablelm",
    ],
)
def test_families_that_agree_pass(family: str) -> None:
    check_supported(library(family))


REFUSED = {
    "attention of its own": ("gptj", {}, "gptj cannot be trained, its attention is code of its own"),
    "bidirectional": (
        "bert",
        {},
        "bert cannot be trained, a tiny one fails with .*BertModel has no list of layers",
    ),
    "attends twice": ("diffllama", {}, "some of its layers do not use our attention"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_families_that_do_not_are_refused(what: str) -> None:
    family, keys, message = REFUSED[what]
    with pytest.raises(ConfigError, match=message) as caught:
        check_supported(library(family, **keys))
    assert str(caught.value).startswith("model: ") and "\n" not in str(caught.value)


def test_what_the_configuration_says_is_checked_not_the_family_alone() -> None:
    """Routers that add noise in training compute something else in every pass."""
    check_supported(library("phimoe", router_jitter_noise=0.0, input_jitter_noise=0.0))
    with pytest.raises(
        ConfigError, match=r"phimoe cannot be trained, loss of .* with packed .* in transformers, must agree"
    ):
        check_supported(library("phimoe"))


def test_it_leaves_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    for family in ("qwen3", "diffllama"):
        try:
            check_supported(library(family))
        except ConfigError:
            continue
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_of_the_run_passes_as_it_is_configured() -> None:
    for name in ("qwen3-8b", "llama3.2-1b"):
        check_supported(model_config(ModelConfig(name=name), vocab_size=300))


def test_a_model_of_one_layer_passes() -> None:
    check_supported(AutoConfig.for_model("qwen3", num_hidden_layers=1))


def test_buffers_that_change_in_training_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the state has none."""

    class CountingRMSNorm(modeling_qwen3.Qwen3RMSNorm):
        def __init__(self, *args: Any, **keywords: Any) -> None:
            super().__init__(*args, **keywords)
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return super().forward(hidden)

    check_supported(library("qwen3"))
    monkeypatch.setattr(modeling_qwen3, "Qwen3RMSNorm", CountingRMSNorm)
    with pytest.raises(ConfigError, match=r"buffer .*\.count changes in training"):
        check_supported(library("qwen3"))


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_vlm_families_pass(family: str) -> None:
    check_supported(vlm_config(family))
    encoder = {"deepstack_layers": (0, 3)} if family == "qwen3_vl" else None
    shape = ArchitectureConfig.model_validate({"model_type": family, "vision": encoder})
    check_supported(model_config(ModelConfig(architecture=shape), vocab_size=300))


def test_an_image_is_part_of_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Image features for the first layers are added at wrong positions."""
    shift = lambda hidden, rows, features: hidden.index_add(1, rows - 1, features[None])  # noqa: E731
    monkeypatch.setattr(vision, "_add_features", shift)
    with pytest.raises(ConfigError, match="qwen3_vl cannot be trained, loss of a tiny one is"):
        check_supported(vlm_config("qwen3_vl"))
