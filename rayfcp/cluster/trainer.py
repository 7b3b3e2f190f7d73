"""`FlexTrainer`: a run from a user's process, with Ray Train's types outside."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from rayfcp.cluster.capacity import configured_bound
from rayfcp.cluster.controller import Outcome
from rayfcp.cluster.files import prepared_data, with_absolute_paths
from rayfcp.cluster.following import Watcher, follow
from rayfcp.cluster.layout import check_layout
from rayfcp.cluster.local import connect
from rayfcp.cluster.lock import check_free
from rayfcp.cluster.runtime.on_ray import RayRuntime
from rayfcp.cluster.signals import sigterm_interrupts
from rayfcp.cluster.worker import RankWorker
from rayfcp.config import Config, ConfigError, parse_config
from rayfcp.data import tokenizer_of
from rayfcp.telemetry.loggers.known import check_loggers
from rayfcp.values import StepReport

if TYPE_CHECKING:
    from ray.train import Result, RunConfig, ScalingConfig


class RunFailedError(RuntimeError):
    """The run ended by an error that is not in the configuration; the message holds the worker's traceback."""


class FlexTrainer:
    """Trains a language model on the ranks of a Ray cluster, planning every global batch.

    Args:
        config: the run. Ray Train's own configurations, if given, override it:
        run_config: `name`, `storage_path` (the run's folder is `storage_path/name`), `checkpoint_config`.
        scaling_config: `num_workers` (a number or (min, max)), `use_gpu`.
        worker: the class of the devices' actors.

    Example:
        >>> trainer = FlexTrainer(config)                                     # doctest: +SKIP
        >>> result = trainer.fit()                                            # doctest: +SKIP
        >>> result.metrics["loss"], result.checkpoint.path                    # doctest: +SKIP
    """

    def __init__(
        self,
        config: Config,
        *,
        run_config: "RunConfig | None" = None,
        scaling_config: "ScalingConfig | None" = None,
        worker: type[RankWorker] = RankWorker,
    ) -> None:
        config = _with_scaling(config, scaling_config) if scaling_config else config
        self.config = _with_run(config, run_config) if run_config else config
        self._worker = worker
        check_runnable(self.config)

    def fit(self, *, watcher: Watcher | None = None) -> "Result":
        """Run to the end and give the last step's metrics, the last checkpoint and the run's folder.

        Ctrl-C or SIGTERM ends the run after the step under way with a checkpoint; a second one at once.

        Raises:
            ConfigError, InfeasiblePlanError: the configuration cannot be run; one clear line.
            RunFailedError: a worker or the controller failed; holds the cause.
        """
        from ray.train import Checkpoint, Result

        run_dir = Path(self.config.run_dir).absolute()
        outcome, reports = self._drive(run_dir, watcher or _Silent())
        if outcome.wrong_input:
            raise ConfigError(outcome.error)
        if outcome.finished is None:
            raise RunFailedError(f"{outcome.error}\n{outcome.trace}".rstrip())
        checkpoint = outcome.finished.checkpoint
        metrics = asdict(reports[-1]) if reports else {}
        stopped = outcome.finished.last_step < self.config.train.steps
        about = asdict(outcome.finished) | {"stopped": stopped}
        return Result(
            metrics=metrics | about,
            checkpoint=Checkpoint(checkpoint) if checkpoint else None,
            error=None,
            path=str(run_dir),
        )

    def _drive(self, run_dir: Path, watcher: Watcher) -> tuple[Outcome, list[StepReport]]:
        config = with_absolute_paths(
            self.config.model_copy(update={"run": self.config.run.model_copy(update={"dir": str(run_dir)})})
        )
        with sigterm_interrupts() as heed_sigterm:
            if config.cluster.address is None:
                check_free(run_dir)  # sooner than the controller, which will hold it, can tell: no Ray is started
            watcher.say("connecting to Ray")
            started_here = connect(config)
            heed_sigterm()
            try:
                data_dir = prepared_data(config, say=watcher.say)
                return follow(config, data_dir, runtime=RayRuntime(self._worker), watcher=watcher)
            finally:
                if started_here:
                    ray.shutdown()


def check_runnable(config: Config) -> None:
    """What can be refused before anything starts.

    Raises:
        ConfigError: a strategy, a layout, a logger or a model that cannot run.
        InfeasiblePlanError: the model does not fit.
    """
    check_layout(config)
    check_loggers(config.metrics.loggers)
    _check_model(config)


def _check_model(config: Config) -> None:
    """Model and tokenizer exist, can run, and fit."""
    from rayfcp.models.describe import check_limits, model_config, profile_of
    from rayfcp.models.pretrained import check_weights
    from rayfcp.models.selfcheck import check_supported
    from rayfcp.models.tensor_parallel import check_tensor_parallel

    library = model_config(config.model, vocab_size=tokenizer_of(config.data).vocab_size)
    check_limits(library, config)
    check_tensor_parallel(library, config.cluster.tensor_parallel)
    check_supported(library, num_stages=config.cluster.pipeline_stages)
    if config.model.init == "pretrained" and config.model.path:
        check_weights(config.model.path, library)
    name, frozen = config.model.path or library.model_type, config.model.freeze_vision
    configured_bound(config, profile_of(library, name=name, freeze_vision=frozen))


def _with_scaling(config: Config, scaling: "ScalingConfig") -> Config:
    if scaling.resources_per_worker is not None:
        raise ConfigError(
            "ScalingConfig.resources_per_worker is not honoured; use cluster.device and train.threads_per_worker"
        )
    workers = scaling.num_workers
    update: dict[str, Any] = {"num_workers": list(workers) if isinstance(workers, tuple | list) else workers}
    if scaling.use_gpu:
        update["device"] = "cuda"
    return _updated(config, cluster=update)


def _with_run(config: Config, run: "RunConfig") -> Config:
    """What the user set in a `RunConfig`; a name with the time and a default folder are Ray's own fillings."""
    from ray.train import RunConfig

    if run.failure_config is not None and run.failure_config.max_failures:
        raise ConfigError("FailureConfig.max_failures is not honoured: a failed worker ends the run; leave it 0")
    name = config.run.name if not run.name or run.name.startswith("ray_train_run-") else run.name
    stored = run.storage_path if run.storage_path != RunConfig().storage_path else None
    folder = str(Path(stored) / name) if stored else config.run.dir
    kept = run.checkpoint_config.num_to_keep if run.checkpoint_config else None
    return _updated(config, run={"name": name, "dir": folder}, checkpoint={"keep": kept} if kept else {})


def _updated(config: Config, **sections: dict[str, Any]) -> Config:
    """Some keys of some sections changed, all checked again."""
    raw = config.model_dump()
    for section, values in sections.items():
        raw[section] |= values
    return parse_config(raw)


class _Silent:
    def say(self, text: str) -> None:
        """Nobody listens."""

    def update(self, report: StepReport) -> None:
        """Nobody looks."""
