"""Every family that trains: loss, logits and gradients of packed batches are the library's own, on any ranks."""

import pytest
from transformers import AutoConfig, PreTrainedConfig

from tests.execute.cases import VOCAB, Case
from tests.models.families import assert_same, by_library, in_process
from tests.models.folders import FOLDERS, SHAPE
from tests.models.test_latent import EXPERTS, MODELS, SIZES
from tests.models.ways import WAYS, assert_stages_same

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SLIDING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 9}
CHUNKED = {"layer_types": ["chunked_attention", "full_attention", "chunked_attention"], "attention_chunk_size": 7}
KEYS = {
    **FOLDERS,
    "gemma2, capped": ("gemma2", SLIDING | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}),
    "gpt_oss, sinks": ("gpt_oss", SLIDING | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "cohere2, scaled": ("cohere2", SLIDING | {"logit_scale": 0.25}),
    "granite, divided": ("granite", {"logits_scaling": 4.0}),
    "llama4, chunks": (
        "llama4_text",
        CHUNKED | {"num_local_experts": 3, "intermediate_size_mlp": 40, "attn_temperature_tuning": False},
    ),
    "glm4_moe": ("glm4_moe", {"first_k_dense_replace": 1, **EXPERTS}),
    "llama3": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    **{what: (family, SIZES | keys) for what, (family, keys) in MODELS.items()},
}
CASES = (
    Case(num_ranks=1, lengths=(33, 1, 20), microbatches=((((0,), (0, 1, 2)),),)),
    Case(
        num_ranks=2,
        lengths=(41, 1, 17, 2),
        microbatches=((((0, 1), (0,)),), (((1,), (1, 2)), ((0,), (3,)))),
        recomputed=2,
    ),
    Case(
        num_ranks=3,
        lengths=(61, 17, 1, 25, 7),
        microbatches=((((2, 0, 1), (0, 2)),), (((1, 2), (1, 3)), ((0,), (4,)))),
        reduce_every="microbatch",
    ),
    Case(num_ranks=3, lengths=(29, 5), microbatches=((((0, 2), (0, 1)),),), recomputed=1),
)
"""One, two and three ranks; the last case leaves one with nothing but padding."""


def library(what: str) -> PreTrainedConfig:
    family, keys = KEYS[what]
    return AutoConfig.for_model(family, **{**SHAPE, "vocab_size": VOCAB, **keys})


@pytest.mark.parametrize("what", KEYS)
def test_packed_batches_as_the_library_computes_them(what: str) -> None:
    config = library(what)
    for case in CASES:
        assert_same(in_process(config, case), by_library(config, case), what=(what, case.num_ranks))


OTHERS = {
    "gemma2, capped": ("ring, attention kept", "ulysses", "blocks"),
    "gpt_oss, sinks": ("ring, recomputed", "ring, attention kept", "ulysses", "rings of runs"),
    "deepseek_v3": ("ring of five", "ulysses", "blocks"),
    "glm4_moe": ("ring, recomputed", "ring of five", "rings of runs"),
}


@pytest.mark.parametrize(("what", "how"), [(what, how) for what, ways in OTHERS.items() for how in ways])
def test_other_ways_of_running_a_batch(what: str, how: str) -> None:
    config = library(what)
    assert_same(in_process(config, WAYS[how]), by_library(config, WAYS[how]), what=(what, how))


@pytest.mark.parametrize(
    ("what", "seed", "layers_of_stage"),
    [
        ("gemma2, capped", 1, (1, 2)),
        ("gpt_oss, sinks", 1, (1, 2)),
        ("deepseek_v3", 2, (2, 1)),
        ("glm4_moe", 2, (1, 2)),
        ("youtu, yarn", 0, (3,)),
    ],
)
def test_slices_on_stages(what: str, seed: int, layers_of_stage: tuple[int, ...]) -> None:
    """On rings and on groups that share out heads (1); those keep the attention of recomputed layers."""
    assert_stages_same(library(what), seed, layers_of_stage=layers_of_stage)
