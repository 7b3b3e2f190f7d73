"""When a run saves, and from where it goes on."""

import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rayfcp.cluster.checkpoints import CheckpointFolder, Manifest, check_same_model, read_manifest
from rayfcp.cluster.crew import Crew
from rayfcp.config import Config, ConfigError
from rayfcp.data import Sampler
from rayfcp.execute.reports import RankReport
from rayfcp.telemetry.metrics import MetricsExporter
from rayfcp.telemetry.steps import read_steps


class Saver:
    """Saves every `checkpoint.every_steps` steps in the background and once at the end.

    A checkpoint is committed when all ranks have reported that their part is on disk; a step later, or
    many, the training goes on meanwhile.
    """

    def __init__(self, config: Config, *, sampler: Sampler, model: dict[str, Any]) -> None:
        self._config, self._sampler, self._model = config, sampler, _comparable(model)
        self._folder = CheckpointFolder(Path(config.run_dir) / "checkpoints", keep=config.checkpoint.keep)
        self._folder.open()
        self._pending: int | None = None
        self._seconds = 0.0
        self._waiting: set[int] = set()
        self._from = self._source()
        self._saved_step = 0
        if self._from is not None:
            manifest = read_manifest(self._from)
            check_same_model(manifest, self._model)
            _check_same_data(sampler, manifest.data)
            self._saved_step = manifest.step
        self.first_step = self._saved_step + 1
        if config.checkpoint.resume != "auto":
            put_aside(Path(config.run_dir), after_step=self._saved_step)

    @property
    def source(self) -> str | None:
        """The checkpoint that the run goes on from."""
        return str(self._from) if self._from else None

    def resume(self, crew: Crew) -> None:
        """Load the checkpoint that the run goes on from, if there is one."""
        if self._from is not None:
            folder = str(self._from)
            crew.each(lambda _, worker: worker.load.remote(folder))

    def after_step(self, step: int, crew: Crew, *, ranks: Sequence[RankReport], metrics: MetricsExporter) -> None:
        """Commit what is on disk by now; begin a new write where one is due."""
        for report in ranks:
            if report.saved_s is not None:
                self._waiting.discard(report.number)
                self._seconds = max(self._seconds, report.saved_s)
        if self._pending is not None and not self._waiting:
            self._commit(len(ranks), metrics)
        every = self._config.checkpoint.every_steps
        if every and step % every == 0 and step < self._config.train.steps:
            self._finish(crew, metrics)
            self._begin(step, crew)

    def last(self, step: int, crew: Crew, *, metrics: MetricsExporter) -> Path | None:
        """The checkpoint of the last step, on disk when this returns; None if no step was done at all."""
        self._finish(crew, metrics)
        if step > self._saved_step:
            self._begin(step, crew)
            self._finish(crew, metrics)
        return self._folder.latest()

    def _source(self) -> Path | None:
        resume = self._config.checkpoint.resume
        if resume == "never":
            return None
        return self._folder.latest() if resume == "auto" else Path(resume)

    def _begin(self, step: int, crew: Crew) -> None:
        folder = str(self._folder.unfinished(step).absolute())
        crew.each(lambda _, worker: worker.begin_save.remote(folder))
        self._pending, self._waiting, self._seconds = step, set(range(len(crew))), 0.0

    def _finish(self, crew: Crew, metrics: MetricsExporter) -> None:
        if self._pending is not None:
            seconds = crew.each(lambda _, worker: worker.finish_save.remote())
            self._seconds = max(self._seconds, *seconds)
            self._commit(len(crew), metrics)

    def _commit(self, world_size: int, metrics: MetricsExporter) -> None:
        assert self._pending is not None
        state = self._sampler.state(self._pending)
        self._folder.commit(Manifest(step=self._pending, world_size=world_size, model=self._model, data=state))
        metrics.observe_checkpoint(self._seconds)
        self._saved_step, self._pending = self._pending, None


_IRRELEVANT = ("transformers_version", "dtype", "torch_dtype", "_name_or_path", "architectures")


def put_aside(run_dir: Path, *, after_step: int) -> None:
    """Move checkpoints of later steps, and a copy of a step log that has them, to `earlier-1`, `earlier-2`, ...,
    so that a run that starts again before them neither loses them nor takes them for its own."""
    log = run_dir / "steps.jsonl"
    later = [path for path in CheckpointFolder(run_dir / "checkpoints", keep=1).complete() if _step(path) > after_step]
    has_steps = any(report.step > after_step for report in read_steps(log))
    if not later and not has_steps:
        return
    folder = next(path for number in itertools.count(1) if not (path := run_dir / f"earlier-{number}").exists())
    (folder / "checkpoints").mkdir(parents=True)
    for path in later:
        path.rename(folder / "checkpoints" / path.name)
    if has_steps:
        shutil.copy2(log, folder / log.name)


def _step(checkpoint: Path) -> int:
    return read_manifest(checkpoint).step


def _check_same_data(sampler: Sampler, state: dict[str, Any]) -> None:
    try:
        sampler.check_state(state)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _comparable(model: dict[str, Any]) -> dict[str, Any]:
    """The library's configuration as JSON would give it back, without what says nothing of the weights."""
    kept = {key: value for key, value in model.items() if key not in _IRRELEVANT and not key.startswith("_")}
    try:
        found: dict[str, Any] = json.loads(json.dumps(kept))
    except TypeError as error:
        raise ConfigError(
            f"model.path: its configuration cannot be written as JSON ({error}); choose another"
        ) from error
    return found
