"""Packed batches on several ranks by models of several families, and what the library makes of the same batch."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from rayfcp.execute.interpreter import Interpreter
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.parallel.transport import Fabric
from rayfcp.models.build import DTYPES, random_model
from rayfcp.models.causal_lm import CausalLM
from rayfcp.models.layers import kinds_of_layers
from rayfcp.program import Load, RankProgram, lower
from rayfcp.values import SequenceSpec
from rayfcp.values.layers import count_kinds
from tests.execute.cases import SEED, Case, CaseTokens, Gradients
from tests.execute.dense import run_ranks
from tests.execute.threads import InProcessTransport

DTYPE = "float64"
BOUND = 1e-10
"""Relative error of fp64."""
EAGER = ("gemma2", "gpt_oss", "mamba2")
"""Families with caps or sinks, which the library's sdpa lacks, and without attention."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Reference values of a batch: mean loss, gradients of it by parameter, and logits of each token, `[tokens,
    vocab]`, the sequences one after the other."""

    loss: float
    gradients: Gradients
    logits: Tensor


@contextmanager
def exact(dtype: str = DTYPE) -> Iterator[None]:
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


def with_kinds(sequences: Sequence[SequenceSpec], config: PreTrainedConfig) -> list[SequenceSpec]:
    """Sequences that pass the model's layers."""
    kinds = count_kinds(kinds_of_layers(config))
    return [replace(each, layer_kinds=kinds) for each in sequences]


def disturbed(config: PreTrainedConfig, *, dtype: str = DTYPE) -> CausalLM:
    """A whole model in which no norm, bias or gate has a value that hides a difference; the same each time."""
    model = random_model(copy.deepcopy(config), dtype=dtype, seed=SEED)
    disturb(model)
    return model


@torch.no_grad()
def disturb(model: nn.Module) -> None:
    """Add noise to all parameters of a whole model."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.add_(noise * (parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.1))


def by_library(config: PreTrainedConfig, case: Case, *, dtype: str = DTYPE) -> Result:
    """Each sequence alone, by the library's own masks and attention: some families mix those of a row."""
    keywords = {
        "attn_implementation": "eager" if config.model_type in EAGER else "sdpa",
        "experts_implementation": "eager",
    }
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), **keywords).to(DTYPES[dtype]).train()
    model.load_state_dict(disturbed(config, dtype=dtype).model.state_dict())
    for module in model.modules():
        if hasattr(module, "decay_factors"):  # tables of factors have the precision in which they were made
            module.query_decay, module.key_decay, module.diagonal_decay = module.decay_factors(module.slope_rate)
    total, logits = 0.0, []
    with exact(dtype):
        for row in CaseTokens(case).rows:
            ids = torch.from_numpy(row)[None]
            logits.append(model(input_ids=ids, use_cache=False).logits[0])
            loss = F.cross_entropy(logits[-1][:-1], ids[0, 1:], reduction="sum") / case.num_targets
            loss.backward()
            total += float(loss.detach())
    return Result(loss=total, gradients=gradients_of(model, "model."), logits=torch.cat(logits).detach())


def gradients_of(model: nn.Module, prefix: str = "") -> Gradients:
    """By name; 0 for parameters that the loss does not reach."""
    zero = torch.zeros(())
    return {f"{prefix}{name}": zero if each.grad is None else each.grad for name, each in model.named_parameters()}


def in_process(config: PreTrainedConfig, case: Case, *, dtype: str = DTYPE) -> Result:
    """All ranks are threads, and hold whole models."""
    first = disturbed(config, dtype=dtype)
    models = [copy.deepcopy(first) for _ in range(case.num_ranks)]
    programs = lower(case.plan(), with_kinds(case.sequences, config), reduce_every=case.reduce_every)
    fabric, tokens = Fabric(case.num_ranks), CaseTokens(case)
    losses = [0.0] * case.num_ranks
    logits = empty_logits(config, case)

    def work(rank: int) -> None:
        transport, kernel = InProcessTransport(fabric, rank), pick_kernel("cpu")
        interpreter = Interpreter(transport=transport, kernel=kernel, model=models[rank])
        with recorded_hidden(models[rank]) as hidden:
            losses[rank] = interpreter.run(programs[rank], tokens, loss_scale=1.0 / case.num_targets).loss_sum
        put_logits(logits, first.curve(head_of(first)(torch.cat(hidden))), program=programs[rank], case=case)

    with exact(dtype):
        run_ranks(work, num_ranks=case.num_ranks, fabric=fabric)
    by_rank = [gradients_of(model) for model in models]
    gradients = {name: reduce(torch.add, [each[name] for each in by_rank]) for name in by_rank[0]}
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


def assert_same(found: Result, want: Result, *, what: object = ()) -> None:
    """Loss, logits and gradients, relative to their norms."""
    assert abs(found.loss - want.loss) <= BOUND * abs(want.loss), (what, found.loss, want.loss)
    assert float((found.logits - want.logits).norm() / want.logits.norm()) <= BOUND, (what, "logits")
    assert found.gradients.keys() == want.gradients.keys()
    for name, gradient in found.gradients.items():
        error, norm = float((gradient - want.gradients[name]).norm()), float(want.gradients[name].norm())
        assert error <= BOUND * norm, (what, name, error / (norm or 1.0))
