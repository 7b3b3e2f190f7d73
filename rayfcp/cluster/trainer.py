"""Ray for a run: the cluster that is there, or one of our own on this machine.

What a run does with files before and after it: preparing data, exporting a checkpoint.

`FlexTrainer`: a run from a user's process, with Ray Train's types outside.
"""

import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from rayfcp.cluster.checkpoints.folder import CheckpointFolder, newest_whole
from rayfcp.cluster.controller.following import Watcher, follow, sigterm_interrupts
from rayfcp.cluster.controller.training import Outcome
from rayfcp.cluster.lock import check_free
from rayfcp.cluster.planning.capacity import configured_bound
from rayfcp.cluster.runtime.on_ray import RayRuntime
from rayfcp.cluster.workers.facts import check_layout
from rayfcp.cluster.workers.placement import RESOURCES
from rayfcp.cluster.workers.worker import RankWorker
from rayfcp.config import Config, ConfigError, load_config, parse_config
from rayfcp.data import PreparedManifest, cached_prepare, prepare, tokenizer_of
from rayfcp.execute.reports import find_damage
from rayfcp.telemetry.loggers.interface import check_loggers
from rayfcp.values import StepReport

if TYPE_CHECKING:
    from ray.train import Result, RunConfig, ScalingConfig


CONTROLLER_CPUS = 1


def connect(config: Config) -> bool:
    """Make Ray usable; True if it was started here and should be shut down at the end.

    A Ray that this process already uses is taken. Otherwise `cluster.address` is joined, or a local
    Ray is started with as many logical CPUs as the run's actors ask for, whatever the machine has.

    Raises:
        ConfigError: nothing answers at `cluster.address`.
    """
    if ray.is_initialized():
        return False
    if config.cluster.address is not None:
        try:
            ray.init(address=config.cluster.address, logging_level=logging.WARNING, log_to_driver=False)
        except (ConnectionError, ValueError) as error:
            raise ConfigError(
                f"cluster.address is {config.cluster.address!r}, no Ray lets us in there ({error}); start one with "
                "'ray start --head', set RAY_AUTH_MODE=token if it wants a token, or leave the address out"
            ) from error
        return True
    workers = config.cluster.max_workers * config.train.threads_per_worker
    decoders = config.data.decoder_actors if config.data.processor else 0
    ray.init(
        address="local",
        num_cpus=workers + config.plan.planner_actors + decoders + CONTROLLER_CPUS,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    _check_local(config)
    return True


def _check_local(config: Config) -> None:
    """This machine gets no further devices, so waiting for them would be in vain.

    Raises:
        ConfigError: fewer accelerators than the run needs.
    """
    name = RESOURCES.get(config.cluster.device)
    have = int(ray.cluster_resources().get(name, 0)) if name else 0
    if name and have < config.cluster.min_workers:
        ray.shutdown()
        raise ConfigError(
            f"cluster.num_workers is {config.cluster.min_workers} with cluster.device={config.cluster.device}, this "
            f"machine has {have} {name}; ask for fewer, set cluster.device=cpu, or name a cluster in cluster.address"
        )


def with_absolute_paths(config: Config) -> Config:
    """Local paths that exist, made absolute: actors run in other folders than the user."""
    tokenizer, resume, metrics = config.data.tokenizer, config.checkpoint.resume, config.metrics
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": _absolute(config.model.path)}),
            "data": config.data.model_copy(
                update={
                    "paths": tuple(_absolute(path) for path in config.data.paths),
                    "tokenizer": tokenizer if tokenizer == "bytes" else _absolute(tokenizer),
                    "processor": _absolute(config.data.processor),
                }
            ),
            "checkpoint": config.checkpoint.model_copy(
                update={"resume": resume if resume in ("auto", "never") else _absolute(resume)}
            ),
            "metrics": metrics.model_copy(update={"token_file": _absolute(metrics.token_file)}),
        }
    )


def _absolute(path: str | None) -> str | None:
    return str(Path(path).absolute()) if path is not None and Path(path).exists() else path


def prepared_data(config: Config, *, say: Callable[[str], None]) -> str:
    """The folder of the run's tokens: `data.paths` itself if prepared, else prepared once into the cache,
    which is `data.cache_dir` or `.data` beside the run's folder."""
    cache = config.data.cache_dir or str(Path(config.run_dir).absolute().parent / ".data")
    manifest = cached_prepare(
        config.data, cache_dir=cache, progress=lambda done, total: say(f"tokenising: {done / max(total, 1):.0%}")
    )
    say(f"data in {manifest}")
    return manifest.folder


def prepare_data(config: Config, *, out_dir: str, say: Callable[[str], None]) -> PreparedManifest:
    """Tokenise `config.data` into shards in `out_dir`, on the cluster of the configuration.

    Raises:
        ConfigError: as `rayfcp.data.prepare`.
    """
    started_here = connect(config)
    try:
        return prepare(
            config.data, out_dir=out_dir, progress=lambda done, total: say(f"tokenising: {done / max(total, 1):.0%}")
        )
    finally:
        if started_here:
            ray.shutdown()


def export_run(run_dir: str | Path, *, out_dir: str | Path, say: Callable[[str], object] = lambda _: None) -> Path:
    """Write the newest whole checkpoint of a run as a Hugging Face folder; the checkpoint that was taken. `say` hears
    of damaged ones that are newer.

    Raises:
        ConfigError: no run or no whole checkpoint in `run_dir`, or `out_dir` is not empty.
    """
    from rayfcp.models.export import export_checkpoint

    config = load_config(Path(run_dir) / "config.yaml")
    folder = Path(run_dir) / "checkpoints"
    candidates = CheckpointFolder(folder, keep=config.checkpoint.keep).complete()[::-1]
    found = newest_whole(candidates, check=find_damage, say=say)
    if found is None:
        raise ConfigError(f"RUN_DIR is {run_dir}, no complete checkpoint is in {folder}; let the run save one first")
    checkpoint, manifest = found
    export_checkpoint(config, checkpoint, out_dir=out_dir, vocab_size=int(manifest.model["vocab_size"]))
    return checkpoint


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
