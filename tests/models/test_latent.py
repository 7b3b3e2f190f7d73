"""Families of multi-head latent attention, whose latents travel: loss, logits and gradients are the library's own."""

from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedConfig

from rayfcp.values import Primitive
from tests.execute.cases import VOCAB, Case
from tests.execute.test_block_equality import BlockCase, blocks
from tests.models.families import assert_same, by_library, in_process
from tests.models.folders import SHAPE

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
    "deepseek_v3, yarn": (
        "deepseek_v3",
        {"first_k_dense_replace": 3, "q_lora_rank": None, "rope_parameters": YARN, "rope_interleave": False, **EXPERTS},
    ),
    "deepseek_v2": ("deepseek_v2", {"first_k_dense_replace": 1, "q_lora_rank": None, **EXPERTS}),
    "glm4_moe_lite": ("glm4_moe_lite", {"q_lora_rank": 14, **EXPERTS}),
    "youtu": ("youtu", {"q_lora_rank": 14}),
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
def test_packed_batches_as_the_library_computes_them(what: str) -> None:
    config = library(what)
    assert_same(in_process(config, RING), by_library(config, RING), config=config, what=(what,))


@pytest.mark.parametrize("how", CASES)
def test_every_way_of_running_a_batch(how: str) -> None:
    config = library("deepseek_v3")
    assert_same(in_process(config, CASES[how]), by_library(config, CASES[how]), config=config, what=(how,))
