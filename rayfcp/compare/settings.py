"""Settings that the trainer chooses in addition to the plan: recomputed layers, and how often gradients are reduced and
parameters gathered.

Strategies without pipeline stages use all devices as ranks, pipelines divide them over stages.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from rayfcp.compare.arguments import Inputs, ReduceEvery
from rayfcp.config import ConfigError
from rayfcp.cost.memory import ACCELERATOR_MEMORY_SHARE
from rayfcp.cost.pipeline import PipelineCost
from rayfcp.cost.scans import HeadsCost
from rayfcp.cost.stages import split_by_cost, split_layers
from rayfcp.plan import CostModel, max_tokens_per_rank
from rayfcp.plan.strategies.registry import AUTO, get
from rayfcp.values import ClusterSpec, HardwareProfile, InfeasiblePlanError, ModelProfile
from rayfcp.values.devices import CPU

GIB = 1 << 30

UNBOUNDED_BYTES = 1 << 50
"""Memory of a device if --max-tokens-per-rank replaces the memory model."""

EITHER: tuple[ReduceEvery, ...] = ("step", "microbatch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One choice with its cluster and cost model, and the profiles to simulate it on: of one of the tensor-parallel
    devices of a rank (on a stage). With several stages, plans contain the recomputed layers."""

    model: ModelProfile
    hardware: HardwareProfile
    recomputed_layers: int
    reduce_every: ReduceEvery
    cluster: ClusterSpec
    cost: CostModel
    gather_every: ReduceEvery = "microbatch"


def by_heads(setting: Setting) -> Setting:
    """Return the setting of a strategy that exchanges tokens for heads around recurrent layers."""
    again = setting.recomputed_layers
    scan = HeadsCost.from_profiles(
        setting.model, setting.hardware, recomputed_layers=again, bytes_per_element=setting.hardware.dtype_bytes
    )
    return replace(setting, cost=replace(setting.cost, scan=scan))


def stages_of(name: str, inputs: Inputs) -> tuple[int, ...]:
    """Return the numbers of stages that a strategy is tried with: `auto` also without stages."""
    if name == AUTO:
        return tuple(dict.fromkeys((1, inputs.stages)))
    return (inputs.stages,) if get(name).needs_stages else (1,)


def ranks_of(inputs: Inputs, *, num_stages: int) -> int:
    """Return the number of ranks, each with `num_stages` x `inputs.tensor_parallel` devices."""
    return inputs.devices // inputs.tensor_parallel // num_stages


def planned_memory_gib(inputs: Inputs, hardware: HardwareProfile) -> float:
    """Memory of a device that plans may use: as requested, else the share of the hardware's that runs use."""
    if inputs.memory_gib is not None:
        return inputs.memory_gib
    share = 1.0 if hardware.name in CPU.hardware else ACCELERATOR_MEMORY_SHARE  # CPUs: a worker's own already
    return int(share * hardware.memory_bytes) / GIB


def settings_of(
    inputs: Inputs, *, model: ModelProfile, hardware: HardwareProfile, longest: int, num_stages: int = 1
) -> tuple[Setting, ...]:
    """Return all settings under which sequences of up to `longest` tokens, or the states of every stage, fit on the
    ranks, each one device on a stage.

    Raises:
        InfeasiblePlanError: There is none; reason of the setting that needs the least memory.
    """
    num_ranks = ranks_of(inputs, num_stages=num_stages)
    if num_stages > 1:
        return _stage_settings(inputs, model=model, hardware=hardware, num_ranks=num_ranks, num_stages=num_stages)

    def setting(layers: int, reduce_every: ReduceEvery, keeps: bool) -> Setting:
        shape = replace(model, keeps_attention=keeps)
        choice: dict[str, Any] = {
            "recomputed_layers": layers,
            "bytes_per_element": hardware.dtype_bytes,
            "reduce_every": reduce_every,
        }
        tokens = inputs.max_tokens_per_rank or max_tokens_per_rank(
            shape, num_devices=num_ranks, memory_bytes=_memory_bytes(inputs, hardware=hardware), by_heads=True, **choice
        )
        if longest > tokens * num_ranks:
            raise InfeasiblePlanError(
                f"the longest sequence has {longest} tokens, {num_ranks} ranks hold at most {tokens * num_ranks} "
                f"({tokens} each); lower --max-seqlen, or add devices or memory"
            )
        cost = CostModel.from_profiles(shape, hardware, num_ranks=num_ranks, **choice)
        return Setting(
            model=shape,
            hardware=hardware,
            recomputed_layers=layers,
            reduce_every=reduce_every,
            cluster=ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=tokens),
            cost=replace(cost, kv_growth=0.0) if inputs.max_tokens_per_rank else cost,
        )

    return _feasible(setting, _choices(inputs, num_layers=model.num_layers))


def _choices(inputs: Inputs, *, num_layers: int) -> Iterable[tuple[int, ReduceEvery, bool]]:
    """Return layers and reductions to try, and whether recomputed layers keep their attention, the most memory first:
    {no, half, all} layers x {per step, per microbatch} x {kept, if it may be, and not}.

    A fixed `max_tokens_per_rank` implies no recomputation and one reduction per step unless `inputs` says otherwise.
    """
    fixed = inputs.max_tokens_per_rank is not None
    layers = (0,) if fixed else tuple(sorted({0, num_layers // 2, num_layers}))
    if inputs.recompute_layers is not None:
        if inputs.recompute_layers > num_layers:
            raise ConfigError(
                f"--recompute-layers is {inputs.recompute_layers}, must be at most the model's {num_layers}; lower it"
            )
        layers = (inputs.recompute_layers,)
    reductions = (inputs.reduce_every,) if inputs.reduce_every else EITHER[: 1 if fixed else 2]
    choices = product(layers, reductions, _keeping(inputs))
    return (choice for choice in choices if choice[0] or not choice[2])


def _keeping(inputs: Inputs) -> tuple[bool, ...]:
    return (True, False) if inputs.keep_attention else (False,)


def _stage_settings(
    inputs: Inputs, *, model: ModelProfile, hardware: HardwareProfile, num_ranks: int, num_stages: int
) -> tuple[Setting, ...]:
    """Return the feasible settings with layers split evenly or by cost, gradients reduced and parameters gathered per
    microbatch or per step. The planner chooses the recomputed layers."""
    splits = dict.fromkeys((split_layers(model.num_layers, num_stages), split_by_cost(model, num_stages)))
    reductions = (inputs.reduce_every,) if inputs.reduce_every else EITHER
    gathers = (inputs.gather_every,) if inputs.gather_every else EITHER

    def setting(layers: tuple[int, ...], reduce_every: ReduceEvery, gather_every: ReduceEvery, keeps: bool) -> Setting:
        shape = replace(model, keeps_attention=keeps)
        cost = CostModel.from_profiles(
            shape,
            hardware,
            num_ranks=num_ranks,
            num_stages=num_stages,
            layers_of_stage=layers,
            memory_bytes=_memory_bytes(inputs, hardware=hardware),
            bytes_per_element=hardware.dtype_bytes,
            reduce_every=reduce_every,
            gather_every=gather_every,
        )
        assert cost.pipeline is not None, "there are stages"
        tokens = inputs.max_tokens_per_rank or _max_tokens(cost.pipeline)
        return Setting(
            model=shape,
            hardware=hardware,
            recomputed_layers=0,
            reduce_every=reduce_every,
            gather_every=gather_every,
            cluster=ClusterSpec(
                num_ranks=num_ranks,
                max_tokens_per_rank=tokens,
                num_stages=num_stages,
                layers_of_stage=layers,
            ),
            cost=cost,
        )

    return _feasible(setting, product(splits, reductions, gathers, _keeping(inputs)))


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


def _memory_bytes(inputs: Inputs, *, hardware: HardwareProfile) -> int:
    if inputs.max_tokens_per_rank is not None:
        return UNBOUNDED_BYTES
    return int(planned_memory_gib(inputs, hardware) * GIB)


def _max_tokens(pipeline: PipelineCost) -> int:
    """Return the most tokens of a rank in one microbatch with all layers recomputed, with which a run plans.

    Raises:
        InfeasiblePlanError: Not one fits.
    """
    tokens = pipeline.tokens_recomputed
    if tokens < 1:
        raise InfeasiblePlanError(
            f"beside the states of a stage, {min(pipeline.budget_bytes) / GIB:.3g} GiB are left, too little for one "
            "token; add devices, stages or memory"
        )
    return tokens
