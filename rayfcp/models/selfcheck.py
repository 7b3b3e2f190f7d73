"""A row of tokens with a picture in it, for a check of a model that sees: as the library takes it, and as we do.

Does our attention inside a model of this family compute what the library computes? Do its pipeline stages? Asked
before a run starts.

Families differ in how they take positions, in what they pass on to their attention, in what they apply
around it, and around their layers. Nothing of that shows in a configuration, so a tiny model of the same family is run
both ways.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from rayfcp.config import ConfigError
from rayfcp.cost.fit import PassShape, pass_plan
from rayfcp.cost.stages import split_layers
from rayfcp.execute.attention.function import AttentionContext
from rayfcp.execute.attention.schedule import make_kinds_ready
from rayfcp.execute.interpreter import IGNORED, Pixels, Placed
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.parallel.transport import Fabric, InProcessTransport
from rayfcp.models.build import random_model
from rayfcp.models.causal_lm import CausalLM, VisionLM
from rayfcp.models.library import VOCAB_SIZE, make_library_model, narrowed, text_of, windows_of
from rayfcp.models.stages import stages_of
from rayfcp.program import Forward, lower
from rayfcp.values import Windows

_BEFORE, _BEHIND = 5, 4
"""Tokens of text around the picture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """`ids`, `[tokens]`, of which `num_seen` from the sixth on stand for the picture `pixels`."""

    ids: Tensor
    num_seen: int
    pixels: Pixels

    @property
    def given(self) -> dict[str, Any]:
        """Arguments of the library's model."""
        values, ids = torch.from_numpy(self.pixels.values), self.ids[None]
        if values.ndim > 2:
            return {"input_ids": ids, "pixel_values": values}
        shape = torch.cat([torch.ones(1, 1, dtype=torch.int64), torch.from_numpy(self.pixels.grids)], dim=1)
        return {"input_ids": ids, "pixel_values": values, "image_grid_thw": shape, "mm_token_type_ids": self._types}

    @property
    def _types(self) -> Tensor:
        types = torch.zeros_like(self.ids)
        types[_BEFORE : _BEFORE + self.num_seen] = 1
        return types[None].int()

    def positions(self, library: Any) -> Tensor:
        """`[3, tokens]` as the library has them, or `[tokens]`."""
        given = {name: value for name, value in self.given.items() if name != "pixel_values"}
        if "image_grid_thw" not in given:
            return torch.arange(len(self.ids))
        found: Tensor = library.model.get_rope_index(**given)[0]
        return found[:, 0]

    def placed(self, model: VisionLM, *, start: int) -> Placed:
        """Its features, in a row that begins `start` tokens after the first of all."""
        rows = torch.arange(start + _BEFORE, start + _BEFORE + self.num_seen)
        return Placed(features=model.encode(self.pixels), rows=rows)


def make_sight(config: PreTrainedConfig, generator: torch.Generator) -> Sight:
    """With a picture of random pixels: 4 x 4 patches, as large as a tile of `narrowed` models."""
    vision, side = config.vision_config, 4
    num_seen = side * side // 4
    ids = torch.randint(0, text_of(config).vocab_size - 2, (_BEFORE + num_seen + _BEHIND,), generator=generator)
    ids[_BEFORE : _BEFORE + num_seen] = config.image_token_id
    if config.model_type == "qwen3_vl":
        shape: tuple[int, ...] = (side * side, vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)
    else:
        shape = (1, vision.num_channels, *(side * each for each in vision.patch_size))
    values = torch.randn(shape, generator=generator).numpy()
    return Sight(ids=ids, num_seen=num_seen, pixels=Pixels(values=values, grids=np.array([[side, side]])))


TOLERANCE = 1e-4
"""Relative difference of loss and gradient norm that fp32 explains."""

_LENGTHS = (13, 22)
_NUM_LAYERS = 2
_NUM_STAGES = 3
"""First, last and between."""
_RECOMPUTED_LAYERS = 1


def check_supported(config: PreTrainedConfig, *, num_stages: int = 1) -> None:
    """Compare loss and gradient norm of two packed sequences, and one with a picture where the model sees, by our
    attention, with the library's own attention (sdpa), one sequence at a time, on a tiny model of the same family, in
    fp32 on the CPU; with several stages on a model cut into up to three as well.

    The global random state stays as it is.

    Raises:
        ConfigError: they differ, or the model cannot be run this way.
    """
    stages = min(num_stages, _NUM_STAGES)
    remedy = "choose another model" + (" or set cluster.pipeline_stages=1" if stages > 1 else "")
    try:
        with torch.random.fork_rng(devices=[]):
            found, want = _both_ways(narrowed(config, max(_NUM_LAYERS, stages)), num_stages=stages)
    except Exception as error:
        # Whatever a family's code raises here it would raise in every worker.
        first = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"model: {config.model_type} cannot be trained, a tiny one fails with {type(error).__name__}: {first}; "
            f"{remedy}"
        ) from error
    for how, ours in found.items():
        for what, own, theirs in zip(("loss", "gradient norm"), ours, want, strict=True):
            if not math.isclose(own, theirs, rel_tol=TOLERANCE):
                raise ConfigError(
                    f"model: {config.model_type} cannot be trained, {what} of a tiny one is {own:.6g} with {how} "
                    f"and {theirs:.6g} in transformers, must agree to {TOLERANCE:g}; {remedy}"
                )


Result = tuple[float, float]
"""Loss and gradient norm."""


def _both_ways(config: PreTrainedConfig, *, num_stages: int) -> tuple[dict[str, Result], Result]:
    """Ours by what is special about them, and the library's."""
    # The library keeps the choice of attention in the configuration, which its models share.
    own = copy.deepcopy(config)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, VOCAB_SIZE, (length,), generator=generator) for length in _LENGTHS]
    ours = random_model(own, dtype="float32", seed=0)
    _disturb(ours, generator)
    theirs = make_library_model(config, attn_implementation="sdpa").float().train()
    theirs.load_state_dict(ours.model.state_dict())
    sight = make_sight(own, generator) if isinstance(ours, VisionLM) else None
    buffers = _kept_buffers(ours)
    windows = windows_of(text_of(own))
    found = {"packed sequences": _result(_packed([ours], rows, windows=windows, sight=sight), [ours])}
    for name, value in _kept_buffers(ours).items():
        if not torch.equal(value, buffers[name]):
            raise ValueError(f"buffer {name} changes in training, but copies of the state hold parameters only")
    if num_stages > 1:
        stages = _cut(own, ours, num_stages=min(num_stages, own.num_hidden_layers))
        found[f"{len(stages)} pipeline stages"] = _result(_packed(stages, rows, windows=windows), stages)
    given = [{"input_ids": row[None]} for row in rows] + ([sight.given] if sight else [])
    alone = [
        F.cross_entropy(theirs(**each, use_cache=False).logits[0], _shifted(each["input_ids"][0]), reduction="sum")
        for each in given
    ]
    return found, _result(torch.stack(alone).sum(), [theirs])


def _kept_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Those that belong to the model's state, as they are now."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: value.clone() for name, value in model.state_dict().items() if name not in parameters}


def _cut(config: PreTrainedConfig, whole: CausalLM, *, num_stages: int) -> list[CausalLM]:
    """Its stages, with its weights."""
    weights = whole.state_dict()
    models = []
    for stage in stages_of(split_layers(config.num_hidden_layers, num_stages)):
        model = random_model(config, dtype="float32", seed=0, stage=stage)
        model.load_state_dict({name: weights[name] for name in model.state_dict()})
        models.append(model)
    return models


def _packed(
    stages: Sequence[CausalLM], rows: Sequence[Tensor], *, windows: Windows, sight: Sight | None = None
) -> Tensor:
    """Loss of packed sequences, passed on from stage to stage; behind them that of one with a picture, if given."""
    positions, placed = [torch.arange(len(row)) for row in rows], None
    if sight is not None and isinstance(stages[0], VisionLM):
        placed = sight.placed(stages[0], start=sum(len(row) for row in rows))
        positions, rows = [*positions, sight.positions(stages[0].model)], [*rows, sight.ids]
    shape = PassShape(degree=1, lengths=tuple(len(row) for row in rows), windows=windows)
    context = _one_rank(shape)
    passed, targets = torch.cat(list(rows)), torch.cat([_shifted(row) for row in rows])
    axes = positions[-1].shape[:-1]
    where = torch.cat([each.expand(*axes, len(row)) for each, row in zip(positions, rows, strict=True)], dim=-1)
    for model in stages:
        passed = model(passed, where, targets, context, placed=placed).squeeze(0)
    num_layers = sum(len(model.layers) for model in stages)
    if not math.isclose(context.traffic.cells, num_layers * shape.num_cells):
        raise ValueError("some of its layers do not use our attention, or not with their window")
    return passed


@torch.no_grad()
def _disturb(model: nn.Module, generator: torch.Generator) -> None:
    """Leave no bias, gate or norm at a value that hides a difference."""
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(noise * (parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.1))


def _shifted(row: Tensor) -> Tensor:
    return torch.cat([row[1:], torch.tensor([IGNORED])])


def _one_rank(shape: PassShape) -> AttentionContext:
    """One rank that holds all sequences."""
    plan, sequences = pass_plan(shape, num_ranks=1, recomputed_layers=_RECOMPUTED_LAYERS)
    (program,) = lower(plan, sequences)
    (forward,) = (item for item in program.instructions if isinstance(item, Forward))
    ready = make_kinds_ready(forward)
    return AttentionContext(
        program=ready.pop(forward.window),
        transport=InProcessTransport(Fabric(1), 0),
        kernel=pick_kernel("cpu"),
        recomputed_layers=_RECOMPUTED_LAYERS,
        window=forward.window,
        others=ready,
    )


def _result(loss: Tensor, models: Sequence[nn.Module]) -> Result:
    """Differentiates; a matrix that several stages hold counts once, with the sum of their gradients."""
    loss.backward()
    gradients: dict[str, Tensor] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients.get(name, torch.zeros(())) + parameter.grad.double()
    squares = [gradient.square().sum() for gradient in gradients.values()]
    return float(loss.detach()), math.sqrt(float(torch.stack(squares).sum()))
