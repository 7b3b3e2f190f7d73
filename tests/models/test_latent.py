"""Families of multi-head latent attention, whose latents travel: loss, logits and gradients are the library's own."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from rayfcp.config import ConfigError
from rayfcp.config.adapting import LoraConfig
from rayfcp.models.attention_hook import KEYWORD, Carried
from rayfcp.models.build import random_model
from rayfcp.models.describe import check_runs
from rayfcp.models.library import narrowed
from rayfcp.models.selfcheck import check_supported
from rayfcp.models.tensor_parallel import check_tensor_parallel
from tests.execute.cases import SEED, VOCAB, use_library_attention
from tests.models.folders import SHAPE
from tests.models.helpers import context_of, loss_sum, rows_of

SIZES = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "vocab_size": VOCAB,
}
EXPERTS = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
    "original_max_position_embeddings": 16,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("deepseek_v3", {"first_k_dense_replace": 1, "q_lora_rank": 14, **EXPERTS}),
    "deepseek_v2": ("deepseek_v2", {"first_k_dense_replace": 1, "q_lora_rank": None, **EXPERTS}),
    "glm4_moe_lite": ("glm4_moe_lite", {"q_lora_rank": 14, **EXPERTS}),
    "youtu, yarn": ("youtu", {"q_lora_rank": None, "rope_parameters": YARN, "rope_interleave": False}),
}


def library(what: str) -> PreTrainedConfig:
    family, keys = MODELS[what]
    return AutoConfig.for_model(family, **{**SHAPE, **SIZES, **keys})


@pytest.mark.parametrize("what", MODELS)
def test_the_check_before_a_run_passes(what: str) -> None:
    check_supported(library(what), num_stages=2)


@pytest.mark.parametrize(
    ("dora", "quantize", "bound"), [(False, None, 1e-10), (True, None, 1e-10), (True, "nf4", 1e-3)]
)
def test_adapters_beside_the_up_projection(dora: bool, quantize: Any, bound: float) -> None:
    """The weights that travelling latents meet are those of the wrapped layer. Packed ones are in fp32."""
    lora = LoraConfig(rank=3, alpha=8, targets=("kv_b_proj", "o_proj"), dora=dora, quantize=quantize)
    config = AutoConfig.for_model("youtu", **{**SHAPE, **SIZES, "v_head_dim": 16, "kv_lora_rank": 64})
    model = random_model(config, dtype="float32" if quantize else "float64", seed=SEED, lora=lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    rows = rows_of((13, 22))
    own = loss_sum(model, rows, context=context_of((13, 22)))
    own.backward()
    found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    use_library_attention(model)
    logits = [model.model(input_ids=row[None], use_cache=False).logits[0] for row in rows]
    pairs = zip(logits, rows, strict=True)
    want = torch.stack([torch.nn.functional.cross_entropy(a[:-1], b[1:], reduction="sum") for a, b in pairs]).sum()
    want.backward()
    assert abs(float(own / want) - 1) <= bound
    assert any("kv_b_proj" in name for name in found)
    for name, gradient in found.items():
        due = model.get_parameter(name).grad
        assert due is not None and float((gradient - due).norm() / due.norm()) <= bound, name


def test_under_autocast() -> None:
    """The weight meets latents in their dtype."""
    model, rows = random_model(library("youtu, yarn"), dtype="float32", seed=SEED), rows_of((13, 22))
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    given = {"position_ids": positions[None], "use_cache": False, KEYWORD: Carried(context_of((13, 22)))}
    whole = model.model(input_ids=torch.cat(rows)[None], **given).logits.detach()
    with torch.autocast("cpu", torch.bfloat16):
        half = model.model(input_ids=torch.cat(rows)[None], **given).logits
    half.sum().backward()
    assert 0 < float((half.detach() - whole).norm() / whole.norm()) < 0.05
    gradients = [each.grad for name, each in model.named_parameters() if "kv_b_proj" in name]
    assert all(each is not None and each.dtype is torch.float32 and each.any() for each in gradients)


def test_what_does_not_run_is_refused_by_its_reason() -> None:
    with pytest.raises(ConfigError, match="deepseek_v32 has an indexer, which takes the top k of all keys"):
        check_runs(AutoConfig.for_model("deepseek_v32"))
    for family in ("glm4_moe_lite", "deepseek_v3"):
        with pytest.raises(ConfigError, match=f"tensor_parallel is 2, must be 1 with {family}"):
            check_tensor_parallel(library(family), 2)


def test_narrowed_models_have_sizes_that_differ() -> None:
    tiny = narrowed(library("deepseek_v3"), 2)
    sizes = {tiny.kv_lora_rank, tiny.qk_nope_head_dim, tiny.v_head_dim, tiny.q_lora_rank, tiny.qk_rope_head_dim}
    assert len(sizes) == 5 and (tiny.first_k_dense_replace, tiny.num_hidden_layers) == (1, 2)
