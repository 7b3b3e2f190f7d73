"""Profiles of Hugging Face configurations, and cost models that follow observed steps."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rayfcp.adapters.planning import HostPlanner, planner_for
from rayfcp.adapters.profiles import profile_of
from rayfcp.config import ConfigError
from rayfcp.config.constraints import HostConstraints
from rayfcp.cost.configurations import GATED, UNGATED
from rayfcp.models import describe
from rayfcp.plan import CostModel, model_profile
from rayfcp.values import FULL, LayerKind

SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 192,
    "vocab_size": 1000,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 128},
    "qwen2": {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
    "gemma3_text": {"sliding_window": 16, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_profile_is_that_of_the_library(family: str) -> None:
    """As `rayfcp train` has it, which makes the library's layers on the meta device."""
    library = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    expected, found = describe.profile_of(library, name=family), profile_of({"model_type": family, **library.to_dict()})
    names = ["num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_size", "num_experts", "experts_per_token"]
    names += ["shared_ffn_size", "vocab_size", "tied_embeddings", "kind_of_layer", "linear_flops_per_token"]
    assert {each: getattr(found, each) for each in names} == {each: getattr(expected, each) for each in names}


def test_families_are_read_exactly_or_refused() -> None:
    """Of every family of the library with a causal language model: as many parameters as its own code makes of the
    default configuration, or a refusal."""
    for family in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        if family not in GATED + UNGATED:
            with pytest.raises(ConfigError):
                profile_of({**SIZES, "model_type": family})
            continue
        library = AutoConfig.for_model(family)
        found = profile_of({**library.to_dict(), "model_type": family})
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(library)
        assert found.num_parameters == pytest.approx(sum(each.numel() for each in model.parameters()), rel=5e-3), family


def test_windows_of_raw_configurations() -> None:
    """Files of the hub have no types of layers; gemma's name every sixth, qwen's the first without a window."""
    window = LayerKind(window=9)
    gemma = profile_of({**SIZES, "sliding_window": 9, "sliding_window_pattern": 2})
    assert gemma.kind_of_layer == (window, FULL, window, FULL)
    qwen = {**SIZES, "sliding_window": 9, "max_window_layers": 3}
    assert profile_of({**qwen, "use_sliding_window": True}).kind_of_layer == (FULL, FULL, FULL, window)
    assert profile_of({**qwen, "use_sliding_window": False}).kind_of_layer == ()
    text = {**SIZES, "model_type": "qwen3_vl_text"}
    vlm = profile_of({"model_type": "qwen3_vl", "text_config": text, "vision_config": {"hidden_size": 9}})
    assert vlm.hidden_size == 64


def test_models_come_from_names_folders_and_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES), encoding="utf-8")
    assert profile_of(tmp_path) == profile_of(str(tmp_path / "config.json"))
    assert profile_of("qwen3-8b") == model_profile("qwen3-8b")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({}, "has no num_hidden_layers"),
        ({**SIZES, "layer_types": ["linear_attention"] * 4}, "linear_attention"),
        ({**SIZES, "mamba_d_state": 16}, "has mamba_d_state"),
        ({**SIZES, "model_type": "jamba"}, "is of family jamba"),
        ({**SIZES, "num_experts": 8, "mlp_only_layers": [0]}, "has mlp_only_layers"),
        ({**SIZES, "intermediate_size": [64, 128]}, "must be one whole number"),
        ("nowhere/config.json", "no config.json can be read"),
        ("qwen3", "did you mean"),
    ],
)
def test_unknown_models_are_refused(model: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        profile_of(model)


LENGTHS = [4000, 9000, 500, 700, 16000, 2000, 3000, 100]


def _planned(planner: HostPlanner) -> float:
    """Seconds of a batch by the planner's cost model."""
    plan = planner.plan(LENGTHS, num_ranks=4, max_tokens_per_rank=8192, constraints=HostConstraints())
    return plan.predicted_s


def test_predictions_follow_observed_steps() -> None:
    """A device of half the speed: predictions come close to what steps take."""
    planner = HostPlanner(model="qwen3-1.7b", hardware="h100")
    predicted_s = measured_s = _planned(planner)
    for _ in range(12):
        planner.observe(2.0 * measured_s)
        predicted_s = _planned(planner)
    assert predicted_s == pytest.approx(2.0 * measured_s, rel=0.1)
    planner.forget()
    with pytest.raises(ValueError, match="nothing was planned"):
        planner.observe(1.0)


def test_planners_told_the_same_stay_the_same() -> None:
    first, second = (HostPlanner(model="qwen3-1.7b", hardware="h100") for _ in range(2))
    costs: list[CostModel] = []
    for planner in (first, second):
        for factor in (1.5, 3.0, 0.7):
            planner.observe(factor * _planned(planner))
        costs.append(planner.cost)
    assert costs[0] == costs[1] != HostPlanner(model="qwen3-1.7b", hardware="h100").cost


def test_time_of_a_pipeline_holds_its_bubble() -> None:
    """With more stages than one, the time of a step is longer by its bubble than its microbatches take."""
    planner = HostPlanner(model="qwen3-1.7b", hardware="h100", pipeline_parallel=4)
    plan = planner.plan(LENGTHS, num_ranks=2, max_tokens_per_rank=8192, constraints=HostConstraints())
    count = len(plan.microbatches)
    before = planner.cost
    planner.observe(plan.predicted_s * (count + 3) / count)
    assert planner.cost.attention_s_per_pair == pytest.approx(before.attention_s_per_pair, rel=0.02)


def test_stages_and_tensor_parallelism_divide_the_work() -> None:
    whole, part = (
        HostPlanner(model="qwen3-8b", hardware="h100", tensor_parallel=parts, pipeline_parallel=parts).cost
        for parts in (1, 4)
    )
    assert part.attention_s_per_pair == pytest.approx(whole.attention_s_per_pair / 16)


def test_one_planner_of_a_process_has_the_same_arguments() -> None:
    settings: dict[str, Any] = {"model": "qwen3-1.7b", "hardware": "h100"}
    assert planner_for(**settings) is planner_for(**settings)
    assert planner_for(**settings) is not planner_for(**settings, tensor_parallel=2)
    own = HostPlanner(**settings)
    assert planner_for(planner=own) is own
