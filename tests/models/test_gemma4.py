"""Gemma 4: heads of several sizes, keys and values that layers share, embeddings for single layers, experts beside a
dense MLP. Export, import and further cases: the families of `tests.models.folders`."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from rayfcp.config import Config, ConfigError
from rayfcp.cost.memory import layer_bytes
from rayfcp.models.describe import check_limits, profile_of
from rayfcp.models.families import check_family
from rayfcp.models.selfcheck import check_supported
from rayfcp.models.tensor_parallel import check_tensor_parallel
from rayfcp.values import Primitive
from tests.execute.cases import VOCAB, Case
from tests.models.families import assert_same, by_library, in_process
from tests.models.folders import GEMMA4, SHAPE, SHARED

TYPES = ["sliding_attention", "full_attention", "full_attention"]
ONE_MATRIX = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}
EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "keys shared": ("gemma4_text", SHARED),
    "keys own": ("gemma4_text", {"layer_types": TYPES, "hidden_size_per_layer_input": 6}),
    "experts": ("gemma4_text", {"layer_types": TYPES} | ONE_MATRIX | EXPERTS),
    "unified": ("gemma4_unified_text", {"layer_types": TYPES, "final_logit_softcapping": 2.0} | ONE_MATRIX),
}
RING = Case(
    num_ranks=3,
    lengths=(61, 17, 1, 25, 7),
    microbatches=((((2, 0, 1), (0, 2)),), (((1, 2), (1, 3)), ((0,), (4,)))),
    recomputed=5,
)
CASES = {
    "ring, all layers recomputed": RING,
    "ring, attention kept": replace(RING, keeps=True),
    "by heads": Case(
        num_ranks=2,
        lengths=(41, 1, 17, 2),
        microbatches=((((0, 1), (0,)),), (((1,), (1, 2)), ((0,), (3,)))),
        recomputed=2,
        primitive=Primitive.ULYSSES,
    ),
}


def library(what: str) -> PreTrainedConfig:
    family, keys = MODELS[what]
    words = {"vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB}
    return AutoConfig.for_model(family, **{**SHAPE, **GEMMA4, **keys, **words})


@pytest.mark.parametrize("what", MODELS)
def test_packed_batches_as_the_library_computes_them(what: str) -> None:
    config = library(what)
    for how, case in CASES.items():
        if how == "by heads" and config.attention_k_eq_v:
            continue  # one head of keys
        assert_same(in_process(config, case), by_library(config, case), what=(what, how))


@pytest.mark.parametrize("what", MODELS)
def test_profiles_count_what_the_library_has(what: str) -> None:
    config = library(what)
    config.moe_intermediate_size = config.hidden_size  # no width has a remainder
    with torch.device("meta"):
        parameters = list(AutoModelForCausalLM.from_config(config).parameters())
    profile = profile_of(config, name=what)
    assert profile.num_parameters == sum(each.numel() for each in parameters if each.ndim > 1)
    heads = [each.attention for each in profile.every_layer if each.attention]
    kv_heads = 1 if config.attention_k_eq_v else 2
    sizes = {"sliding_attention": (2, 8), "full_attention": (kv_heads, 16)}
    assert [(each.num_kv_heads, each.head_dim) for each in heads] == [sizes[each] for each in config.layer_types]


def test_what_shares_keys_is_counted_once() -> None:
    profile = profile_of(library("keys shared"), name="shared")
    first, lends, _, uses, _ = profile.every_layer
    assert [each.attention and each.attention.key_matrices for each in profile.every_layer] == [2, 2, 2, 0, 0]
    kept, more = (layer_bytes(profile, each, bytes_per_element=2).kept for each in (first, lends))
    assert more - kept == 2 * lends.moved_elements
    assert uses.moved_elements == lends.moved_elements and uses.ffn_size - first.ffn_size == 48
    assert profile.embedding_parameters == VOCAB * (32 + 5 * 6)


def test_a_run_has_them_on_one_stage_and_one_device() -> None:
    raw = {"data": {"paths": ["."]}, "cluster": {"num_workers": 2, "pipeline_stages": 2}}
    config = Config.model_validate(raw)
    with pytest.raises(ConfigError, match=r"must be 1 with gemma4_text, whose layers share keys and values"):
        check_limits(library("keys shared"), config)
    with pytest.raises(
        ConfigError, match=r"whose layers share embeddings of the tokens \(hidden_size_per_layer_input=6"
    ):
        check_limits(library("keys own"), config)
    check_limits(library("unified"), config)
    check_supported(library("unified"), num_stages=2)
    with pytest.raises(ConfigError, match="whose layers with heads of several sizes are not split"):
        check_tensor_parallel(library("unified"), 2)


def test_several_activations_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="gemma3n_text does not run, its layers have several streams"):
        check_family("gemma3n_text")


@pytest.mark.parametrize("family", ["gemma4_text", "gemma4_unified_text"])
def test_the_library_s_own_sizes_pass_the_check(family: str) -> None:
    """Scores of 256 and 512 products, not scaled, lie far apart: fp32 alone would not decide."""
    check_family(family)
