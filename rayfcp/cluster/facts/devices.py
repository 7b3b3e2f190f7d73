"""Values that controller and workers exchange, without torch; and how devices make up stages and ranks."""

from dataclasses import dataclass
from typing import Any

from rayfcp.config import Config, ConfigError
from rayfcp.cost.analytic import device_model
from rayfcp.cost.stages import split_by_cost, split_layers
from rayfcp.plan import strategy_names
from rayfcp.plan.strategies.registry import get
from rayfcp.values import ClusterSpec, LayerKind, ModelProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Memory of a node, or of the container that the worker runs in: its limit, what is in use, what Ray's object store
    may take, and what is free in `elastic.snapshot_dir`."""

    limit_bytes: int
    used_bytes: int
    store_bytes: int
    shm_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """A worker's node, process and device. `peak_flops` is None if it is not in the table.

    `worker_id` never changes, unlike the device number. `slot` names the accelerator, which a later worker may get
    again; CPUs have none. `compiles`: it compiles layers, which then need less memory.
    """

    node_id: str
    device: str
    memory_bytes: int
    peak_flops: float | None
    worker_id: str = ""
    pid: int = 0
    slot: str = ""
    compiles: bool = False
    host: HostFacts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """An opened worker. `id` never changes; the `reservation` holds its device."""

    id: str
    handle: Any
    reservation: Any
    facts: DeviceFacts


WITHOUT_STAGES = "flex-ring"
"""Strategy for one stage where the configured one needs several, as after a loss."""


def strategy_on(config: Config, num_stages: int) -> str:
    """Strategy that plans a generation of `num_stages` stages."""
    return WITHOUT_STAGES if num_stages == 1 and get(config.plan.strategy).needs_stages else config.plan.strategy


def with_stages(config: Config, num_stages: int) -> Config:
    """`config` with another number of stages."""
    cluster = config.cluster.model_copy(update={"pipeline_stages": num_stages})
    return config.model_copy(update={"cluster": cluster})


def layers_of_stage(config: Config, model: ModelProfile) -> tuple[int, ...]:
    """Layers of each stage as `cluster.layer_split` says; none with one stage."""
    stages = config.cluster.pipeline_stages
    if stages == 1:
        return ()
    if config.cluster.layer_split == "even":
        return split_layers(model.num_layers, stages)
    return split_by_cost(device_model(model, config.cluster.tensor_parallel), stages)


def kinds_of_stages(model: ModelProfile, cluster: ClusterSpec) -> list[list[LayerKind]]:
    """Kinds of layers of each stage."""
    layers = cluster.layers_of_stage or split_layers(model.num_layers, cluster.num_stages)
    return [[kind for kind, _ in kinds] for kinds in model.stage_kinds(layers)]


def device_names(cluster: ClusterSpec) -> list[str]:
    """Names of the devices in messages, by device number.

    >>> device_names(ClusterSpec(num_ranks=2, max_tokens_per_rank=1, num_stages=2))[3]
    'stage 1, rank 1'
    """
    return [
        ", ".join(
            [f"stage {stage}"] * (cluster.num_stages > 1)
            + [f"rank {rank}"]
            + [f"tensor rank {tensor}"] * (cluster.tensor_parallel > 1)
        )
        for stage in range(cluster.num_stages)
        for rank in range(cluster.num_ranks)
        for tensor in range(cluster.tensor_parallel)
    ]


def check_layout(config: Config) -> None:
    """Check strategy and stages.

    Raises:
        ConfigError: no such strategy, one that cannot run with these stages, or `train.recompute_layers` with stages.
    """
    strategy, stages = config.plan.strategy, config.cluster.pipeline_stages
    if strategy not in strategy_names():
        known = ", ".join(strategy_names())
        raise ConfigError(f"plan.strategy is {strategy!r}, must be one of {known}; choose one of these")
    if stages == 1 and get(strategy).needs_stages:
        raise ConfigError(
            f"cluster.pipeline_stages is 1, must be at least 2 with plan.strategy={strategy}; raise it or choose "
            "another strategy"
        )
    if stages > 1 and config.train.recompute_layers:
        raise ConfigError(
            f"train.recompute_layers is {config.train.recompute_layers}, must be 0 with cluster.pipeline_stages "
            f"{stages}: plans choose layers for each stage and microbatch; set it to 0"
        )
