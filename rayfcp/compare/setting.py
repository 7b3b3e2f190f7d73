"""What the trainer is free to choose beside the plan: recomputed layers, and when gradients are reduced and parameters
gathered."""

from dataclasses import dataclass, replace

from rayfcp.compare.inputs import Inputs, ReduceEvery
from rayfcp.config import ConfigError
from rayfcp.plan import CostModel, max_tokens_per_rank
from rayfcp.plan.costs.tensor_parallel import efficiency_with_sums
from rayfcp.values import ClusterSpec, HardwareProfile, InfeasiblePlanError, ModelProfile

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One choice, and the cluster and cost that come of it. With several stages, plans say what is recomputed."""

    recomputed_layers: int
    reduce_every: ReduceEvery
    cluster: ClusterSpec
    cost: CostModel
    gather_every: ReduceEvery = "microbatch"


def rank_profile(hardware: HardwareProfile, model: ModelProfile, *, tensor_parallel: int) -> HardwareProfile:
    """T devices that share each layer, as one device with T times the compute, memory and links; what their sums take
    is laid upon the linear layers.

    Raises:
        ConfigError: T does not divide the heads, or its devices do not fit in a node.
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
    """All settings under which the `longest` sequence fits on the ranks; `hardware` is that of a rank.

    Free choices are tried as {no, half, all} layers x {each microbatch, each step}; a fixed `max_tokens_per_rank`
    stands for no recomputation and one reduction a step, unless `inputs` says otherwise.

    Raises:
        InfeasiblePlanError: there is none; told for the setting that needs the least memory.
    """
    found, why = [], InfeasiblePlanError("no setting was tried")
    for layers, reduce_every in _choices(inputs, num_layers=model.num_layers):
        try:
            tokens = inputs.max_tokens_per_rank or max_tokens_per_rank(
                model,
                num_devices=num_ranks,
                memory_bytes=_memory_bytes(inputs, hardware=hardware),
                recomputed_layers=layers,
                bytes_per_element=hardware.dtype_bytes,
                reduce_every=reduce_every,
            )
            _check_longest(longest, tokens, num_ranks=num_ranks)
        except InfeasiblePlanError as error:
            why = error
            continue
        cost = CostModel.from_profiles(
            model,
            hardware,
            num_ranks=num_ranks,
            recomputed_layers=layers,
            bytes_per_element=hardware.dtype_bytes,
            reduce_every=reduce_every,
        )
        cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=tokens, tensor_parallel=inputs.tensor_parallel)
        found.append(Setting(recomputed_layers=layers, reduce_every=reduce_every, cluster=cluster, cost=cost))
    if not found:
        raise why
    return tuple(found)


def _choices(inputs: Inputs, *, num_layers: int) -> list[tuple[int, ReduceEvery]]:
    """Layers and reductions to try, most memory first."""
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


def _memory_bytes(inputs: Inputs, *, hardware: HardwareProfile) -> int:
    """Of a rank."""
    if inputs.memory_gib is None:
        return hardware.memory_bytes
    return int(inputs.memory_gib * inputs.tensor_parallel * GIB)


def _check_longest(longest: int, tokens: int, *, num_ranks: int) -> None:
    if longest > tokens * num_ranks:
        raise InfeasiblePlanError(
            f"the longest sequence has {longest} tokens, {num_ranks} ranks hold at most {tokens * num_ranks} "
            f"({tokens} each); lower --max-seqlen, or add devices or memory"
        )
