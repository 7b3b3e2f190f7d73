"""What a configuration asks of machines, as far as it can be told without them."""

from pathlib import Path

from rayfcp.cluster.doctor.facts import Needs
from rayfcp.config import Config, ConfigError

CHECKPOINT_BYTES = 12
"""A parameter: its fp32 value and Adam's two moments."""


def needs_of(config: Config) -> Needs:
    """Of a run; local paths only."""
    data = config.data
    named = [*data.paths, config.model.path, data.tokenizer, data.processor, data.cache_dir]
    return Needs(
        device=config.cluster.device,
        min_workers=config.cluster.min_workers,
        max_workers=config.cluster.max_workers,
        threads_per_worker=config.train.threads_per_worker,
        planner_actors=config.plan.planner_actors,
        run_dir=config.run_dir,
        paths=tuple(dict.fromkeys(path for path in named if path is not None and _is_local(path))),
        checkpoint_bytes=_checkpoint_bytes(config),
        kept_checkpoints=config.checkpoint.keep,
        metrics_host=config.metrics.host,
        metrics_port=config.metrics.port,
    )


def _is_local(path: str) -> bool:
    """Neither a URL, nor a name that the hub of models or rayfcp itself knows."""
    return "://" not in path and (path.startswith(("/", ".", "~")) or Path(path).exists())


def _checkpoint_bytes(config: Config) -> int | None:
    """None where the model's shape cannot be told here, for want of its folder or of torch."""
    from rayfcp.cluster.declared import model_of

    try:
        return CHECKPOINT_BYTES * model_of(config).num_parameters
    except (ConfigError, ImportError):
        return None
