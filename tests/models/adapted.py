"""Models with adapters, what PEFT alone makes of the same batch, and what ranks make of it in shards."""

import copy
from typing import Any

import peft
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from rayfcp.config.adapting import LoraConfig
from rayfcp.models.build import random_model
from rayfcp.models.causal_lm import CausalLM
from tests.execute.cases import SEED, VOCAB, Case, CaseTokens
from tests.models.families import DTYPE, Result, disturb, exact
from tests.models.folders import FOLDERS, SHAPE

LORAS = {
    "lora": LoraConfig(rank=4, alpha=8),
    "dora": LoraConfig(rank=3, dora=True),
    "some layers": LoraConfig(rank=2, alpha=3, targets=("mlp.down_proj", "o_proj"), rslora=True),
}
TARGETS = {"lora": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")}
TARGETS["dora"], TARGETS["some layers"] = TARGETS["lora"], ("mlp.down_proj", "o_proj")


def library(family: str = "qwen3, tied") -> PreTrainedConfig:
    name, keys = FOLDERS[family]
    return AutoConfig.for_model(name, **{**SHAPE, "vocab_size": VOCAB, **keys})


def adapted(lora: LoraConfig, config: PreTrainedConfig | None = None, **keys: Any) -> CausalLM:
    """A whole model in which no adapter is 0; the same each time."""
    model = random_model(copy.deepcopy(config or library()), dtype=DTYPE, seed=SEED, lora=lora, **keys)
    disturb(model)
    return model


def in_peft(which: str, config: PreTrainedConfig, values: CausalLM) -> Any:
    """The model that PEFT makes, with the values of ours."""
    lora = LORAS[which]
    base = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa")
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha or lora.rank,
        target_modules=list(TARGETS[which]),
        use_dora=lora.dora,
        use_rslora=lora.rslora,
        task_type="CAUSAL_LM",
    )
    model: Any = peft.get_peft_model(base, settings).double().train()
    state = {f"base_model.model.{name.removeprefix('model.')}": each for name, each in values.named_parameters()}
    found = model.load_state_dict(state, strict=False)
    assert not found.unexpected_keys and set(found.missing_keys) <= {"base_model.model.lm_head.weight"}
    return model


def by_peft(which: str, config: PreTrainedConfig, case: Case) -> Result:
    """Loss, logits and gradients of a batch, one sequence at a time."""
    model = in_peft(which, config, adapted(LORAS[which], config))
    total, logits = 0.0, []
    with exact():
        for row in CaseTokens(case).rows:
            ids = torch.from_numpy(row)[None]
            logits.append(model(input_ids=ids).logits[0])
            loss = F.cross_entropy(logits[-1][:-1], ids[0, 1:], reduction="sum") / case.num_targets
            if len(row) > 1:
                loss.backward()
                total += float(loss.detach())
    gradients = {
        f"model.{name.removeprefix('base_model.model.')}": each.grad
        for name, each in model.named_parameters()
        if each.requires_grad
    }
    return Result(loss=total, gradients=gradients, logits=torch.cat(logits).detach())
