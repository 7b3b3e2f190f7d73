"""Tiny models of several families as the library saves them, in several small files."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from rayfcp.config.architecture import VISION_FAMILIES
from rayfcp.models.library import make_library_model
from tests.models.helpers import VOCAB
from tests.models.vlm import vlm_config

SHAPE = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": VOCAB,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GEMMA4 = {"global_head_dim": 16, "sliding_window": 9, "vocab_size_per_layer_input": 128}
SHARED = GEMMA4 | {
    "num_hidden_layers": 5,
    "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 6,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FOLDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen2, with biases": ("qwen2", {}),
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "gemma": ("gemma", {}),
    "gemma3": ("gemma3_text", {"layer_types": ["full_attention"] * 3}),
    "gemma4, keys shared": ("gemma4_text", SHARED),
    "phi3, fused": ("phi3", {}),
    "gpt_neox, head renamed": ("gpt_neox", {}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "qwen2_moe, shared experts": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 16}),
    "mixtral, experts renamed": ("mixtral", {"num_local_experts": 3, "sliding_window": None}),
}
"""Experts are split and named otherwise in files than in models."""
ALL_FOLDERS = FOLDERS | {family: (family, {}) for family in VISION_FAMILIES}


def saved(
    folder: Path, what: str, *, dtype: torch.dtype = torch.bfloat16
) -> tuple[PreTrainedConfig, dict[str, Tensor]]:
    """The configuration of the model that `folder` holds from now on, and all its parameters."""
    family, keys = ALL_FOLDERS[what]
    config = vlm_config(family) if family in VISION_FAMILIES else AutoConfig.for_model(family, **{**SHAPE, **keys})
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = make_library_model(config, dtype=dtype)
    model.save_pretrained(folder, max_shard_size="20KB")
    return AutoConfig.from_pretrained(folder), {name: each.detach() for name, each in model.named_parameters()}
