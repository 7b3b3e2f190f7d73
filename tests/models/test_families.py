"""Every family that trains: loss, logits and gradients of packed batches are the library's own, on any ranks."""

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from rayfcp.models.attention_hook import IMPLEMENTATION, KEYWORD, Carried, pass_contexts
from rayfcp.models.layers import kinds_of_layers
from rayfcp.models.library import decoder_layers, decoder_of, make_library_model
from rayfcp.values.layers import count_kinds
from tests.execute.cases import VOCAB, Case, CaseTokens
from tests.models.families import assert_same, by_library, disturbed, in_process
from tests.models.folders import FOLDERS, SHAPE
from tests.models.helpers import context_of
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
SCALED = {"no_rope_layers": [1, 0, 1], "floor_scale": 4, "attn_scale": 0.5}
KEYS = {
    **FOLDERS,
    "gemma2, capped": ("gemma2", SLIDING | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}),
    "gpt_oss, sinks": ("gpt_oss", SLIDING | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "cohere2, scaled": ("cohere2", SLIDING | {"logit_scale": 0.25}),
    "granite, divided": ("granite", {"logits_scaling": 4.0}),
    "llama4, chunks, queries scaled by position": (
        "llama4_text",
        CHUNKED | SCALED | {"num_local_experts": 3, "intermediate_size_mlp": 40},
    ),
    "glm4_moe": ("glm4_moe", {"first_k_dense_replace": 1, **EXPERTS}),
    "apertus, whose activation has weights": ("apertus", {}),
    "nemotron, whose layers drop keywords": ("nemotron", {}),
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


@pytest.mark.parametrize("what", ["llama4, chunks, queries scaled by position", "nemotron, whose layers drop keywords"])
def test_a_model_that_the_library_calls(what: str) -> None:
    """As `transformers.Trainer` does: its layers are not ours."""
    config, case = library(what), CASES[0]
    model = make_library_model(library(what), attention=IMPLEMENTATION).double()
    model.load_state_dict(disturbed(config).model.state_dict())
    kinds = kinds_of_layers(config)
    pass_contexts(decoder_layers(decoder_of(model)), kinds=kinds)
    rows = [torch.from_numpy(row) for row in CaseTokens(case).rows]
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    carried = Carried(context_of(case.lengths, layer_kinds=count_kinds(kinds)), positions)
    given = {"position_ids": positions[None], "use_cache": False, KEYWORD: carried}
    found = model(input_ids=torch.cat(rows)[None], **given).logits[0]
    torch.testing.assert_close(found, by_library(config, case).logits, rtol=1e-6, atol=1e-6)  # norms are fp32
