"""`FlexTrainer`: a run from a user's process, with Ray Train's types."""

import socket
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfcp.cluster.checkpoints.folder import (
    first_init,
    resumed_checkpoint,
)
from rayfcp.cluster.dataset import References, Training, open_dataset
from rayfcp.cluster.driver.connecting import connected
from rayfcp.cluster.driver.following import Watcher, follow, sigterm_interrupts
from rayfcp.cluster.driver.preparing import cache_of, check_runnable, prepared_data, prepared_sets, with_absolute_paths
from rayfcp.cluster.driver.references import has_reference, reference_sums
from rayfcp.cluster.jobs.controller import Outcome
from rayfcp.cluster.recovery.store import CopyStore
from rayfcp.cluster.runtime.on_ray import RayRuntime
from rayfcp.cluster.session.lock import check_free, check_writable
from rayfcp.cluster.workers.worker import DeviceWorker
from rayfcp.config import Config, ConfigError, parse_config
from rayfcp.telemetry.progress import Progress
from rayfcp.values import StepReport

if TYPE_CHECKING:
    from ray.train import Result, RunConfig, ScalingConfig


class FlexTrainer:
    """Trains a language model on the ranks of a Ray cluster, planning every global batch.

    Args:
        config: the run, as `Config` or as nested dict. Ray Train's own configurations override it:
        run_config: `name`, `storage_path` (the run directory is `storage_path/name`), `checkpoint_config`.
        scaling_config: `num_workers` (a number or (min, max)), `use_gpu`.
        worker, store: classes of the actors of devices, and of nodes' copy stores.

    Example:
        >>> trainer = FlexTrainer(config)                                     # doctest: +SKIP
        >>> result = trainer.fit()                                            # doctest: +SKIP
        >>> result.metrics["loss"], result.checkpoint.path                    # doctest: +SKIP
    """

    def __init__(
        self,
        config: Config | Mapping[str, Any],
        *,
        run_config: "RunConfig | None" = None,
        scaling_config: "ScalingConfig | None" = None,
        worker: type[DeviceWorker] = DeviceWorker,
        store: type[CopyStore] = CopyStore,
    ) -> None:
        config = config if isinstance(config, Config) else parse_config(config)
        config = _with_scaling(config, scaling_config) if scaling_config else config
        self.config = with_first_init(_with_run(config, run_config) if run_config else config)
        self._worker, self._store = worker, store
        if self.config.cluster.address is None:
            _check_machine(self.config)
        check_runnable(self.config)

    def fit(self, *, watcher: Watcher | None = None) -> "Result":
        """Run to the end; return the last step's metrics, the last checkpoint and the run directory.

        `watcher` shows the progress, by default on stderr. Ctrl-C or SIGTERM ends the run after the step under way with
        a checkpoint; a second one at once.

        Raises:
            ConfigError, InfeasiblePlanError: the configuration cannot be run; one clear line.
            RunFailedError: a worker or the controller failed; holds the cause.
            KeyboardInterrupt: the user stopped the run while the reference model's log-probabilities were computed.
        """
        from ray.train import Checkpoint, Result

        run_dir = Path(self.config.run_dir).absolute()
        with ExitStack() as stack:
            watcher = watcher or stack.enter_context(Progress(self.config.train.steps))
            outcome, reports = self._drive(run_dir, watcher)
        finished = outcome.checked().finished
        assert finished is not None, "the run did not fail"
        checkpoint = finished.checkpoint
        stopped = finished.last_step < self.config.train.steps
        last = asdict(reports[-1]) if reports else {}
        return Result(
            metrics=last | asdict(finished) | {"stopped": stopped},
            checkpoint=Checkpoint(checkpoint) if checkpoint else None,
            error=None,
            path=str(run_dir),
        )

    def _drive(self, run_dir: Path, watcher: Watcher) -> tuple[Outcome, list[StepReport]]:
        config = with_absolute_paths(self.config.changed(run={"dir": str(run_dir)}))
        with sigterm_interrupts() as heed_sigterm:
            if config.cluster.address is None:
                check_free(run_dir)  # before Ray is started for a controller that would find out
            for line in filter(None, (config.model.weights, config.pictures)):
                watcher.log(line)
            watcher.log("connecting to Ray")
            with connected(config):
                heed_sigterm()
                data_dir = prepared_data(config, log=watcher.log)
                runtime, eval_dirs = RayRuntime(self._worker, self._store), prepared_sets(config, log=watcher.log)
                references = References()
                if has_reference(config):
                    data, cache_dir = open_dataset(config, data_dir=data_dir, eval_dirs=eval_dirs), cache_of(config)
                    references = reference_sums(config, data, cache_dir=cache_dir, runtime=runtime, watcher=watcher)
                job = Training(data_dir=data_dir, eval_dirs=eval_dirs, references=references)
                return follow(config, job, runtime=runtime, watcher=watcher)


def _check_machine(config: Config) -> None:
    """Check what a local run needs of this machine, before anything slow.

    Raises:
        ConfigError: run.dir cannot be written or is in use, or the metrics port is taken.
    """
    run_dir = Path(config.run_dir).absolute()
    check_writable(run_dir)
    check_free(run_dir)
    host, port = config.metrics.host, config.metrics.port
    if port:
        try:
            socket.create_server((host, port)).close()
        except OSError as error:
            raise ConfigError(
                f"metrics.port is {port}, it cannot be opened on {host} ({error.strerror}); choose another, or 0 for a "
                "free one"
            ) from error


def with_first_init(config: Config) -> Config:
    """Return `config` with `model.init` of the run that it resumes, where the user left it to the default: runs of
    earlier releases began with random weights then."""
    if "init" in config.model.model_fields_set or config.model.path is None:
        return config
    checkpoint = resumed_checkpoint(config)
    then = None if checkpoint is None else first_init(checkpoint)
    return config if then in (None, config.model.init) else config.changed(model={"init": then})


def _with_scaling(config: Config, scaling: "ScalingConfig") -> Config:
    if scaling.resources_per_worker is not None:
        raise ConfigError(
            "ScalingConfig.resources_per_worker is not supported; use cluster.device and train.threads_per_worker"
        )
    workers = scaling.num_workers
    update: dict[str, Any] = {"num_workers": list(workers) if isinstance(workers, tuple | list) else workers}
    if scaling.use_gpu:
        update["device"] = "cuda"
    return config.changed(cluster=update)


def _with_run(config: Config, run: "RunConfig") -> Config:
    """`config` with what the user set in a `RunConfig`; Ray fills in a name with the time and a default folder."""
    from ray.train import RunConfig

    if run.failure_config is not None and run.failure_config.max_failures:
        raise ConfigError(
            "FailureConfig.max_failures is not supported: lost workers are replaced anyway (elastic.*); leave it 0"
        )
    name = config.run.name if not run.name or run.name.startswith("ray_train_run-") else run.name
    stored = run.storage_path if run.storage_path != RunConfig().storage_path else None
    folder = str(Path(stored) / name) if stored else config.run.dir
    kept = run.checkpoint_config.num_to_keep if run.checkpoint_config else None
    return config.changed(run={"name": name, "dir": folder}, checkpoint={"keep": kept} if kept else {})
