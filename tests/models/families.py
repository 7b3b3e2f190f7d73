"""Packed batches on several ranks by models of several families, and what the library makes of the same batch."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from rayfcp.execute.interpreter import Interpreter
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.parallel.transport import Fabric
from rayfcp.models.build import random_model
from rayfcp.models.causal_lm import CausalLM
from rayfcp.models.layers import kinds_of_layers
from rayfcp.program import Load, RankProgram, lower
from rayfcp.values.layers import count_kinds
from tests.execute.cases import SEED, Case, CaseTokens, Gradients
from tests.execute.dense import run_ranks
from tests.execute.threads import InProcessTransport

DTYPE = "float64"
BOUND = 1e-10
"""Relative error of fp64."""
IN_FP32 = ("gemma", "cohere", "llama4")
FP32_BOUND = 1e-6
"""Tolerance where a family computes its norms or routers in fp32, whatever its dtype."""
EAGER = ("gemma2", "gpt_oss")
"""Families with caps or sinks, which the library's sdpa lacks."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Reference values of a batch: mean loss, gradients of it by parameter, and logits of each token, `[tokens,
    vocab]`, the sequences one after the other."""

    loss: float
    gradients: Gradients
    logits: Tensor


def disturbed(config: PreTrainedConfig) -> CausalLM:
    """A whole model in which no norm, bias or gate has a value that hides a difference; the same each time."""
    model = random_model(copy.deepcopy(config), dtype=DTYPE, seed=SEED)
    disturb(model)
    return model


@torch.no_grad()
def disturb(model: nn.Module) -> None:
    """Add noise to all parameters of a whole model."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.add_(noise * (parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.1))


def by_library(config: PreTrainedConfig, case: Case) -> Result:
    """Each sequence alone, by the library's own masks and attention: some families mix those of a row."""
    keywords = {
        "attn_implementation": "eager" if config.model_type in EAGER else "sdpa",
        "experts_implementation": "eager",
    }
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), **keywords).double().train()
    model.load_state_dict(disturbed(config).model.state_dict())
    rows = [torch.from_numpy(row) for row in CaseTokens(case).rows]
    logits = torch.cat([model(input_ids=row[None], use_cache=False).logits[0] for row in rows])
    targets = torch.cat([F.pad(row[1:], (0, 1), value=-100) for row in rows])
    loss = F.cross_entropy(logits, targets, reduction="sum") / case.num_targets
    loss.backward()
    gradients = {f"model.{name}": each.grad for name, each in model.named_parameters()}
    return Result(loss=float(loss.detach()), gradients=gradients, logits=logits.detach())


def in_process(config: PreTrainedConfig, case: Case) -> Result:
    """All ranks are threads, and hold whole models."""
    first = disturbed(config)
    models = [copy.deepcopy(first) for _ in range(case.num_ranks)]
    kinds = count_kinds(kinds_of_layers(config))
    sequences = [replace(each, layer_kinds=kinds) for each in case.sequences]
    programs = lower(case.plan(), sequences, reduce_every=case.reduce_every)
    fabric, tokens = Fabric(case.num_ranks), CaseTokens(case)
    losses = [0.0] * case.num_ranks
    logits = empty_logits(config, case)

    def work(rank: int) -> None:
        transport, kernel = InProcessTransport(fabric, rank), pick_kernel("cpu")
        interpreter = Interpreter(transport=transport, kernel=kernel, model=models[rank])
        with recorded_hidden(models[rank]) as hidden:
            losses[rank] = interpreter.run(programs[rank], tokens, loss_scale=1.0 / case.num_targets).loss_sum
        put_logits(logits, first.curve(head_of(first)(torch.cat(hidden))), program=programs[rank], case=case)

    run_ranks(work, num_ranks=case.num_ranks, fabric=fabric)
    gradients: Gradients = {}
    for model in models:
        for name, parameter in model.named_parameters():
            gradients[name] = gradients.get(name, torch.zeros(())) + parameter.grad
    return Result(loss=sum(losses) / case.num_targets, gradients=gradients, logits=logits)


@contextmanager
def recorded_hidden(model: CausalLM) -> Iterator[list[Tensor]]:
    """Inputs of the head in forward passes, in order, `[tokens, hidden]`."""
    hidden: list[Tensor] = []

    def record(_module: nn.Module, _inputs: Any, output: Any) -> None:
        hidden.append(output.last_hidden_state.detach()[0].clone())

    handle = model.decoder.register_forward_hook(record)
    yield hidden
    handle.remove()


def head_of(model: CausalLM) -> nn.Module:
    """Output head of a full model, without gradients."""
    return copy.deepcopy(model.model.get_output_embeddings()).requires_grad_(False)


def empty_logits(config: PreTrainedConfig, case: Case) -> Tensor:
    return torch.full((sum(case.lengths), config.vocab_size), torch.nan, dtype=torch.float64)


def put_logits(logits: Tensor, hidden: Tensor, *, program: RankProgram, case: Case) -> None:
    """Put what a rank saw, microbatch by microbatch, where its tokens are in the row of all sequences."""
    starts = [sum(case.lengths[:at]) for at in range(len(case.lengths))]
    at = 0
    for load in program.instructions:
        if isinstance(load, Load):
            for piece in load.pieces:
                size = piece.stop - piece.start
                logits[starts[piece.sequence] + piece.start :][:size] = hidden[at : at + size]
                at += size
            at += not load.pieces  # the padding token of a rank that has none
    assert at == len(hidden)


def assert_same(found: Result, want: Result, *, config: PreTrainedConfig, what: Sequence[object] = ()) -> None:
    """Loss, logits and gradients, relative to their norms."""
    in_fp32 = config.model_type.startswith(IN_FP32) or getattr(config, "n_routed_experts", None)
    bound = FP32_BOUND if in_fp32 else BOUND
    assert abs(found.loss - want.loss) <= bound * abs(want.loss), (*what, found.loss, want.loss)
    assert float((found.logits - want.logits).norm() / want.logits.norm()) <= bound, (*what, "logits")
    assert found.gradients.keys() == want.gradients.keys()
    for name, gradient in found.gradients.items():
        error = float((gradient - want.gradients[name]).norm() / want.gradients[name].norm())
        assert error <= bound, (*what, name, error)
