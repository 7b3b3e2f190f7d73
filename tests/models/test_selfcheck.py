"""Which families compute here what they compute in the library; the others are refused before a run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.qwen3 import modeling_qwen3

from rayfcp.config import ConfigError
from rayfcp.config.architecture import VISION_FAMILIES, ArchitectureConfig
from rayfcp.config.models import ModelConfig
from rayfcp.cost.memory import layer_bytes
from rayfcp.execute.parallel.groups import MeshPosition, join_process_groups, leave_process_groups
from rayfcp.execute.parallel.sharding import shard, stage_mesh
from rayfcp.models import vision
from rayfcp.models.build import random_model
from rayfcp.models.describe import model_config, profile_of
from rayfcp.models.layers import kinds_of_layers
from rayfcp.models.library import VOCAB_SIZE, narrowed
from rayfcp.models.selfcheck import check_supported, packed_loss, round_parameters
from rayfcp.values.layers import count_kinds
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
        "glm4_moe",  # whose heads of 42 channels make two of them too few for 16-bit products of experts
        "minimax",  # whose decay rates are buffers
    ],
)
def test_families_that_agree_pass(family: str) -> None:
    """In fp32 and, as FSDP runs them, in bf16."""
    check_supported(library(family), dtype="bfloat16")


@pytest.mark.parametrize("num_stages", [1, 3])
def test_an_fp32_residual_stream_meets_a_head_and_pipes_in_bf16(num_stages: int) -> None:
    check_supported(library("mamba2"), num_stages=num_stages, dtype="bfloat16")


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


@pytest.mark.parametrize("family", ["mamba2", "nemotron_h"])
def test_memory_counts_activations_between_layers_in_their_dtype(family: str) -> None:
    """What a recomputed layer keeps, in a model in bf16."""
    config = narrowed(library(family), 2)
    tiny, found = random_model(config, dtype="bfloat16", seed=0), []
    round_parameters(tiny)
    tiny.layers[0].register_forward_hook(lambda _, __, output: found.append(output.element_size()))
    packed_loss([tiny], [torch.arange(13)], layer_kinds=count_kinds(kinds_of_layers(config)))
    model = replace(profile_of(config, name=family), keeps_attention=False)
    assert layer_bytes(model, bytes_per_element=2).kept == found[0] * config.hidden_size
    assert layer_bytes(model, bytes_per_element=8).kept == 8 * config.hidden_size


class ScalingRMSNorm(modeling_qwen3.Qwen3RMSNorm):
    """A norm that differs in one dtype only."""

    dtype: torch.dtype

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = super().forward(hidden)
        return self.differ(normed) if hidden.dtype is self.dtype else normed

    def differ(self, normed: torch.Tensor) -> torch.Tensor:
        return normed * 40.0


class WideningRMSNorm(ScalingRMSNorm):
    def differ(self, normed: torch.Tensor) -> torch.Tensor:
        return normed.float()


@pytest.mark.parametrize(
    ("norm", "dtype", "message"),
    [
        (
            ScalingRMSNorm,
            "bfloat16",
            r"qwen3 cannot be trained, .* with packed sequences in bfloat16 and .* in float32, must agree",
        ),
        (
            WideningRMSNorm,
            "bfloat16",
            r"qwen3 cannot be trained in bfloat16, a tiny one fails with RuntimeError: .*; choose",
        ),
        (
            WideningRMSNorm,
            "float64",
            r"qwen3 cannot be trained in float64, a tiny one fails with RuntimeError: .*; choose",
        ),
    ],
)
def test_what_only_the_dtype_of_the_run_shows_is_refused(
    norm: type[ScalingRMSNorm], dtype: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norm, "dtype", getattr(torch, dtype), raising=False)
    monkeypatch.setattr(modeling_qwen3, "Qwen3RMSNorm", norm)
    check_supported(library("qwen3"))
    with pytest.raises(ConfigError, match=message) as caught:
        check_supported(library("qwen3"), dtype=dtype)
    assert str(caught.value).endswith("or set model.dtype=float32") == (dtype == "bfloat16")


def test_sizes_of_experts_that_only_16_bit_products_refuse_are_refused() -> None:
    """The tiny model has the alignment of the whole one."""
    config = library("qwen3_moe", moe_intermediate_size=1020)
    check_supported(config)
    with pytest.raises(ConfigError, match=r"cannot be trained in bfloat16, .* multiple of 16 bytes"):
        check_supported(config, dtype="bfloat16")


DENSE = {"mlp_layer_types": ["dense"] * 4}
UNUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "8 experts that the library fills in": ("nemotron_h", {"hybrid_override_pattern": "M-M*"}),
    "and recurrences": ("nemotron_h", {"hybrid_override_pattern": "*-*-"}),
    "experts, all layers dense by type": ("glm4_moe_lite", DENSE),
    "by number": ("qwen2_moe", {"mlp_only_layers": [0, 1, 2, 3]}),
    "by count": ("deepseek_v3", {"first_k_dense_replace": 4}),
    "by interval": ("llama4_text", {"interleave_moe_layer_step": 99}),
    "mamba, all layers attend": ("granitemoehybrid", {"layer_types": ["attention"] * 4, "num_local_experts": 0}),
    "delta rules, all layers attend": ("qwen3_next", {"layer_types": ["full_attention"] * 4, "num_experts": 0}),
    "a window, switched off": ("qwen2", {"sliding_window": 4096, "use_sliding_window": False}),
    "a window, all layers with full attention": ("gpt_oss", {"layer_types": ["full_attention"] * 4}),
    "layers for later tokens": ("glm4_moe", {"num_nextn_predict_layers": 1}),
}


@pytest.mark.parametrize("what", UNUSED)
def test_keys_that_no_layer_uses_are_no_obstacle(what: str, tmp_path: Path) -> None:
    """Of a config.json as published models have it, which leaves the rest to the library."""
    family, keys = UNUSED[what]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "num_hidden_layers": 4, **keys}))
    config = model_config(ModelConfig(path=str(tmp_path)), vocab_size=300)
    model = profile_of(config, name=family)
    has_experts = family in ("gpt_oss", "glm4_moe")
    assert model.has_experts == has_experts
    assert {layer.has_experts for layer in model.every_layer} <= {has_experts, False}
    check_supported(config, dtype="bfloat16")


def test_experts_that_are_not_stacked_are_refused_still() -> None:
    with pytest.raises(ConfigError, match="doge has no layers of 64 stacked experts"):
        profile_of(library("doge", is_moe=True, num_experts=64), name="doge")


def test_a_window_in_masks_alone_is_ours_too() -> None:
    quiet = {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0}
    check_supported(library("phimoe", sliding_window=2047, **quiet), num_stages=2)


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("qwen3_moe", {"decoder_sparse_step": 0}, "layers cannot be made (ZeroDivisionError"),
        ("exaone4", {"sliding_window_pattern": "LLLG"}, "its configuration cannot be read (TypeError"),
    ],
)
def test_what_the_library_cannot_make_is_named(family: str, keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "sliding_window": 64, **keys}))
    with pytest.raises(ConfigError) as caught:
        model_config(ModelConfig(path=str(tmp_path)), vocab_size=300)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("family", ["mamba2", "minimax", "qwen3_moe"])
def test_a_tiny_model_in_bf16_computes_what_fsdp_does(family: str) -> None:
    config = narrowed(library(family), 2)
    rows = [torch.arange(length) % VOCAB_SIZE for length in (13, 22)]
    position, cpu = MeshPosition(rank=0, num_ranks=1), torch.device("cpu")
    groups = join_process_groups(position=position, store=dist.HashStore, device=cpu, timeout_s=60.0)
    try:
        cast, sharded = (random_model(config, dtype="bfloat16", seed=0) for _ in range(2))
        round_parameters(cast)
        shard(sharded, sharded.sharded_parts, mesh=stage_mesh(groups), dtype=torch.bfloat16)
        kinds = count_kinds(kinds_of_layers(config))
        losses = [packed_loss([model], rows, layer_kinds=kinds) for model in (cast, sharded)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        for mine, theirs in zip(cast.parameters(), sharded.parameters(), strict=True):
            assert torch.equal(mine.grad.float(), theirs.grad.to_local())
    finally:
        leave_process_groups(groups)


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_vlm_families_pass(family: str) -> None:
    check_supported(vlm_config(family), dtype="bfloat16")
    encoder = {"deepstack_layers": (0, 3)} if family == "qwen3_vl" else None
    shape = ArchitectureConfig.model_validate({"model_type": family, "vision": encoder})
    check_supported(model_config(ModelConfig(architecture=shape), vocab_size=300))


def test_an_image_is_part_of_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Image features for the first layers are added at wrong positions."""
    shift = lambda hidden, rows, features: hidden.index_add(1, rows - 1, features[None])  # noqa: E731
    monkeypatch.setattr(vision, "_add_features", shift)
    with pytest.raises(ConfigError, match="qwen3_vl cannot be trained, loss of a tiny one is"):
        check_supported(vlm_config("qwen3_vl"))
