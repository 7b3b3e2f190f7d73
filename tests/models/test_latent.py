"""Families of multi-head latent attention, whose latents travel: loss, logits and gradients are the library's own."""

from dataclasses import dataclass, replace
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
from rayfcp.values import Primitive
from tests.execute.cases import SEED, VOCAB, Case, use_library_attention
from tests.execute.cases import assert_same as assert_equal
from tests.execute.staged import StagedCase, expected, run_in_process, typical_case
from tests.execute.test_block_equality import BlockCase, blocks
from tests.models.families import assert_same, by_library, in_process
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
RING = Case(
    num_ranks=3,
    lengths=(61, 17, 1, 25, 7),
    microbatches=((((2, 0, 1), (0, 2)),), (((1, 2), (1, 3)), ((0,), (4,)))),
    recomputed=2,
)
CASES = {
    "alone": Case(num_ranks=1, lengths=(33, 1, 20), microbatches=((((0,), (0, 1, 2)),),)),
    "ring, recomputed": RING,
    "ring, attention kept": replace(RING, keeps=True),
    "ring of five": Case(num_ranks=5, lengths=(3, 71), microbatches=((((0, 1, 2, 3, 4), (0, 1)),),)),
    "ulysses": Case(
        num_ranks=4,
        lengths=(41, 7),
        microbatches=((((0, 1, 2, 3), (0, 1)),),),
        primitive=Primitive.ULYSSES,
        recomputed=1,
        keeps=True,
    ),
    "blocks": BlockCase(
        num_ranks=4, lengths=(60, 33), microbatches=(), options=blocks(block_tokens=8, num_buffers=2), recomputed=1
    ),
}


def library(what: str) -> PreTrainedConfig:
    family, keys = MODELS[what]
    return AutoConfig.for_model(family, **{**SHAPE, **SIZES, **keys})


@pytest.mark.parametrize("what", MODELS)
def test_the_check_before_a_run_passes(what: str) -> None:
    check_supported(library(what), num_stages=2)


@pytest.mark.parametrize("how", CASES)
def test_every_way_of_running_a_batch(how: str) -> None:
    config = library("youtu, yarn")
    assert_same(in_process(config, CASES[how]), by_library(config, CASES[how]), what=(how,))


@dataclass(frozen=True, kw_only=True)
class Stages(StagedCase):
    """With a model whose latents travel."""

    @property
    def library(self) -> PreTrainedConfig:
        return library("youtu, yarn")


@pytest.mark.parametrize(("num_stages", "seed"), [(1, 0), (2, 2), (2, 1)])
def test_slices_keep_latents(num_stages: int, seed: int) -> None:
    """Slices on rings and on groups that share out heads; the second keeps the attention of recomputed layers."""
    sizes = {1: (3,), 2: (1, 2)}[num_stages]
    case = typical_case(seed, num_ranks=2, layers_of_stage=sizes, is_tied=False)
    case = Stages(plan=case.plan, sequences=case.sequences, layers_of_stage=sizes, is_tied=False)
    loss, gradients, _ = run_in_process(case, "float64")
    assert_equal(loss, gradients, want=expected(case, "float64"), dtype="float64")


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
