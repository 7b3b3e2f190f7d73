"""Comparison of our attention and stages with the library, on a tiny model of the run's family, before a run starts.

Families differ in how they take positions, in what they pass to their attention, in what they apply around it and
around their layers. None of it shows in a configuration, so a tiny model is run both ways.
"""

import contextlib
import copy
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from rayfcp.config import ConfigError
from rayfcp.cost.fit import PassShape, pass_plan
from rayfcp.cost.stages import split_layers
from rayfcp.data.rows import IGNORED
from rayfcp.execute.attention.function import AttentionContext
from rayfcp.execute.kernels import AttentionKernel, pick_kernel
from rayfcp.execute.losses.base import Loss, Targets
from rayfcp.execute.losses.cross_entropy import CrossEntropy
from rayfcp.execute.losses.reward import RewardModel
from rayfcp.execute.parallel.transport import LoneTransport
from rayfcp.models.attention_hook import IMPLEMENTATION
from rayfcp.models.build import DTYPES, random_model
from rayfcp.models.causal_lm import CausalLM
from rayfcp.models.layers import kinds_of_layers
from rayfcp.models.library import (
    VOCAB_SIZE,
    has_reward_head,
    kept_buffers,
    keywords_of,
    make_library_model,
    narrowed,
    text_of,
    vision_family,
)
from rayfcp.models.stages import stages_of
from rayfcp.program import Forward, lower
from rayfcp.values import LayerKinds
from rayfcp.values.layers import count_kinds

if TYPE_CHECKING:
    from rayfcp.models.vision import ImageExample

TOLERANCE = 1e-4
"""Largest relative difference of loss and gradient norm."""

ROUNDED_TOLERANCES = (0.05, 0.99)
"""Tolerances of loss and gradient norm (a factor of 100) between bf16 and fp32. Over 111 families losses differ by at
most 1.8 %, gradient norms by a factor of 2.4 (2.6 in the library's own attention), but by 6 if all layers are delta
rules, whose random states amplify rounding."""

_OWN_ATTENTION = "its attention is code of its own, which the library's attention interface does not replace"
_LENGTHS = (13, 22)
_NUM_LAYERS = 2
_NUM_STAGES = 3
"""A first, a last and one between."""
_RECOMPUTED_LAYERS = 1


def check_supported(config: PreTrainedConfig, *, num_stages: int = 1, dtype: str = "float32") -> None:
    """Compare loss and gradient norm of packed sequences with our attention to those of the library's own (eager, which
    alone has all variants), one sequence at a time, on a tiny model of the same family in fp32 on the CPU: two
    sequences of text, for a VLM one with an image, and with several stages the text on a model cut into up to three.
    The loss of a reward model is the sum of its rewards.

    Where fp32 differs, fp64 decides: of a family whose scores are large (Gemma 4 does not scale them) fp32 explains
    more. For a run in float64 only that is compared.

    For a run in bfloat16 the tiny model runs once more as FSDP runs it, with parameters in bf16 and buffers in fp32,
    and is compared to itself in fp32 (`ROUNDED_TOLERANCES`). The library's own model would round buffers too, which
    some families do not run with.

    The global random state is not changed.

    Raises:
        ConfigError: They differ, or the model cannot be run this way.
    """
    stages = min(num_stages, _NUM_STAGES)
    remedy = "choose another model" + (" or set cluster.pipeline_stages=1" if stages > 1 else "")
    exact = "float64" if dtype == "float64" else "float32"
    difference = _found(config, num_stages=stages, dtype=exact, remedy=remedy)
    if difference:
        with contextlib.suppress(Exception):  # for families that compute only in fp32
            difference = _difference(config, num_stages=stages, dtype="float64")
    if dtype == "bfloat16" and not difference:
        remedy += " or set model.dtype=float32"
        difference = _found(config, num_stages=stages, dtype=dtype, remedy=remedy)
    if difference:
        raise ConfigError(f"model: {config.model_type} cannot be trained, {difference}; {remedy}")


def _found(config: PreTrainedConfig, *, num_stages: int, dtype: str, remedy: str) -> str:
    """Return `_difference`.

    Raises:
        ConfigError: The family's code raises an error, as it would in every worker.
    """
    try:
        return _difference(config, num_stages=num_stages, dtype=dtype)
    except Exception as error:
        if IMPLEMENTATION in error.args:  # its table of attention classes has none of ours
            raise ConfigError(f"model: {config.model_type} cannot be trained, {_OWN_ATTENTION}; {remedy}") from error
        first, how = (str(error).splitlines() or [""])[0], "" if dtype == "float32" else f" in {dtype}"
        raise ConfigError(
            f"model: {config.model_type} cannot be trained{how}, a tiny one fails with {type(error).__name__}: "
            f"{first}; {remedy}"
        ) from error


Result = tuple[float, float]
"""Loss and gradient norm."""


def _difference(config: PreTrainedConfig, *, num_stages: int, dtype: str) -> str:
    """Return how our results differ from the library's, or in bf16 from our own in fp32; empty if they agree."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # a family that draws numbers in training is refused every time, or never
        tiny = narrowed(config, max(_NUM_LAYERS, num_stages))
        found, want = _both_ways(tiny, num_stages=num_stages, dtype=dtype)
    tolerances, other = (TOLERANCE, TOLERANCE), "in transformers"
    if dtype == "bfloat16":
        tolerances, other = ROUNDED_TOLERANCES, "in float32"
    for how, ours in found.items():
        for what, own, theirs, most in zip(("loss", "gradient norm"), ours, want, tolerances, strict=True):
            if not math.isclose(own, theirs, rel_tol=most):
                return (
                    f"{what} of a tiny one is {own:.6g} with {how} in {dtype} and {theirs:.6g} {other}, must agree to "
                    f"{most:g}"
                )
    return ""


def _both_ways(config: PreTrainedConfig, *, num_stages: int, dtype: str) -> tuple[dict[str, Result], Result]:
    """Return our results by the way they were computed, and the results to agree with: the library's, or in bf16 our
    own in fp32."""
    # The library stores the choice of attention in the configuration, which its models share.
    own = copy.deepcopy(config)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, VOCAB_SIZE, (length,), generator=generator) for length in _LENGTHS]
    ours = random_model(own, dtype=dtype, seed=0)
    _disturb(ours, generator)
    count = min(num_stages, own.num_hidden_layers) if num_stages > 1 else 0
    stages = _cut(own, ours, num_stages=count, dtype=dtype) if count else []
    family, kinds = vision_family(own), count_kinds(kinds_of_layers(text_of(own)))
    example = family.example(own, generator) if family else None

    def whole() -> Result:
        return _result(packed_loss([ours], rows, layer_kinds=kinds, example=example), [ours])

    if dtype == "bfloat16":
        want = whole()
        round_parameters(ours, *stages)
    else:
        want = _by_library(config, ours, rows, example=example, dtype=dtype)
    buffers = {name: each.clone() for name, each in kept_buffers(ours).items()}
    found = {"packed sequences": whole()}
    for name, value in kept_buffers(ours).items():
        if not torch.equal(value, buffers[name]):
            raise ValueError(f"buffer {name} changes in training, but copies of the state hold parameters only")
    if stages:
        found[f"{len(stages)} pipeline stages"] = _result(packed_loss(stages, rows, layer_kinds=kinds), stages)
    return found, want


def _by_library(
    config: PreTrainedConfig, ours: CausalLM, rows: Sequence[Tensor], *, example: "ImageExample | None", dtype: str
) -> Result:
    """Return the library's results with our weights, one sequence at a time."""
    keywords = {"attn_implementation": "eager"} | keywords_of(config, dtype=dtype)
    theirs = make_library_model(config, **keywords).to(DTYPES[dtype]).train()
    theirs.load_state_dict(ours.model.state_dict())
    given = [{"input_ids": row[None]} for row in rows] + ([example.library_inputs] if example else [])
    logits = [theirs(**each, use_cache=False).logits[0] for each in given]
    if has_reward_head(config):
        return _result(torch.cat(logits).sum(), [theirs])
    words = [_words(each["input_ids"][0], CrossEntropy()) for each in given]
    alone = [F.cross_entropy(each, own, reduction="sum") for each, own in zip(logits, words, strict=True)]
    return _result(torch.stack(alone).sum(), [theirs])


def round_parameters(*models: nn.Module) -> None:
    """Round parameters to bf16, as FSDP gathers them in a bf16 run; buffers stay as they are."""
    for model in models:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)


def _cut(config: PreTrainedConfig, whole: CausalLM, *, num_stages: int, dtype: str) -> list[CausalLM]:
    """Stages with the weights of `whole`."""
    weights = whole.state_dict()
    models = []
    for stage in stages_of(split_layers(config.num_hidden_layers, num_stages)):
        model = random_model(config, dtype=dtype, seed=0, stage=stage)
        model.load_state_dict({name: weights[name] for name in model.state_dict()})
        models.append(model)
    return models


def packed_loss(
    stages: Sequence[CausalLM],
    rows: Sequence[Tensor],
    *,
    layer_kinds: LayerKinds,
    example: "ImageExample | None" = None,
) -> Tensor:
    """Loss of packed sequences, passed from stage to stage; the last one has an image if `example` is given."""
    positions, placed = [torch.arange(len(row)) for row in rows], None
    if example is not None:
        model: Any = stages[0]
        placed = example.placed(model, start=sum(len(row) for row in rows))
        positions, rows = [*positions, example.positions(model.model)], [*rows, example.ids]
    shape = PassShape(degree=1, lengths=tuple(len(row) for row in rows), layer_kinds=layer_kinds)
    context = lone_context(shape, kernel=pick_kernel("cpu"), recomputed_layers=_RECOMPUTED_LAYERS)
    loss = additive_loss(stages[-1].model.config)
    passed, targets = torch.cat(list(rows)), Targets.of(torch.cat([_words(row, loss) for row in rows]), loss=loss)
    axes = positions[-1].shape[:-1]
    where = torch.cat([each.expand(*axes, len(row)) for each, row in zip(positions, rows, strict=True)], dim=-1)
    for model in stages:
        output = model(passed, where, targets, context, placed=placed).squeeze(0)
        passed = output if model.stage.is_last else output.to(next(model.parameters()))  # as pipes send it
    num_layers = sum(len(model.layers) for model in stages)
    if shape.num_pairs and not context.stats.pairs:
        raise ValueError(_OWN_ATTENTION)
    if not math.isclose(context.stats.pairs, num_layers * shape.num_pairs):
        raise ValueError(
            "some of its layers do not use our attention, or not with their window: "
            f"{context.stats.pairs:.0f} pairs computed, {num_layers} layers have {num_layers * shape.num_pairs:.0f}"
        )
    kinds = kinds_of_layers(text_of(stages[-1].model.config))
    recurrent = {number for number, kind in enumerate(kinds) if kind.recurrence}
    if recurrent != context.stats.recurrent_layers:
        others = sorted(recurrent ^ context.stats.recurrent_layers)
        raise ValueError(f"its layers {others} do not use our recurrence, or use it and are not known to")
    return passed


def lone_context(shape: PassShape, *, kernel: AttentionKernel, recomputed_layers: int = 0) -> AttentionContext:
    """Attention of one device that holds the whole pass."""
    (program,) = lower(*pass_plan(shape, num_ranks=1, recomputed_layers=recomputed_layers))
    (forward,) = (item for item in program.instructions if isinstance(item, Forward))
    return AttentionContext.of(forward, transport=LoneTransport(), kernel=kernel)


@torch.no_grad()
def _disturb(model: nn.Module, generator: torch.Generator) -> None:
    """Add noise, since biases, gates and norms start at values that hide differences."""
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(noise * (parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.1))


def additive_loss(config: PreTrainedConfig) -> Loss:
    """A loss for the model's head that is a sum over tokens: cross entropy, or a sum of rewards."""
    return RewardModel(center=0.0) if has_reward_head(config) else CrossEntropy()


def _words(row: Tensor, loss: Loss) -> Tensor:
    """What a sequence's tokens are compared with: those that follow; or 0 for the last one, if only that has a term."""
    ignored = torch.tensor([IGNORED])
    return torch.cat([ignored.expand(len(row) - 1), torch.tensor([0])] if loss.scores_end else [row[1:], ignored])


def _result(loss: Tensor, models: Sequence[nn.Module]) -> Result:
    """Loss and gradient norm; a matrix that several stages hold counts once, with the sum of its gradients."""
    for model in models:
        model.zero_grad()
    loss.backward()
    gradients: dict[str, Tensor] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients.get(name, torch.zeros(())) + parameter.grad.double()
    squares = [gradient.square().sum() for gradient in gradients.values()]
    return float(loss.detach()), math.sqrt(float(torch.stack(squares).sum()))
