"""Tiny models of families with recurrent layers, and packed batches of them on several ranks and stages."""

import copy
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from tests.execute.cases import VOCAB
from tests.models.folders import SHAPE

SMALL = {**SHAPE, "num_hidden_layers": 4, "vocab_size": VOCAB}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 6}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
GROUPS = {"n_group": 1, "topk_group": 1, "num_local_experts": 4}
TYPES = ["linear_attention", "full_attention"] * 2
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16},
    "olmo_hybrid": {**DELTA, "linear_num_key_heads": 4},
    "kimi_linear": {**LATENT, **EXPERTS, **GROUPS, "layer_types": TYPES, "linear_head_dim": 6, "linear_num_heads": 4},
    "bailing_hybrid": {**LATENT, **EXPERTS, **GROUPS, "layer_types": TYPES},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention", "moe"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 6,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **MAMBA,
        "layer_types": TYPES,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
    },
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64, "mamba_rms_norm": True, "num_hidden_layers": 3},
    "mamba2": {"num_heads": 8, "n_groups": 2, "state_size": 6},
    "minimax": {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": TYPES},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 2},
    "lfm3": {"layer_types": ["conv", "full_attention", "conv", "sliding_attention"], "sliding_window": 9},
}


def library(family: str) -> PreTrainedConfig:
    """A configuration of its own: the library's models keep theirs."""
    config = AutoConfig.for_model(family, **copy.deepcopy({**SMALL, **FAMILIES[family]}))
    assert isinstance(config, PreTrainedConfig)
    return config
