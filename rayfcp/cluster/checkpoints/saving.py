"""Checkpoints of a run: the one that it resumes from, and those that it saves in the background."""

import itertools
import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
from rayfcp.cluster.errors import RunAbortedError
from rayfcp.cluster.recovery.replication import Replication
from rayfcp.cluster.recovery.stores import SnapshotStores
from rayfcp.cluster.runtime import CallError, Task, TaskFailedError
from rayfcp.cluster.workers.group import WorkerGroup
from rayfcp.config import Config, ConfigError
from rayfcp.config.models import TrainConfig
from rayfcp.data import Sampler
from rayfcp.elastic.recoverable import RecoverableState
from rayfcp.execute.reports import FileSum, Joined, SavedPart, find_wrong_size
from rayfcp.execute.state.saving import CopyMissingError
from rayfcp.telemetry.events import COUNTERS_FILE
from rayfcp.telemetry.metrics import MetricsExporter
from rayfcp.telemetry.steps import StepLog, read_steps
from rayfcp.values import StateId

_IRRELEVANT = ("transformers_version", "dtype", "torch_dtype", "_name_or_path", "architectures", "quantization_config")


class Resume:
    """The checkpoint that a run resumes from: `source`, None for initial weights, and its `step`.

    Before `verify` only sizes of files are checked.

    Args:
        owner: id of this controller, which no earlier one had.
        trains: whether the run goes on with the checkpoint's samples and the state of its optimizer.
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
        trains: bool = True,
        reference: Mapping[str, str] | None = None,
    ) -> None:
        self._trains = trains
        self._reference = dict(reference or {})
        self._manifest: Manifest | None = None
        self._frozen: dict[str, str] | None = None
        self._config, self.sampler, self._log = config, sampler, log
        self.folder = CheckpointFolder(
            Path(config.run_dir) / "checkpoints", keep=config.checkpoint.keep, owner=f"{owner}-"
        )
        self.folder.open()
        self.model = comparable_model(model)
        resume = config.checkpoint.resume
        self._named = None if resume in ("auto", "never") else Path(resume)
        self._refused = False
        self.source: Path | None = None
        self.step = self._named_step = 0
        if resume != "never":
            self._choose(find_wrong_size, candidates=[self._named] if self._named else self._own())

    def verify(self, worker_group: WorkerGroup) -> None:
        """Read all of its files, distributed over the workers; the next older checkpoint replaces a damaged one. Put
        later checkpoints and steps aside if the run does not continue them; to be called before the step log opens. Log
        the optimizer options that differ from the checkpoint's."""
        if self.source is not None:
            older = [each for each in self._own() if step_of(each) <= self.step]
            self._choose(_read_by(worker_group), candidates=[self._named] if self._named else older)
        if self._refused or self._config.checkpoint.resume != "auto":
            aside = put_aside(Path(self._config.run_dir), after_step=self.step)
            if aside is not None:
                self._log(f"checkpoints and steps after step {self.step} are in {aside}")
        if self.source is not None and self._trains:
            from rayfcp.execute.state.checkpoint import changed_options

            if changed := changed_options(self.source, step=self.step, config=self._config.train):
                self._log(f"resumed with other optimizer options: {', '.join(changed)}")
            if changed := self._changed_loss():
                self._log(f"resumed with other loss options: {', '.join(changed)}")

    def _changed_loss(self) -> list[str]:
        then = {} if self._manifest is None else self._manifest.loss
        now = self._config.loss.options
        return [f"{name} {then[name]} -> {now[name]}" for name in now if then.get(name, now[name]) != now[name]]

    @property
    def weights(self) -> dict[str, dict[str, str]]:
        """Contents of weights that are in no checkpoint, as `Manifest.weights`."""
        found = {FROZEN: self._frozen or {}, REFERENCE: self._reference}
        return {name: contents for name, contents in found.items() if contents}

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

    def load(self, worker_group: WorkerGroup) -> None:
        """Make the workers load it, if there is one."""
        if self.source is not None:
            folder, only_weights = str(self.source), not self._trains
            worker_group.call(lambda _, worker: worker.load.remote(folder, only_weights=only_weights))

    def fall_back(self, worker_group: WorkerGroup) -> int:
        """Load the newest intact checkpoint of the run; return its step, 0 without one."""
        candidates = self._own()
        if self._named is not None:
            candidates = [each for each in candidates if step_of(each) > self._named_step] + [self._named]
        self.source, self.step = None, 0
        self._choose(_read_by(worker_group), candidates=candidates)
        self.load(worker_group)
        return self.step

    def _own(self) -> list[Path]:
        """Complete checkpoints in the run's folder, newest first."""
        return self.folder.complete()[::-1]

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
        if found is None:
            return
        self.source, manifest = found
        self._manifest = manifest
        check_same_model(replace(manifest, model=comparable_model(manifest.model)), self.model)
        check_same_weights(self.source, self._config.model)
        try:
            if self._trains:
                self.sampler.check_state(manifest.data)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self.step = manifest.step
        if self.source == self._named:
            self._named_step = self.step


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


LOOK_S = 1.0
"""Between two looks at stores while the run waits for a checkpoint."""


@dataclass(slots=True, kw_only=True)
class _Pending:
    """A checkpoint being written from copies of `state`. `numbers`: devices whose copies each node writes. `writes`:
    references of the parts that are being written, by node's; None before the copies are complete. `problem`: of a
    write that failed; `may_retry`: not for want of storage. `commit`: runs once all writes have ended."""

    state: StateId
    folder: Path
    numbers: Mapping[str, Sequence[int]]
    writes: dict[Any, str] | None = None
    parts: list[SavedPart] = field(default_factory=list)
    problem: str = ""
    may_retry: bool = False
    commit: Task | None = None

    @property
    def step(self) -> int:
        return self.state.version


class Saver:
    """Saves every `checkpoint.every_steps` steps in the background, and once at the end.

    Devices copy their state to shared memory and go on; the snapshot store of each node writes these copies, which stay
    until it has, whatever happens to the devices. The checkpoint is committed once all parts are on disk. While a write
    is under way no other begins; one that fails is logged, counted and dropped. `saved_step`: step of the newest
    checkpoint, 0 without one.

    Raises:
        RunAbortedError: from most methods, when more than `checkpoint.max_failures` saves failed in a row.
    """

    def __init__(
        self,
        config: Config,
        *,
        resume: Resume,
        replication: Replication,
        worker_group: WorkerGroup,
        stores: SnapshotStores,
        metrics: MetricsExporter,
        log: Callable[[str], None],
    ) -> None:
        self._config, self.resume, self._folder, self._log = config, resume, resume.folder, log
        self._replication, self._metrics = replication, metrics
        self._workers, self._stores = worker_group, stores
        self._pending: _Pending | None = None
        self._runtime = worker_group.runtime
        self._run_in_background = self._runtime.background("checkpoint-commit")
        self._failures = 0
        self.saved_step = resume.step
        metrics.set_checkpoint(self.saved_step)

    @property
    def saved(self) -> Path | None:
        """The newest checkpoint."""
        return self.resume.source if self.saved_step == self.resume.step else self._folder.latest()

    def fall_back(self) -> int:
        """Load the newest intact checkpoint; return its step, 0 without one."""
        self.abandon()
        if self._pending is not None:
            self._wait(self._pending)
        self.saved_step = self.resume.fall_back(self._workers)
        self._metrics.set_checkpoint(self.saved_step)
        return self.saved_step

    def wants(self, step: int) -> bool:
        """Whether devices shall copy the state after `step` for a checkpoint."""
        return self._is_due(step) and self._pending is None

    def after_step(self, step: int) -> None:
        """Commit a checkpoint that is on disk; begin a write if one is due, for which `wants` was asked before."""
        pending = self._pending
        if pending is not None and pending.writes is None:  # copies are complete before the next update
            self._write(pending)
        self.look()
        if self._is_due(step) and pending is not None:
            self._log(f"checkpoint of step {pending.step} is still being written; that of step {step} is skipped")
        elif self._is_due(step):
            pending = self._begin(step)
            if self._replication.states.here == pending.state:
                self._write(pending)

    def look(self) -> None:
        """Commit a checkpoint that is on disk, if one is being written."""
        pending = self._pending
        if pending is not None and pending.writes is not None:
            self._collect(pending)
            if pending.commit is not None and pending.commit.done():
                self._limit_failures(self._conclude(pending))

    def save_now(self, step: int) -> None:
        """Begin to write the state after `step` steps, which devices hold, unless a write is under way."""
        if self._pending is None and step > self.saved_step:
            self._replication.copy_now(step)
            self._write(self._begin(step))

    def abandon(self) -> None:
        """Give up a checkpoint whose copies may not be complete, as devices were lost."""
        if self._pending is not None and self._pending.writes is None:
            self._pending = None
            self._replication.end_lease()

    def last(self, step: int) -> Path | None:
        """Save the last step, which devices hold, and wait until it is on disk; None if no step was done at all.

        Raises:
            RunAbortedError: it could not be written.
            GroupFailedError: a device is gone before its state was copied.
        """
        pending = self._pending
        if pending is not None:
            if pending.writes is None:
                self._replication.copy_now(step)
            self._wait(pending)
        while step > self.saved_step:
            self._replication.copy_now(step)
            pending = self._begin(step)
            problem = self._wait(pending)
            if problem and not (pending.may_retry and self._failures <= self._config.checkpoint.max_failures):
                raise RunAbortedError(
                    f"the last checkpoint, of step {step}, could not be written ({problem}); {self._remedy()}"
                )
            if problem:
                self._replication.copy_again(step)
        return self._folder.latest()

    def rescue(self, found: RecoverableState) -> str:
        """Save a state of which copies were found, without devices; return the problem, empty if none."""
        if self._pending is not None:
            self._wait(self._pending)
        if found.state is None or found.state.version <= self.saved_step:
            return ""
        numbers = defaultdict(list)
        for copy in found.copies:
            numbers[copy.node_id].append(copy.header.number)
        return self._wait(self._pend(found.state, numbers))

    def _is_due(self, step: int) -> bool:
        every = self._config.checkpoint.every_steps
        return every is not None and step % every == 0 and step < self._config.train.steps

    def _begin(self, step: int) -> _Pending:
        return self._pend(*self._replication.lease(step))

    def _pend(self, state: StateId, numbers: Mapping[str, Sequence[int]]) -> _Pending:
        folder = self._folder.unfinished(state.version).absolute()
        self._pending = _Pending(state=state, folder=folder, numbers=numbers)
        return self._pending

    def _write(self, pending: _Pending) -> None:
        pending.writes = self._stores.save(pending.state, pending.numbers, folder=str(pending.folder))

    def _collect(self, pending: _Pending) -> None:
        """Take up parts that are on disk; commit once no more are written."""
        writes = pending.writes or {}
        for ref in self._runtime.wait_all(list(writes), timeout_s=0):
            node = writes.pop(ref)
            try:
                pending.parts.append(self._runtime.get(ref))
            except TaskFailedError as error:
                pending.problem = " ".join(str(error).split())
                pending.may_retry = isinstance(error.cause, CopyMissingError)
            except CallError as error:
                pending.problem = f"the snapshot store on {node[:8]} is lost: {' '.join(str(error).split())}"
                pending.may_retry = True
                self._stores.replace(node, members=self._workers.all)
        if not writes and pending.commit is None:
            self._replication.end_lease()
            self._commit(pending)

    def _wait(self, pending: _Pending) -> str:
        """Wait until it is committed; return the problem, empty if none."""
        if pending.writes is None:
            self._write(pending)
        end_s = self._runtime.now_s() + self._config.elastic.hang_min_s
        while pending.commit is None:
            self._runtime.wait(list(pending.writes or ()), timeout_s=LOOK_S)
            self._collect(pending)
            if self._runtime.now_s() > end_s:  # a store that hangs would never end its write
                self._stores.end_lost()
                end_s = self._runtime.now_s() + self._config.elastic.hang_min_s
        return self._conclude(pending)

    def _commit(self, pending: _Pending) -> None:
        """Commit in the background: on slow storage renaming and removing are slow too."""
        manifest = Manifest(
            step=pending.step,
            world_size=sum(map(len, pending.numbers.values())),
            model=self.resume.model,
            data=self.resume.sampler.state(pending.step),
            files=tuple(file for part in pending.parts for file in part.files),
            loss=self._config.loss.options,
            weights=self.resume.weights,
        )
        complete = partial(_complete, pending.folder, pending.parts, manifest, train=self._config.train)
        pending.commit = self._run_in_background(_commit, self._folder, pending.folder, complete, pending.problem)

    def _conclude(self, pending: _Pending) -> str:
        """Wait for the commit and count it; return the problem, empty if none."""
        assert pending.commit is not None
        self._pending = None
        problem: str = pending.commit.result()
        if problem:
            self._failures += 1
            self._metrics.count("failed_checkpoints_total")
            self._log(f"checkpoint of step {pending.step} could not be written: {problem}")
        else:
            self.saved_step, self._failures = pending.step, 0
            seconds = max(part.seconds for part in pending.parts)
            self._metrics.observe_checkpoint(seconds, step=pending.step)
        return problem

    def _limit_failures(self, problem: str) -> None:
        most = self._config.checkpoint.max_failures
        if problem and self._failures > most:
            raise RunAbortedError(
                f"{self._failures} checkpoints in a row could not be written, checkpoint.max_failures is {most} "
                f"({problem}); {self._remedy()}"
            )

    def _remedy(self) -> str:
        newest = self._folder.latest()
        return f"the newest good one is {newest or 'none'}; make {self._folder.root} writable, free space, and restart"


def _complete(folder: Path, parts: Sequence[SavedPart], manifest: Manifest, *, train: TrainConfig) -> Manifest:
    """Write the index of a checkpoint; return the manifest with its files."""
    from rayfcp.execute.state.checkpoint import write_index

    files = (*manifest.files, *write_index(folder, parts, step=manifest.step, config=train))
    return replace(manifest, files=tuple(sorted(files, key=lambda file: file.name)))


def _commit(checkpoints: CheckpointFolder, unfinished: Path, complete: Callable[[], Manifest], problem: str) -> str:
    """Complete and commit the checkpoint, or remove it if there is a `problem`; return the problem, empty if none."""
    if not problem:
        try:
            checkpoints.commit(unfinished, complete())
        except OSError as error:
            problem = f"{error.strerror}: {error.filename}"
        except ValueError as error:
            problem = str(error)
    if problem:
        checkpoints.drop(unfinished)
    checkpoints.sweep()
    return problem
