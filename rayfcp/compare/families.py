"""Strategies without pipeline stages take all devices as ranks, pipelines share them out over stages: two families,
each with its ranks and the settings that it may choose from."""

from dataclasses import dataclass
from itertools import product

from rayfcp.compare.inputs import Inputs, ReduceEvery
from rayfcp.compare.names import PIPELINES
from rayfcp.compare.setting import GIB, Setting, settings_of
from rayfcp.plan import CostModel
from rayfcp.plan.costs.pipeline import PipelineCost
from rayfcp.plan.costs.stages import split_by_cost, split_layers
from rayfcp.plan.strategies import AUTO
from rayfcp.values import ClusterSpec, HardwareProfile, InfeasiblePlanError, ModelProfile

UNBOUNDED_BYTES = 1 << 50
"""Memory of a device where a number of tokens stands for the memory model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """`why_none`: why no setting is feasible, if so."""

    num_ranks: int
    num_stages: int
    settings: tuple[Setting, ...]
    why_none: str = ""


def stages_of(name: str, inputs: Inputs) -> tuple[int, ...]:
    """Numbers of stages of the families that a strategy may choose from: `auto` has both."""
    if name == AUTO:
        return tuple(dict.fromkeys((1, inputs.stages)))
    return (inputs.stages,) if name in PIPELINES else (1,)


def family_of(
    name: str,
    inputs: Inputs,
    *,
    model: ModelProfile,
    hardware: HardwareProfile,
    longest: int,
    num_stages: int | None = None,
) -> Family:
    """That of a strategy, on the first of the numbers of stages that it may choose from unless one is given; `hardware`
    is that of a rank on a stage, `longest` the most tokens of a sequence."""
    num_stages = num_stages or stages_of(name, inputs)[0]
    num_ranks = inputs.devices // inputs.tensor_parallel // num_stages
    try:
        settings = (
            stage_settings(inputs, model=model, hardware=hardware, num_ranks=num_ranks)
            if num_stages > 1
            else settings_of(inputs, model=model, hardware=hardware, num_ranks=num_ranks, longest=longest)
        )
    except InfeasiblePlanError as error:
        return Family(num_ranks=num_ranks, num_stages=num_stages, settings=(), why_none=str(error))
    return Family(num_ranks=num_ranks, num_stages=num_stages, settings=settings)


def stage_settings(
    inputs: Inputs, *, model: ModelProfile, hardware: HardwareProfile, num_ranks: int
) -> tuple[Setting, ...]:
    """All settings under which the states of every stage fit: layers split evenly or by cost, gradients reduced and
    parameters gathered with each microbatch or once a step. What is recomputed is the planner's own choice.

    Raises:
        InfeasiblePlanError: there is none; told for the setting that needs the least memory.
        ValueError: more stages than layers.
    """
    either: tuple[ReduceEvery, ...] = ("step", "microbatch")
    reductions = (inputs.reduce_every,) if inputs.reduce_every else either
    gathers = (inputs.gather_every,) if inputs.gather_every else either
    splits = dict.fromkeys(split(model, inputs.stages) for split in (_evenly, split_by_cost))
    found, why = [], InfeasiblePlanError("no setting was tried")
    for layers, reduce_every, gather_every in product(splits, reductions, gathers):
        try:
            found.append(
                _setting(
                    inputs,
                    model=model,
                    hardware=hardware,
                    num_ranks=num_ranks,
                    layers=layers,
                    reduce_every=reduce_every,
                    gather_every=gather_every,
                )
            )
        except InfeasiblePlanError as error:
            why = error
    if not found:
        raise why
    return tuple(found)


def _setting(
    inputs: Inputs,
    *,
    model: ModelProfile,
    hardware: HardwareProfile,
    num_ranks: int,
    layers: tuple[int, ...],
    reduce_every: ReduceEvery,
    gather_every: ReduceEvery,
) -> Setting:
    cost = CostModel.from_profiles(
        model,
        hardware,
        num_ranks=num_ranks,
        num_stages=len(layers),
        layers_of_stage=layers,
        memory_bytes=_memory_bytes(inputs, hardware=hardware),
        bytes_per_element=hardware.dtype_bytes,
        reduce_every=reduce_every,
        gather_every=gather_every,
    )
    assert cost.pipeline is not None, "there are stages"
    cluster = ClusterSpec(
        num_ranks=num_ranks,
        max_tokens_per_rank=inputs.max_tokens_per_rank or _max_tokens(cost.pipeline),
        num_stages=len(layers),
        tensor_parallel=inputs.tensor_parallel,
        layers_of_stage=layers,
    )
    return Setting(
        recomputed_layers=0, reduce_every=reduce_every, gather_every=gather_every, cluster=cluster, cost=cost
    )


def _evenly(model: ModelProfile, num_stages: int) -> tuple[int, ...]:
    return split_layers(model.num_layers, num_stages)


def _memory_bytes(inputs: Inputs, *, hardware: HardwareProfile) -> int:
    """Of a rank on a stage."""
    if inputs.max_tokens_per_rank is not None:
        return UNBOUNDED_BYTES
    if inputs.memory_gib is None:
        return hardware.memory_bytes
    return int(inputs.memory_gib * inputs.tensor_parallel * GIB)


def _max_tokens(pipeline: PipelineCost) -> int:
    """Most tokens of a rank in one microbatch, all layers recomputed and nothing else there.

    Raises:
        InfeasiblePlanError: not one fits.
    """
    each = pipeline.layer_bytes
    tokens = min(
        room // (layers * each.kept + each.working)
        for room, layers in zip(pipeline.room_bytes, pipeline.layers_of_stage, strict=True)
    )
    if tokens < 1:
        raise InfeasiblePlanError(
            f"beside the states of a stage, {min(pipeline.room_bytes) / GIB:.3g} GiB are left, too little for one "
            "token; add devices, stages or memory"
        )
    return tokens
