"""Settings that the trainer chooses in addition to the plan: recomputed layers, and how often gradients are reduced and
parameters gathered.

Strategies without pipeline stages use all devices as ranks, pipelines divide them over stages: two families, each with
its ranks and its settings.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from rayfcp.compare.arguments import Inputs, ReduceEvery
from rayfcp.config import ConfigError
from rayfcp.cost.analytic import efficiency_with_sums
from rayfcp.cost.pipeline import PipelineCost
from rayfcp.cost.stages import split_by_cost, split_layers
from rayfcp.plan import CostModel, max_tokens_per_rank
from rayfcp.plan.strategies.registry import AUTO, get
from rayfcp.values import ClusterSpec, HardwareProfile, InfeasiblePlanError, ModelProfile

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One choice with its cluster and cost model. With several stages, plans contain the recomputed layers."""

    recomputed_layers: int
    reduce_every: ReduceEvery
    cluster: ClusterSpec
    cost: CostModel
    gather_every: ReduceEvery = "microbatch"


def rank_profile(hardware: HardwareProfile, model: ModelProfile, *, tensor_parallel: int) -> HardwareProfile:
    """Return T tensor-parallel devices as one device with T times the compute, memory and links; the time of their
    all-reduces lowers the efficiency of the linear layers.

    Raises:
        ConfigError: T does not divide the heads, or the devices of a node.
    """
    if tensor_parallel == 1:
        return hardware
    for name, bound in (
        ("key/value heads of the model", model.num_kv_heads),
        ("devices of a node", hardware.devices_per_node),
    ):
        if bound % tensor_parallel:
            raise ConfigError(f"--tensor-parallel is {tensor_parallel}, must divide the {bound} {name}; lower it")
    linear_s = model.linear_flops_per_token / (tensor_parallel * hardware.peak_flops * hardware.linear_efficiency)
    return replace(
        hardware,
        peak_flops=hardware.peak_flops * tensor_parallel,
        memory_bytes=hardware.memory_bytes * tensor_parallel,
        linear_efficiency=efficiency_with_sums(hardware, model, linear_s=linear_s, tensor_parallel=tensor_parallel),
        devices_per_node=hardware.devices_per_node // tensor_parallel,
        intra_node_bandwidth=hardware.intra_node_bandwidth * tensor_parallel,
        inter_node_bandwidth=hardware.inter_node_bandwidth * tensor_parallel,
    )


def settings_of(
    inputs: Inputs, *, model: ModelProfile, hardware: HardwareProfile, num_ranks: int, longest: int
) -> tuple[Setting, ...]:
    """Return all settings under which the `longest` sequence fits on the ranks; `hardware` is that of a rank.

    Free choices are {no, half, all} layers x {per step, per microbatch}; a fixed `max_tokens_per_rank` implies no
    recomputation and one reduction per step unless `inputs` says otherwise.

    Raises:
        InfeasiblePlanError: There is none; reason of the setting that needs the least memory.
    """

    def setting(layers: int, reduce_every: ReduceEvery) -> Setting:
        tokens = inputs.max_tokens_per_rank or max_tokens_per_rank(
            model,
            num_devices=num_ranks,
            memory_bytes=_memory_bytes(inputs, hardware=hardware),
            recomputed_layers=layers,
            bytes_per_element=hardware.dtype_bytes,
            reduce_every=reduce_every,
        )
        _check_longest(longest, tokens, num_ranks=num_ranks)
        cost = CostModel.from_profiles(
            model,
            hardware,
            num_ranks=num_ranks,
            recomputed_layers=layers,
            bytes_per_element=hardware.dtype_bytes,
            reduce_every=reduce_every,
        )
        cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=tokens, tensor_parallel=inputs.tensor_parallel)
        return Setting(recomputed_layers=layers, reduce_every=reduce_every, cluster=cluster, cost=cost)

    return _feasible(setting, _choices(inputs, num_layers=model.num_layers))


def _feasible(setting: Callable[..., Setting], choices: Iterable[tuple[Any, ...]]) -> tuple[Setting, ...]:
    """Return the settings of all feasible choices.

    Raises:
        InfeasiblePlanError: There is none; reason of the last choice.
    """
    found, why = [], InfeasiblePlanError("no setting was tried")
    for choice in choices:
        try:
            found.append(setting(*choice))
        except InfeasiblePlanError as error:
            why = error
    if not found:
        raise why
    return tuple(found)


def _choices(inputs: Inputs, *, num_layers: int) -> list[tuple[int, ReduceEvery]]:
    """Return layers and reductions to try, the most memory first."""
    fixed = inputs.max_tokens_per_rank is not None
    layers = (0,) if fixed else tuple(sorted({0, num_layers // 2, num_layers}))
    reductions: tuple[ReduceEvery, ...] = ("step",) if fixed else ("step", "microbatch")
    if inputs.recompute_layers is not None:
        if inputs.recompute_layers > num_layers:
            raise ConfigError(
                f"--recompute-layers is {inputs.recompute_layers}, must be at most the model's {num_layers}; lower it"
            )
        layers = (inputs.recompute_layers,)
    if inputs.reduce_every is not None:
        reductions = (inputs.reduce_every,)
    return [(count, reduce_every) for count in layers for reduce_every in reductions]


def _check_longest(longest: int, tokens: int, *, num_ranks: int) -> None:
    if longest > tokens * num_ranks:
        raise InfeasiblePlanError(
            f"the longest sequence has {longest} tokens, {num_ranks} ranks hold at most {tokens * num_ranks} "
            f"({tokens} each); lower --max-seqlen, or add devices or memory"
        )


UNBOUNDED_BYTES = 1 << 50
"""Memory of a device if --max-tokens-per-rank replaces the memory model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Ranks, stages and settings; `why_none`: why no setting is feasible, if so."""

    num_ranks: int
    num_stages: int
    settings: tuple[Setting, ...]
    why_none: str = ""


def stages_of(name: str, inputs: Inputs) -> tuple[int, ...]:
    """Return the numbers of stages of a strategy's families: `auto` has both."""
    if name == AUTO:
        return tuple(dict.fromkeys((1, inputs.stages)))
    return (inputs.stages,) if get(name).needs_stages else (1,)


def family_of(
    name: str,
    inputs: Inputs,
    *,
    model: ModelProfile,
    hardware: HardwareProfile,
    longest: int,
    num_stages: int | None = None,
) -> Family:
    """Return a strategy's family, with the first of its numbers of stages unless one is given; `hardware` is that of a
    rank on a stage, `longest` the most tokens of a sequence."""
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
    """Return all settings under which the states of every stage fit: layers split evenly or by cost, gradients reduced
    and parameters gathered per microbatch or per step. The planner chooses the recomputed layers.

    Raises:
        InfeasiblePlanError: There is none; reason of the setting that needs the least memory.
        ValueError: There are more stages than layers.
    """
    either: tuple[ReduceEvery, ...] = ("step", "microbatch")
    reductions = (inputs.reduce_every,) if inputs.reduce_every else either
    gathers = (inputs.gather_every,) if inputs.gather_every else either
    splits = dict.fromkeys((split_layers(model.num_layers, inputs.stages), split_by_cost(model, inputs.stages)))

    def setting(layers: tuple[int, ...], reduce_every: ReduceEvery, gather_every: ReduceEvery) -> Setting:
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
            recomputed_layers=0, cluster=cluster, cost=cost, reduce_every=reduce_every, gather_every=gather_every
        )

    return _feasible(setting, product(splits, reductions, gathers))


def _memory_bytes(inputs: Inputs, *, hardware: HardwareProfile) -> int:
    if inputs.max_tokens_per_rank is not None:
        return UNBOUNDED_BYTES
    if inputs.memory_gib is None:
        return hardware.memory_bytes
    return int(inputs.memory_gib * inputs.tensor_parallel * GIB)


def _max_tokens(pipeline: PipelineCost) -> int:
    """Return the most tokens of a rank in one microbatch with all layers recomputed.

    Raises:
        InfeasiblePlanError: Not one fits.
    """
    each = pipeline.layer_bytes
    tokens = min(
        room // (layers * each.kept + each.working)
        for room, layers in zip(pipeline.budget_bytes, pipeline.layers_of_stage, strict=True)
    )
    if tokens < 1:
        raise InfeasiblePlanError(
            f"beside the states of a stage, {min(pipeline.budget_bytes) / GIB:.3g} GiB are left, too little for one "
            "token; add devices, stages or memory"
        )
    return tokens
