"""The checkpoint that devices load: its weights alone, or all that a run resumes from."""

import itertools
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rayfcp.cluster.checkpoints.folder import (
    FROZEN,
    REFERENCE,
    Check,
    CheckpointFolder,
    Manifest,
    check_same_model,
    check_same_weights,
    newest_intact,
    shares,
    step_of,
)
from rayfcp.cluster.workers.group import WorkerGroup
from rayfcp.config import Config, ConfigError
from rayfcp.data import Sampler
from rayfcp.execute.reports import FileSum, Joined, find_wrong_size
from rayfcp.telemetry.events import COUNTERS_FILE
from rayfcp.telemetry.steps import StepLog, read_steps

_IRRELEVANT = ("transformers_version", "dtype", "torch_dtype", "_name_or_path", "architectures", "quantization_config")


class Weights:
    """Weights that devices load: those of the checkpoint `source` after `step` steps, initial ones if it is None.

    Args:
        named: the checkpoint, of which only sizes of files are checked before `verify`.
        model: identity of the model, as a manifest has it.

    Raises:
        ConfigError: the checkpoint is damaged, or of another model.
    """

    def __init__(
        self, config: Config, *, named: Path | None, model: dict[str, Any], log: Callable[[str], None]
    ) -> None:
        self._config, self._named, self._log = config, named, log
        self.model = comparable_model(model)
        self.source: Path | None = None
        self.step = 0
        self._manifest: Manifest | None = None
        self._frozen: dict[str, str] | None = None
        self._refused = False
        self._choose(find_wrong_size, candidates=self._candidates())

    def verify(self, worker_group: WorkerGroup) -> None:
        """Read all of its files, distributed over the workers."""
        if self.source is not None:
            self._choose(_read_by(worker_group), candidates=self._candidates())

    def check_weights(self, joined: Sequence[Joined]) -> None:
        """Check that weights which devices have read and do not train equal those of the checkpoint, or those that the
        run began with.

        Raises:
            ConfigError: They differ, and `checkpoint.accept_other_weights` is not set.
        """
        from rayfcp.execute.state.identity import check_contents, first_weights

        read, config = (part for each in joined for part in each.weights), self._config
        found, known = first_weights(config.model, seed=config.run.seed, read=read), self._frozen
        if found and known is None and self._manifest is not None:
            known = self._manifest.weights.get(FROZEN)
            if known is None:
                self._log(
                    f"the checkpoint of step {self._manifest.step} does not say which weights were frozen: those of "
                    "model.path are taken for the same"
                )
        if known is not None:
            check_contents(found, known, config=config, key="model.path", log=self._log)
        self._frozen = found

    def load(self, worker_group: WorkerGroup, *, only_weights: bool = True) -> None:
        """Make the workers load the checkpoint, if there is one; with the state of the optimizer unless
        `only_weights`."""
        if self.source is not None:
            folder = str(self.source)
            worker_group.call(lambda _, worker: worker.load.remote(folder, only_weights=only_weights))

    def _candidates(self) -> list[Path]:
        """Return the checkpoints that may be loaded, the best first."""
        return [self._named] if self._named else []

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
            self.source, manifest = found
            self._manifest = manifest
            check_same_model(replace(manifest, model=comparable_model(manifest.model)), self.model)
            check_same_weights(self.source, self._config.model)
            self.step = manifest.step


class Resume(Weights):
    """The checkpoint that a training resumes from: the one that the user named, else the newest intact one.

    Args:
        owner: id of this controller, which no earlier one had.
        reference: contents of the weights of the reference model, keyed by tensor.

    Raises:
        ConfigError: the checkpoint named by the user is damaged, none is intact, or it is of another model or data.
    """

    def __init__(
        self,
        config: Config,
        *,
        owner: str,
        sampler: Sampler,
        model: dict[str, Any],
        log: Callable[[str], None],
        reference: Mapping[str, str] | None = None,
    ) -> None:
        self.sampler, self._reference = sampler, dict(reference or {})
        self.folder = CheckpointFolder(
            Path(config.run_dir) / "checkpoints", keep=config.checkpoint.keep, owner=f"{owner}-"
        )
        self.folder.open()
        self._mode = config.checkpoint.resume
        super().__init__(
            config, named=None if self._mode in ("auto", "never") else Path(self._mode), model=model, log=log
        )
        self._named_step = self.step if self._named else 0

    def verify(self, worker_group: WorkerGroup) -> None:
        """Read all of its files, distributed over the workers; the next older checkpoint replaces a damaged one. Put
        later checkpoints and steps aside if the run does not continue them; to be called before the step log opens. Log
        the options that differ from the checkpoint's."""
        super().verify(worker_group)
        if self._refused or self._mode != "auto":
            aside = put_aside(Path(self._config.run_dir), after_step=self.step)
            if aside is not None:
                self._log(f"checkpoints and steps after step {self.step} are in {aside}")
        if self.source is not None:
            from rayfcp.execute.state.checkpoint import changed_options

            if changed := changed_options(self.source, step=self.step, config=self._config.train):
                self._log(f"resumed with other optimizer options: {', '.join(changed)}")
            if changed := self._changed_loss():
                self._log(f"resumed with other loss options: {', '.join(changed)}")

    @property
    def weights(self) -> dict[str, dict[str, str]]:
        """Contents of weights that are in no checkpoint, as `Manifest.weights`."""
        found = {FROZEN: self._frozen or {}, REFERENCE: self._reference}
        return {name: contents for name, contents in found.items() if contents}

    def load(self, worker_group: WorkerGroup, *, only_weights: bool = False) -> None:
        super().load(worker_group, only_weights=only_weights)

    def fall_back(self, worker_group: WorkerGroup) -> int:
        """Load the newest intact checkpoint of the run; return its step, 0 without one."""
        candidates = self.folder.complete()[::-1]
        if self._named is not None:
            candidates = [each for each in candidates if step_of(each) > self._named_step] + [self._named]
        self.source, self.step = None, 0
        self._choose(_read_by(worker_group), candidates=candidates)
        self.load(worker_group)
        return self.step

    def _candidates(self) -> list[Path]:
        if self._mode != "auto":
            return super()._candidates()
        newest_first = self.folder.complete()[::-1]
        return newest_first if self.source is None else [each for each in newest_first if step_of(each) <= self.step]

    def _choose(self, check: Check, *, candidates: Sequence[Path]) -> None:
        super()._choose(check, candidates=candidates)
        if self._manifest is not None and self.source is not None:
            try:
                self.sampler.check_state(self._manifest.data)
            except ValueError as error:
                raise ConfigError(str(error)) from error
            if self.source == self._named:
                self._named_step = self.step

    def _changed_loss(self) -> list[str]:
        then = {} if self._manifest is None else self._manifest.loss
        now = self._config.loss.options
        return [f"{name} {then[name]} -> {now[name]}" for name in now if then.get(name, now[name]) != now[name]]


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


def comparable_model(model: dict[str, Any]) -> dict[str, Any]:
    """The library's configuration after a round trip through JSON, without keys that do not concern the weights."""
    kept = {key: value for key, value in model.items() if key not in _IRRELEVANT and not key.startswith("_")}
    try:
        found: dict[str, Any] = json.loads(json.dumps(kept))
    except TypeError as error:
        raise ConfigError(
            f"model.path: its configuration cannot be written as JSON ({error}); choose another"
        ) from error
    return found
