"""Tiny models of families with recurrent layers, and packed batches of them on several ranks and stages."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from rayfcp.execute.interpreter import Interpreter
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.parallel.transport import Fabric
from rayfcp.models.build import DTYPES, random_model
from rayfcp.models.causal_lm import CausalLM
from rayfcp.models.layers import kinds_of_layers
from rayfcp.models.stages import stages_of
from rayfcp.program import RankProgram, lower
from rayfcp.values import SequenceSpec
from rayfcp.values.layers import count_kinds
from tests.execute.cases import SEED, VOCAB, Case, CaseTokens, Gradients
from tests.execute.dense import run_ranks
from tests.execute.staged import StagedCase
from tests.execute.threads import InProcessTransport
from tests.models.families import disturb
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


def library(family: str, **sizes: Any) -> PreTrainedConfig:
    """A configuration of its own, with other sizes: the library's models keep theirs."""
    config = AutoConfig.for_model(family, **copy.deepcopy({**SMALL, **FAMILIES[family], **sizes}))
    assert isinstance(config, PreTrainedConfig)
    return config


def with_kinds(sequences: Sequence[SequenceSpec], config: PreTrainedConfig) -> list[SequenceSpec]:
    """Sequences that pass the model's layers."""
    kinds = count_kinds(kinds_of_layers(config))
    return [replace(each, layer_kinds=kinds) for each in sequences]


@contextmanager
def exact(dtype: str) -> Iterator[None]:
    """In fp64 let casts to fp32 give fp64: families compute gates, norms and routers in fp32 whatever comes in, which
    hides differences that fp64 shows."""
    if dtype != "float64":
        yield
        return
    to, softmax = torch.Tensor.to, F.softmax

    def wide(value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value

    def cast(tensor: Tensor, *args: Any, **keywords: Any) -> Tensor:
        return to(tensor, *map(wide, args), **{name: wide(value) for name, value in keywords.items()})

    def normalized(*args: Any, **keywords: Any) -> Tensor:
        return softmax(*args, **{name: wide(value) for name, value in keywords.items()})

    plain = torch.Tensor.float, torch.Tensor.type
    torch.Tensor.to, torch.Tensor.type, torch.Tensor.float = cast, cast, torch.Tensor.double  # type: ignore[method-assign, assignment]
    F.softmax = normalized
    try:
        yield
    finally:
        torch.Tensor.to, F.softmax = to, softmax  # type: ignore[method-assign]
        torch.Tensor.float, torch.Tensor.type = plain  # type: ignore[method-assign]


def disturbed(config: PreTrainedConfig, *, dtype: str) -> CausalLM:
    """A whole model in which nothing has a value that hides a difference."""
    model = random_model(copy.deepcopy(config), dtype=dtype, seed=SEED)
    disturb(model)
    return model


def by_library(config: PreTrainedConfig, case: Case, *, dtype: str) -> tuple[float, Gradients]:
    """Mean loss and its gradients by the library alone, sequence by sequence."""
    keywords = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), **keywords).to(DTYPES[dtype]).train()
    model.load_state_dict(disturbed(config, dtype=dtype).model.state_dict())
    for module in model.modules():
        if hasattr(module, "decay_factors"):  # tables of factors have the precision in which they were made
            module.query_decay, module.key_decay, module.diagonal_decay = module.decay_factors(module.slope_rate)
    total = 0.0
    with exact(dtype):
        for row in CaseTokens(case).rows:
            ids = torch.from_numpy(row)[None]
            logits = model(input_ids=ids, use_cache=False).logits[0]
            loss = F.cross_entropy(logits[:-1], ids[0, 1:], reduction="sum") / case.num_targets
            loss.backward()
            total += float(loss.detach())
    zero = torch.zeros(())
    return total, {f"model.{name}": zero if p.grad is None else p.grad for name, p in model.named_parameters()}


def in_process(config: PreTrainedConfig, case: Case, *, dtype: str) -> tuple[float, Gradients]:
    """Mean loss and summed gradients of all ranks, each a thread with a whole model."""
    first = disturbed(config, dtype=dtype)
    models = [copy.deepcopy(first) for _ in range(case.num_ranks)]
    programs = lower(case.plan(), with_kinds(case.sequences, config), reduce_every=case.reduce_every)
    fabric, tokens = Fabric(case.num_ranks), CaseTokens(case)
    losses = [0.0] * case.num_ranks

    def work(rank: int) -> None:
        transport = InProcessTransport(fabric, rank)
        interpreter = Interpreter(transport=transport, kernel=pick_kernel("cpu"), model=models[rank])
        losses[rank] = interpreter.run(programs[rank], tokens, loss_scale=1.0 / case.num_targets).loss_sum

    with exact(dtype):
        run_ranks(work, num_ranks=case.num_ranks, fabric=fabric)
    gradients: Gradients = {}
    for model in models:
        for name, parameter in model.named_parameters():
            own = torch.zeros(()) if parameter.grad is None else parameter.grad
            gradients[name] = gradients.get(name, torch.zeros(())) + own
    return sum(losses) / case.num_targets, gradients


def assert_near(found: tuple[float, Gradients], want: tuple[float, Gradients], *, bound: float, what: object) -> None:
    """Loss and the gradient of each parameter, relative to their norms."""
    assert abs(found[0] - want[0]) <= bound * abs(want[0]), (what, found[0], want[0])
    assert found[1].keys() == want[1].keys()
    for name, gradient in found[1].items():
        error, norm = float((gradient - want[1][name]).norm()), float(want[1][name].norm())
        assert error <= bound * norm, (what, name, error / (norm or 1.0))


@dataclass(frozen=True, kw_only=True)
class StagedFamily(StagedCase):
    """A case of `tests.execute.staged` whose model is of a family; `sizes`: of its configuration, beside small ones."""

    family: str
    sizes: tuple[tuple[str, Any], ...] = ()

    @property
    def library(self) -> PreTrainedConfig:
        return library(self.family, **dict(self.sizes))

    @property
    def hidden_size(self) -> int:
        return int(self.library.hidden_size)

    @cached_property
    def programs(self) -> tuple[RankProgram, ...]:
        kinds = kinds_of_layers(self.library)
        of_stage = [sorted(set(kinds[stage.start : stage.stop])) for stage in stages_of(self.layers_of_stage)]
        return lower(self.plan, self.sequences, reduce_every=self.reduce_every, kinds_of_stage=of_stage)


def staged(family: str, case: StagedCase, **sizes: Any) -> StagedFamily:
    """The case with a model of a family."""
    held = {each.name: getattr(case, each.name) for each in fields(case)}
    held["sequences"] = tuple(with_kinds(case.sequences, library(family, **sizes)))
    return StagedFamily(family=family, sizes=tuple(sizes.items()), **held)
