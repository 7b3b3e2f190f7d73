"""How a run's devices make up stages, ranks and tensor-parallel devices."""

from rayfcp.config import Config, ConfigError
from rayfcp.plan import strategy_names
from rayfcp.plan.costs.stages import split_by_cost, split_layers
from rayfcp.plan.costs.tensor_parallel import device_model
from rayfcp.values import ClusterSpec, ModelProfile

STAGED = frozenset({"elastic-pipeline", "seq1f1b", "dapple"})
"""Strategies that pass microbatches through stages; others do so too, and run without."""


WITHOUT_STAGES = "flex-ring"
"""What plans for one stage where a strategy that needs several is configured, as after a loss."""


def strategy_on(config: Config, num_stages: int) -> str:
    """The strategy that plans for a generation of so many stages."""
    return WITHOUT_STAGES if num_stages == 1 and config.plan.strategy in STAGED else config.plan.strategy


def with_stages(config: Config, num_stages: int) -> Config:
    """The same run on another number of stages."""
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


def windows_of_stages(model: ModelProfile, cluster: ClusterSpec) -> list[list[int]]:
    """Of each stage, the windows of its layers (0: none)."""
    layers = cluster.layers_of_stage or split_layers(model.num_layers, cluster.num_stages)
    return [[window for window, _ in kinds] for kinds in model.stage_windows(layers)]


def device_names(cluster: ClusterSpec) -> list[str]:
    """What each device in use is called in messages, by its number.

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
    """
    Raises:
        ConfigError: no such strategy, one that cannot run with these stages, or a run that fixes what plans with stages
            choose.
    """
    strategy, stages = config.plan.strategy, config.cluster.pipeline_stages
    if strategy not in strategy_names():
        known = ", ".join(strategy_names())
        raise ConfigError(f"plan.strategy is {strategy!r}, must be one of {known}; choose one of these")
    if stages == 1 and strategy in STAGED:
        raise ConfigError(
            f"cluster.pipeline_stages is 1, must be at least 2 with plan.strategy={strategy}; raise it or choose "
            "another strategy"
        )
    if stages > 1 and config.train.recompute_layers:
        raise ConfigError(
            f"train.recompute_layers is {config.train.recompute_layers}, must be 0 with cluster.pipeline_stages "
            f"{stages}: plans choose layers for each stage and microbatch; set it to 0"
        )
