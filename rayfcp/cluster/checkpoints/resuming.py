"""The checkpoint that a run resumes from: the newest intact one; later ones are put aside."""

import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rayfcp.cluster.checkpoints.folder import (
    Check,
    CheckpointFolder,
    Manifest,
    check_same_model,
    newest_intact,
    shares,
    step_of,
)
from rayfcp.cluster.workers.group import WorkerGroup
from rayfcp.config import Config, ConfigError
from rayfcp.data import Sampler
from rayfcp.execute.reports import FileSum, find_wrong_size
from rayfcp.telemetry.events import COUNTERS_FILE
from rayfcp.telemetry.steps import StepLog, read_steps

_IRRELEVANT = ("transformers_version", "dtype", "torch_dtype", "_name_or_path", "architectures")


class Resume:
    """The checkpoint that a run resumes from: `folder`, None for initial weights, and its `step`.

    Before `verify` only sizes of files are checked.

    Raises:
        ConfigError: the checkpoint named by the user is damaged, none is intact, or it is of another model or data.
    """

    def __init__(
        self,
        config: Config,
        checkpoints: CheckpointFolder,
        *,
        sampler: Sampler,
        model: dict[str, Any],
        log: Callable[[str], None],
    ) -> None:
        self._config, self._checkpoints, self._sampler, self._log = config, checkpoints, sampler, log
        self.model = _comparable(model)
        resume = config.checkpoint.resume
        self._named = None if resume in ("auto", "never") else Path(resume)
        self._refused = False
        self.folder: Path | None = None
        self.step = self._named_step = 0
        if resume != "never":
            self._choose(find_wrong_size, candidates=[self._named] if self._named else self._own())

    def verify(self, worker_group: WorkerGroup) -> None:
        """Read all of its files, distributed over the workers; the next older checkpoint replaces a damaged one. Put
        later checkpoints and steps aside if the run does not continue them."""
        if self.folder is not None:
            older = [each for each in self._own() if step_of(each) <= self.step]
            self._choose(_read_by(worker_group), candidates=[self._named] if self._named else older)
        if self._refused or self._config.checkpoint.resume != "auto":
            aside = put_aside(Path(self._config.run_dir), after_step=self.step)
            if aside is not None:
                self._log(f"checkpoints and steps after step {self.step} are in {aside}")

    def load(self, worker_group: WorkerGroup) -> None:
        """Make the workers load it, if there is one."""
        if self.folder is not None:
            folder = str(self.folder)
            worker_group.call(lambda _, worker: worker.load.remote(folder))

    def fall_back(self, worker_group: WorkerGroup) -> int:
        """Load the newest intact checkpoint of the run; return its step, 0 without one."""
        candidates = self._own()
        if self._named is not None:
            candidates = [each for each in candidates if step_of(each) > self._named_step] + [self._named]
        self.folder, self.step = None, 0
        self._choose(_read_by(worker_group), candidates=candidates)
        self.load(worker_group)
        return self.step

    def _own(self) -> list[Path]:
        """Complete checkpoints in the run's folder, newest first."""
        return self._checkpoints.complete()[::-1]

    def _choose(self, check: Check, *, candidates: Sequence[Path]) -> None:
        def refuse(text: str) -> None:
            self._refused = True
            self._log(text)

        try:
            found = newest_intact(candidates, check=check, log=refuse)
        except ConfigError as error:
            if self._named is not None and len(candidates) == 1:
                raise ConfigError(f"checkpoint.resume is {str(self._named)!r}, {error}") from error
            raise
        if found is not None:
            self.folder, manifest = found
            self._check(manifest)
            self.step = manifest.step
            if self.folder == self._named:
                self._named_step = self.step

    def _check(self, manifest: Manifest) -> None:
        check_same_model(manifest, self.model)
        try:
            self._sampler.check_state(manifest.data)
        except ValueError as error:
            raise ConfigError(str(error)) from error


def _read_by(worker_group: WorkerGroup) -> Check:
    """Check that makes every worker read its share of the files."""

    def check(folder: str, sums: Sequence[FileSum]) -> str | None:
        parts = shares(sums, count=len(worker_group))
        found: list[str | None] = worker_group.call(lambda number, worker: worker.verify.remote(folder, parts[number]))
        return next((each for each in found if each is not None), None)

    return check


def put_aside(run_dir: Path, *, after_step: int) -> Path | None:
    """Move checkpoints of later steps, and a copy of a step log with such steps, to `earlier-1`, `earlier-2`, ...

    A run that restarts before them neither loses them nor takes them for its own; the log ends at `after_step` then,
    and counters of a run that starts over are moved too. Return that folder, None if there was nothing to move.
    """
    step_log = run_dir / "steps.jsonl"
    later = [
        path for path in CheckpointFolder(run_dir / "checkpoints", keep=1).complete() if step_of(path) > after_step
    ]
    has_steps = any(report.step > after_step for report in read_steps(step_log))
    if not later and not has_steps:
        return None
    folder = next(path for number in itertools.count(1) if not (path := run_dir / f"earlier-{number}").exists())
    (folder / "checkpoints").mkdir(parents=True)
    for path in later:
        path.rename(folder / "checkpoints" / path.name)
    if has_steps:
        shutil.copy2(step_log, folder / step_log.name)
        StepLog(step_log, resume_step=after_step).close()
    if after_step == 0 and (counters := run_dir / COUNTERS_FILE).exists():
        counters.rename(folder / counters.name)
    return folder


def _comparable(model: dict[str, Any]) -> dict[str, Any]:
    """The library's configuration after a round trip through JSON, without keys that do not concern the weights."""
    kept = {key: value for key, value in model.items() if key not in _IRRELEVANT and not key.startswith("_")}
    try:
        found: dict[str, Any] = json.loads(json.dumps(kept))
    except TypeError as error:
        raise ConfigError(
            f"model.path: its configuration cannot be written as JSON ({error}); choose another"
        ) from error
    return found
