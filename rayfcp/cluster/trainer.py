"""`FlexTrainer`: a run from a user's process, with Ray Train's types; preparing data and exporting checkpoints."""

import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from rayfcp.cluster.checkpoints.folder import (
    FROZEN,
    check_same_model,
    chosen_checkpoint,
    first_init,
    resumed_checkpoint,
)
from rayfcp.cluster.checkpoints.saving import comparable_model
from rayfcp.cluster.controller.following import Watcher, follow, sigterm_interrupts
from rayfcp.cluster.controller.training import Outcome
from rayfcp.cluster.dataset import described_model, model_of_checkpoint
from rayfcp.cluster.lock import check_free, check_writable
from rayfcp.cluster.planning.capacity import configured_bound
from rayfcp.cluster.recovery.store import SnapshotStore
from rayfcp.cluster.references import check_reference, reference_sums
from rayfcp.cluster.runtime.on_ray import RayRuntime
from rayfcp.cluster.workers.facts import check_layout
from rayfcp.cluster.workers.starting import other_cpus
from rayfcp.cluster.workers.worker import DeviceWorker
from rayfcp.config import Config, ConfigError, load_config, parse_config
from rayfcp.config.data import SourceConfig
from rayfcp.config.loading import read_recorded
from rayfcp.data import LengthIndex, cached_prepare, prepare, run_tokenizer
from rayfcp.execute.reports import find_damage
from rayfcp.telemetry.loggers.interface import check_loggers
from rayfcp.telemetry.progress import Progress
from rayfcp.values import StepReport
from rayfcp.values.devices import AUTO, DEVICES

if TYPE_CHECKING:
    from ray.train import Result, RunConfig, ScalingConfig


@contextmanager
def connected(config: Config) -> Iterator[None]:
    """Connect to Ray; one that was not connected before is left at the end.

    A Ray that this process already uses is taken. Otherwise `cluster.address` is joined, or a local Ray is started
    with as many logical CPUs as the run's actors request, whatever the machine has; more planners than the fewest
    only get those that it has.

    Raises:
        ConfigError: nothing answers at `cluster.address`, or a local Ray has fewer accelerators than the run needs.
    """
    if ray.is_initialized():
        yield
        return
    address = config.cluster.address
    if address is None:
        _start_local(config)
    else:
        try:
            ray.init(address=address, logging_level=logging.WARNING, log_to_driver=False)
        except (ConnectionError, ValueError) as error:
            raise ConfigError(
                f"cluster.address is {address!r}, no Ray accepts connections there ({error}); start one with 'ray "
                "start --head', set RAY_AUTH_MODE=token if it wants a token, or leave the address out"
            ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _start_local(config: Config) -> None:
    cluster = config.cluster
    others = other_cpus(config)
    least, most = config.plan.planner_bounds
    ray.init(
        address="local",
        num_cpus=others + max(least, min(most, (os.cpu_count() or 1) - others)),
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    name = None if cluster.device == AUTO else DEVICES[cluster.device].resource
    have = int(ray.cluster_resources().get(name, 0)) if name else 0
    if name and have < cluster.min_workers:
        ray.shutdown()
        raise ConfigError(
            f"cluster.num_workers is {cluster.min_workers} with cluster.device={cluster.device}, this machine has "
            f"{have} {name}; ask for fewer, set cluster.device=cpu, or name a cluster in cluster.address"
        )


def with_absolute_paths(config: Config) -> Config:
    """`config` with existing local paths made absolute, as actors run in other folders."""
    data, resume = config.data, config.checkpoint.resume
    return config.changed(
        model={"path": _absolute(config.model.path)},
        data={
            **_absolute_source(data),
            "sources": {name: {**dict(source), **_absolute_source(source)} for name, source in data.sources.items()},
            "tokenizer": data.tokenizer if data.tokenizer == "bytes" else _absolute(data.tokenizer),
            "processor": _absolute(data.processor),
        },
        loss={"reference": _absolute(config.loss.reference)},
        eval={
            "sets": {
                name: each.model_dump() | {"paths": [_absolute(path) for path in each.paths]}
                for name, each in config.eval.sets.items()
            }
        },
        checkpoint={"resume": resume if resume in ("auto", "never") else _absolute(resume)},
        metrics={"token_file": _absolute(config.metrics.token_file)},
    )


def _absolute_source(source: SourceConfig) -> dict[str, Any]:
    return {"paths": [_absolute(path) for path in source.paths], "chat_template": _absolute(source.chat_template)}


def _absolute(path: str | None) -> str | None:
    return str(Path(path).absolute()) if path is not None and Path(path).exists() else path


def prepared_data(config: Config, *, log: Callable[[str], None]) -> str:
    """Folder of the run's tokens: `data.paths` itself if prepared, else prepared once into the cache, which is
    `data.cache_dir` or `.data` beside the run directory."""
    if config.data.streaming:
        from rayfcp.data.stream import open_stream

        return open_stream(config.data, cache_dir=cache_of(config)).folder
    manifest = cached_prepare(config.data, cache_dir=cache_of(config), progress=_progress(log))
    log(f"data in {manifest.folder}")
    return manifest.folder


def prepared_sets(config: Config, *, log: Callable[[str], None]) -> dict[str, str]:
    """Folders of the tokens of evaluation sets by name, prepared as `prepared_data` does.

    Raises:
        ConfigError: as `rayfcp.data.cached_prepare`; names the set.
    """
    found = {}
    for name, each in config.eval.sets.items():
        try:
            manifest = cached_prepare(each.source(config.data), cache_dir=cache_of(config), progress=_progress(log))
        except ConfigError as error:
            raise ConfigError(f"eval.sets.{name}: {error}") from error
        log(f"evaluation set {name} in {manifest.folder}")
        found[name] = manifest.folder
    return found


def cache_of(config: Config) -> str:
    """Folder of prepared data and of what is computed for them."""
    return config.data.cache_dir or str(Path(config.run_dir).absolute().parent / ".data")


def prepare_data(config: Config, *, out_dir: str, log: Callable[[str], None]) -> list[str]:
    """Tokenize `config.data` into shards in `out_dir`, on the cluster of the configuration. Return lines on what was
    written, and the account of what was read. The model's vocabulary is not checked.

    Raises:
        ConfigError: as `rayfcp.data.prepare`, or the tokenizer cannot be loaded.
    """
    run_tokenizer(config)
    data = config.data
    with connected(config):
        manifest = prepare(data, out_dir=out_dir, progress=_progress(log))
    index = LengthIndex(manifest, max_seqlen=data.max_seqlen, long_sequences=data.long_sequences, vocab_size=None)
    return [str(manifest), *index.lines()]


def _progress(log: Callable[[str], None]) -> Callable[[int, int], None]:
    return lambda done, total: log(f"tokenizing: {done / max(total, 1):.0%}")


def export_run(
    run_dir: str | Path,
    *,
    out_dir: str | Path,
    step: int | None = None,
    dtype: str | None = None,
    merge: bool = False,
    overrides: Sequence[str] = (),
    log: Callable[[str], object] = lambda _: None,
) -> Path:
    """Export a checkpoint of a run as a Hugging Face folder, and return it: the newest intact one (damaged ones are
    logged), or that of `step`. Weights are written in `dtype`, rounded once; if it is absent, in `model.dtype`, or
    adapters as they were trained. Of a run with adapters, these alone as PEFT writes them, or with `merge` the model
    with them added in. `overrides`: `key=value` over the run's configuration, e.g. `model.path` of a base that moved.

    Raises:
        ConfigError: no run or no intact checkpoint in `run_dir`, none of `step`, `out_dir` is not empty, there are no
            adapters to `merge`, or the base is another one than the run had.
    """
    from transformers import AutoConfig

    from rayfcp.models.export import export_checkpoint
    from rayfcp.models.library import text_of

    config = load_config(read_recorded(run_dir), overrides=overrides)
    checkpoint, manifest = chosen_checkpoint(
        Path(run_dir), keep=config.checkpoint.keep, step=step, check=find_damage, log=log
    )
    # A multimodal model's configuration has its vocabulary in that of its text part.
    vocab_size = text_of(AutoConfig.for_model(**manifest.model)).vocab_size
    trained = replace(manifest, model=comparable_model(manifest.model))
    check_same_model(trained, comparable_model(model_of_checkpoint(config, vocab_size=vocab_size)), resumes=False)
    is_known = bool(manifest.loss)  # otherwise an earlier release wrote it
    if not is_known and (merge or config.model.freeze_vision):
        log(f"{checkpoint.name} does not say which weights were frozen: those of model.path are taken for the same")
    frozen = manifest.weights.get(FROZEN, {}) if is_known else None
    given: dict[str, Any] = {"vocab_size": vocab_size, "dtype": dtype, "merge": merge, "frozen": frozen}
    export_checkpoint(config, checkpoint, out_dir=out_dir, log=log, **given)
    return checkpoint


class FlexTrainer:
    """Trains a language model on the ranks of a Ray cluster, planning every global batch.

    Args:
        config: the run, as `Config` or as nested dict. Ray Train's own configurations override it:
        run_config: `name`, `storage_path` (the run directory is `storage_path/name`), `checkpoint_config`.
        scaling_config: `num_workers` (a number or (min, max)), `use_gpu`.
        worker, store: classes of the actors of devices, and of nodes' snapshot stores.

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
        store: type[SnapshotStore] = SnapshotStore,
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
                given: dict[str, Any] = {"runtime": runtime, "watcher": watcher, "eval_dirs": eval_dirs}
                references = reference_sums(config, data_dir, cache_dir=cache_of(config), **given)
                return follow(config, data_dir, references=references, **given)


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


def check_runnable(config: Config) -> None:
    """Check a configuration before anything starts.

    Raises:
        ConfigError: a strategy, a layout, a logger, a tokenizer or a model that cannot run.
        InfeasiblePlanError: the model does not fit.
    """
    check_layout(config)
    check_loggers(config.metrics.loggers)
    # Imported after the checks above, since the model library imports slowly.
    from rayfcp.models.library import config_at

    if config.model.path is not None:
        config_at(config.model.path)  # before the tokenizer, which is also missing in a folder without a model
    vocab_size = run_tokenizer(config).vocab_size
    from rayfcp.models.describe import check_limits
    from rayfcp.models.pretrained import check_weights
    from rayfcp.models.selfcheck import check_supported
    from rayfcp.models.tensor_parallel import check_tensor_parallel

    library, model = described_model(config, vocab_size=vocab_size)
    check_limits(library, config)
    check_tensor_parallel(library, config.cluster.tensor_parallel)
    check_supported(library, num_stages=config.cluster.pipeline_stages, dtype=config.model.dtype)
    if config.model.init == "pretrained" and config.model.path:
        check_weights(config.model.path, library)
    configured_bound(config, model)
    check_reference(config, vocab_size=model.vocab_size)


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
