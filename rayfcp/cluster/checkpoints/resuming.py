"""From where a run goes on: the newest checkpoint that is whole, and what happens to later ones."""

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
    newest_whole,
    shares,
    step_of,
)
from rayfcp.cluster.workers.group import Crew
from rayfcp.config import Config, ConfigError
from rayfcp.data import Sampler
from rayfcp.execute.reports import FileSum, find_wrong_size
from rayfcp.telemetry.events import COUNTERS_FILE
from rayfcp.telemetry.steps import StepLog, read_steps

_IRRELEVANT = ("transformers_version", "dtype", "torch_dtype", "_name_or_path", "architectures")


class Resume:
    """The checkpoint that a run goes on from: `folder`, None for a start from first weights, and its `step`.

    Until `verify` only sizes have been looked at.

    Raises:
        ConfigError: the checkpoint named by the user is damaged, none is whole, or it is of another model or data.
    """

    def __init__(
        self,
        config: Config,
        checkpoints: CheckpointFolder,
        *,
        sampler: Sampler,
        model: dict[str, Any],
        say: Callable[[str], None],
    ) -> None:
        self._config, self._checkpoints, self._sampler, self._say = config, checkpoints, sampler, say
        self.model = _comparable(model)
        resume = config.checkpoint.resume
        self._named = None if resume in ("auto", "never") else Path(resume)
        self._refused = False
        self.folder: Path | None = None
        self.step = self._named_step = 0
        if resume != "never":
            self._choose(find_wrong_size, candidates=[self._named] if self._named else self._own())

    def verify(self, crew: Crew) -> None:
        """Read all of its files, shared out over the workers; if it is damaged, the next older takes its place. Then
        later checkpoints and steps are put aside, where the run would not go on with them."""
        if self.folder is not None:
            older = [each for each in self._own() if step_of(each) <= self.step]
            self._choose(_read_by(crew), candidates=[self._named] if self._named else older)
        if self._refused or self._config.checkpoint.resume != "auto":
            aside = put_aside(Path(self._config.run_dir), after_step=self.step)
            if aside is not None:
                self._say(f"what came after step {self.step} is in {aside}")

    def load(self, crew: Crew) -> None:
        """Give it to the workers, if there is one."""
        if self.folder is not None:
            folder = str(self.folder)
            crew.each(lambda _, worker: worker.load.remote(folder))

    def fall_back(self, crew: Crew) -> int:
        """Load the newest whole checkpoint that the run has by now; its step, 0 if it has none."""
        candidates = self._own()
        if self._named is not None:
            candidates = [each for each in candidates if step_of(each) > self._named_step] + [self._named]
        self.folder, self.step = None, 0
        self._choose(_read_by(crew), candidates=candidates)
        self.load(crew)
        return self.step

    def _own(self) -> list[Path]:
        """Complete checkpoints in the run's folder, newest first."""
        return self._checkpoints.complete()[::-1]

    def _choose(self, check: Check, *, candidates: Sequence[Path]) -> None:
        def refuse(text: str) -> None:
            self._refused = True
            self._say(text)

        try:
            found = newest_whole(candidates, check=check, say=refuse)
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


def _read_by(crew: Crew) -> Check:
    """Every worker reads its share of the files."""

    def check(folder: str, sums: Sequence[FileSum]) -> str | None:
        parts = shares(sums, count=len(crew))
        found: list[str | None] = crew.each(lambda number, worker: worker.verify.remote(folder, parts[number]))
        return next((each for each in found if each is not None), None)

    return check


def put_aside(run_dir: Path, *, after_step: int) -> Path | None:
    """Move checkpoints of later steps, and a copy of a step log that has them, to `earlier-1`, `earlier-2`, ...,
    so that a run that starts again before them neither loses them nor takes them for its own; the log ends at
    `after_step` then, and counters of a run that starts over go with the rest. That folder, None if there was
    nothing."""
    log = run_dir / "steps.jsonl"
    later = [
        path for path in CheckpointFolder(run_dir / "checkpoints", keep=1).complete() if step_of(path) > after_step
    ]
    has_steps = any(report.step > after_step for report in read_steps(log))
    if not later and not has_steps:
        return None
    folder = next(path for number in itertools.count(1) if not (path := run_dir / f"earlier-{number}").exists())
    (folder / "checkpoints").mkdir(parents=True)
    for path in later:
        path.rename(folder / "checkpoints" / path.name)
    if has_steps:
        shutil.copy2(log, folder / log.name)
        StepLog(log, resume_step=after_step).close()
    if after_step == 0 and (counters := run_dir / COUNTERS_FILE).exists():
        counters.rename(folder / counters.name)
    return folder


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
