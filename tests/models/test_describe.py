"""Which models run, and what their shapes are; what does not run is refused before anything starts."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from rayfcp.config import ConfigError
from rayfcp.config.architecture import ArchitectureConfig
from rayfcp.config.models import ModelConfig
from rayfcp.models.describe import model_config, profile_of
from rayfcp.plan import model_profile
from tests.models.helpers import FAMILIES, VOCAB, architecture, library_config

SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}


def from_folder(folder: Path, family: str, **keys: Any) -> None:
    """`model_config` of a folder that holds the configuration of a `family` with these keys."""
    AutoConfig.for_model(family, **{**SMALL, **keys}).save_pretrained(folder)
    model_config(ModelConfig(path=str(folder)), vocab_size=VOCAB)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_the_profile_counts_the_matrices_of_the_real_model(family: str, tied: bool) -> None:
    config = library_config(family, tied=tied)
    profile = profile_of(config, name="tiny")
    shape = architecture(family, tied=tied)
    assert (profile.num_layers, profile.hidden_size, profile.ffn_size) == (3, shape.hidden_size, shape.ffn_size)
    assert (profile.num_heads, profile.num_kv_heads, profile.head_dim) == (4, 2, 12)
    assert (profile.vocab_size, profile.tied_embeddings) == (VOCAB, tied)
    assert profile.head_norms == (family == "qwen3")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert profile.num_parameters == sum(p.numel() for p in model.parameters() if p.ndim == 2)


EXPERTS = {
    "qwen3_moe": ({"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}, (20, 6, 2, 0)),
    "mixtral": ({"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None}, (48, 3, 2, 0)),
    "qwen2_moe": (
        {
            "num_experts": 6,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 24,
        },
        (20, 6, 4, 24),
    ),
}


@pytest.mark.parametrize("family", EXPERTS)
def test_the_profile_knows_experts(family: str) -> None:
    """All of them in memory; in the work of a token those that it passes, which is what products of matrices do."""
    keys, want = EXPERTS[family]
    config = AutoConfig.for_model(family, **SMALL, **keys, vocab_size=VOCAB, num_key_value_heads=2)
    profile = profile_of(config, name="tiny")
    assert (profile.ffn_size, profile.num_experts, profile.experts_per_token, profile.shared_ffn_size) == want
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    gates = sum(p.numel() for name, p in model.named_parameters() if "shared_expert_gate" in name)
    assert profile.num_parameters == sum(p.numel() for p in model.parameters() if p.ndim > 1) - gates
    ids = torch.arange(16)[None]
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(input_ids=ids, use_cache=False)
    flops = counted.get_flop_counts()["Global"]
    linear = sum(count for kind, count in flops.items() if kind in (torch.ops.aten.mm, torch.ops.aten.addmm))
    extra = 2 * 16 * gates
    assert linear == 16 * profile.linear_flops_per_token + extra


def test_layers_with_and_without_experts_are_described() -> None:
    keys = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "mlp_only_layers": [1]}
    config = AutoConfig.for_model("qwen3_moe", **SMALL, **keys, vocab_size=VOCAB)
    profile = profile_of(config, name="tiny")
    assert [each.num_experts for each in profile.layers] == [1 if at == 1 else 6 for at in range(profile.num_layers)]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert profile.num_parameters == sum(each.numel() for each in model.parameters() if each.ndim > 1)
    shape = architecture("qwen3").model_copy(update={"num_experts": 4, "experts_per_token": 2})
    with pytest.raises(
        ConfigError, match=r"num_experts is 4, .*'qwen3', whose layers have no experts; .* such as qwen3_moe"
    ):
        profile_of(model_config(ModelConfig(architecture=shape), vocab_size=VOCAB), name="tiny")


def test_sizes_that_a_family_refuses_are_one_line() -> None:
    shape = architecture("mamba2").model_copy(update={"head_dim": 48})
    with pytest.raises(ConfigError, match=r"model\.architecture does not fit model_type 'mamba2': .*must equal"):
        model_config(ModelConfig(architecture=shape), vocab_size=VOCAB)


UNGATED = ("starcoder2", "gpt_neox", "phi")


@pytest.mark.parametrize("family", UNGATED)
def test_the_profile_counts_mlps_of_two_matrices_too(family: str) -> None:
    """Width 48 weighs as much as a gated MLP of 32."""
    config = AutoConfig.for_model(family, **SMALL, vocab_size=VOCAB, num_key_value_heads=2)
    profile = profile_of(config, name="tiny")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert profile.ffn_size == 32
    assert profile.num_parameters == sum(p.numel() for p in model.parameters() if p.ndim == 2)


@pytest.mark.parametrize("name", ["qwen3-4b", "llama3.2-1b", "qwen3-30b-a3b"])
def test_a_model_by_name_has_the_profile_of_that_name(name: str) -> None:
    assert profile_of(model_config(ModelConfig(name=name), vocab_size=VOCAB), name=name) == model_profile(name)


def test_a_profile_of_what_has_no_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="model: xlnet layers cannot be made"):
        profile_of(AutoConfig.for_model("xlnet", n_layer=2, d_model=32, n_head=2, d_inner=48), name="tiny")


def test_padding_ids_beyond_the_vocabulary_are_dropped() -> None:
    assert AutoConfig.for_model("phi3").pad_token_id >= VOCAB
    assert library_config("phi3").pad_token_id is None
    shape = architecture("phi3").model_copy(update={"vocab_size": 40000})
    assert model_config(ModelConfig(architecture=shape), vocab_size=VOCAB).pad_token_id == 32000


def test_a_vocabulary_of_its_own_is_taken() -> None:
    shape = ArchitectureConfig(vocab_size=99)
    assert model_config(ModelConfig(architecture=shape), vocab_size=VOCAB).vocab_size == 99
    assert model_config(ModelConfig(), vocab_size=VOCAB).vocab_size == VOCAB


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_is_taken(family: str, tmp_path: Path) -> None:
    from_folder(tmp_path, family)


REFUSED = {
    "layers of another type": (
        "deepseek_v4",
        {},
        r"types \['heavily_compressed_attention'\], only full_attention, sliding_attention, chunked",
    ),
    "a router's noise": ("phimoe", {"pad_token_id": None}, r"router_jitter_noise=0\.01, must be 0"),
    "words without one that pads": (
        "modernbert-decoder",
        {"pad_token_id": VOCAB, "vocab_size": VOCAB},
        rf"pad_token_id is {VOCAB}, must be below vocab_size {VOCAB} for modernbert-decoder, which cannot be without",
    ),
    "chunks of nothing": (
        "llama4_text",
        {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": None},
        "attention_chunk_size is None, must be at least 1 where layers have chunked_attention",
    ),
    "layers that slide by nothing": (
        "qwen2",
        {"layer_types": ["sliding_attention", "full_attention"]},
        "sliding_window is None, must be at least 1",
    ),
    "a loss of the router": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
        r"qwen3_moe asks for an auxiliary loss of its router \(output_router_logits=True\), .* to false",
    ),
    "dropout in attention": ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1, must be 0; set it to 0"),
    "dropout elsewhere": ("phi3", {"resid_pdrop": 0.2}, "resid_pdrop=0.2, must be 0"),
    "dropout by another name": ("xglm", {"activation_dropout": 0.1}, "dropout=0.1, must be 0"),
    "dropout of whole layers": (
        "opt",
        {"dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.25},
        "layerdrop=0.25, must be 0",
    ),
    "parts beside the text": ("phi4_multimodal", {"pad_token_id": None}, "has audio_config, vision_config, only text"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_run_is_named(what: str, tmp_path: Path) -> None:
    family, keys, message = REFUSED[what]
    with pytest.raises(ConfigError, match=message) as caught:
        from_folder(tmp_path, family, **keys)
    assert str(caught.value).startswith("model") and "\n" not in str(caught.value)


def test_a_family_that_attends_twice_in_a_layer_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("longcat_flash").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="longcat_flash does not run, its layers attend twice"):
        model_config(ModelConfig(path=str(tmp_path)), vocab_size=VOCAB)


@pytest.mark.parametrize("content", ["{", json.dumps({"model_type": "qwne3"}), json.dumps({}), None])
def test_what_is_no_model_is_named(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"no Hugging Face model is there \(.+\); give a folder") as caught:
        model_config(ModelConfig(path=str(tmp_path)), vocab_size=VOCAB)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_an_unknown_architecture_is_named() -> None:
    with pytest.raises(ConfigError, match=r"model\.architecture\.model_type is 'qwne3', transformers does not know"):
        library_config("qwne3")


def test_a_text_model_needs_no_vision_code() -> None:
    script = (
        "import sys\n"
        "from rayfcp.config.models import ModelConfig\n"
        "from rayfcp.models.describe import model_config, profile_of\n"
        "from rayfcp.models.selfcheck import check_supported\n"
        "config = model_config(ModelConfig(), vocab_size=300)\n"
        "profile_of(config, name='tiny')\n"
        "check_supported(config)\n"
        "sys.exit('rayfcp.models.vision' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=120).returncode == 0
