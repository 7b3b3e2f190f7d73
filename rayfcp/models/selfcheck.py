"""Does our attention inside a model of this family compute what the library computes? Asked before a run starts.

Families differ in how they take positions, in what they pass on to their attention, and in what they apply
around it. Nothing of that shows in a configuration, so a tiny model of the same family is run both ways.
"""

import copy
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from rayfcp.config import ConfigError
from rayfcp.execute.attention import AttentionContext
from rayfcp.execute.interfaces import IGNORED
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.schedule import make_ready
from rayfcp.execute.transport import Fabric, InProcessTransport
from rayfcp.models.build import random_model
from rayfcp.models.tiny import VOCAB_SIZE, narrowed
from rayfcp.plan import lay_out
from rayfcp.program.attention import lower_attention
from rayfcp.values import Group, MicrobatchPlan, SequenceSpec

TOLERANCE = 1e-4
"""Relative difference of loss and gradient norm that fp32 explains."""

_LENGTHS = (13, 22)
_NUM_LAYERS = 2
_RECOMPUTED_LAYERS = 1


def check_supported(config: PreTrainedConfig) -> None:
    """Compare loss and gradient norm of two packed sequences, by our attention, with the library's own
    attention (sdpa), one sequence at a time, on a tiny model of the same family, in fp32 on the CPU.

    The global random state stays as it is.

    Raises:
        ConfigError: they differ, or the model cannot be run this way.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            ours, theirs = _both_ways(narrowed(config, _NUM_LAYERS))
    except Exception as error:
        # Whatever a family's code raises here it would raise in every worker.
        first = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"model: {config.model_type} cannot be trained, a tiny one fails with {type(error).__name__}: {first}; "
            "choose another model"
        ) from error
    for what, found, want in zip(("loss", "gradient norm"), ours, theirs, strict=True):
        if not math.isclose(found, want, rel_tol=TOLERANCE):
            raise ConfigError(
                f"model: {config.model_type} cannot be trained, {what} of a tiny one is {found:.6g} with packed "
                f"sequences and {want:.6g} in transformers, must agree to {TOLERANCE:g}; choose another model"
            )


Result = tuple[float, float]
"""Loss and gradient norm."""


def _both_ways(config: PreTrainedConfig) -> tuple[Result, Result]:
    # The library keeps the choice of attention in the configuration, which its models share.
    own = copy.deepcopy(config)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, VOCAB_SIZE, (length,), generator=generator) for length in _LENGTHS]
    ours = random_model(own, dtype="float32", seed=0)
    _disturb(ours, generator)
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float().train()
    theirs.load_state_dict(ours.model.state_dict())
    context = _one_rank(_LENGTHS)
    packed = ours(
        torch.cat(rows),
        torch.cat([torch.arange(len(row)) for row in rows]),
        torch.cat([_shifted(row) for row in rows]),
        context,
    )
    if context.traffic.cells != len(ours.layers) * sum(n * (n + 1) // 2 for n in _LENGTHS):
        raise ValueError("some of its layers do not use our attention")
    alone = [
        F.cross_entropy(theirs(input_ids=row[None], use_cache=False).logits[0], _shifted(row), reduction="sum")
        for row in rows
    ]
    return _result(packed, ours), _result(torch.stack(alone).sum(), theirs)


@torch.no_grad()
def _disturb(model: nn.Module, generator: torch.Generator) -> None:
    """Leave no bias, gate or norm at a value that hides a difference."""
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(noise * (parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.1))


def _shifted(row: Tensor) -> Tensor:
    return torch.cat([row[1:], torch.tensor([IGNORED])])


def _one_rank(lengths: Sequence[int]) -> AttentionContext:
    """One rank that holds all sequences."""
    specs = [SequenceSpec(id=at, num_tokens=n, num_targets=n - 1) for at, n in enumerate(lengths)]
    group = Group(ranks=(0,), sequences=tuple(range(len(specs))))
    layout = lay_out(MicrobatchPlan(groups=(group,), group_s=(1.0,), predicted_s=1.0), specs)
    (program,) = lower_attention(layout, masks={spec.id: spec.mask for spec in specs}, num_ranks=1)
    return AttentionContext(
        program=make_ready(program),
        transport=InProcessTransport(Fabric(1), 0),
        kernel=pick_kernel("cpu"),
        recomputed_layers=_RECOMPUTED_LAYERS,
    )


def _result(loss: Tensor, model: nn.Module) -> Result:
    loss.backward()
    squares = [parameter.grad.double().square().sum() for parameter in model.parameters() if parameter.grad is not None]
    return float(loss.detach()), math.sqrt(float(torch.stack(squares).sum()))
