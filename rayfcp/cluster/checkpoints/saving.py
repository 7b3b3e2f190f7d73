"""Saves checkpoints in the background, and handles storage that fails."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayfcp.cluster.checkpoints.folder import CheckpointFolder, Manifest
from rayfcp.cluster.checkpoints.resuming import Resume
from rayfcp.cluster.runtime import Runtime, Task
from rayfcp.cluster.workers.facts import RunAbortedError
from rayfcp.cluster.workers.group import WorkerGroup
from rayfcp.config import Config
from rayfcp.data import Sampler
from rayfcp.execute.reports import RankReport, SavedPart
from rayfcp.telemetry.metrics import MetricsExporter


@dataclass(slots=True, kw_only=True)
class _Pending:
    """A checkpoint being written. `parts`: reports of the devices, by number; `commit`: runs once all have reported."""

    step: int
    folder: Path
    world_size: int
    parts: dict[int, SavedPart] = field(default_factory=dict)
    commit: Task | None = None

    def add(self, number: int, part: SavedPart | None) -> None:
        """Add the report of a device, unless it is of another write."""
        if part is not None and part.folder == str(self.folder):
            self.parts[number] = part


class Saver:
    """Saves every `checkpoint.every_steps` steps in the background, and once at the end.

    A checkpoint is committed when all devices have reported that their part is on disk; training continues meanwhile.
    While a write is under way no other begins; one that fails is logged, counted and dropped.

    Raises:
        CannotGoOnError: from most methods, when more than `checkpoint.max_failures` saves failed in a row.
    """

    def __init__(
        self,
        config: Config,
        *,
        runtime: Runtime,
        sampler: Sampler,
        model: dict[str, Any],
        log: Callable[[str], None],
    ) -> None:
        self._config, self._sampler, self._log = config, sampler, log
        self._folder = CheckpointFolder(
            Path(config.run_dir) / "checkpoints", keep=config.checkpoint.keep, owner=f"{runtime.new_id()}-"
        )
        self._folder.open()
        self._resume = Resume(config, self._folder, sampler=sampler, model=model, log=log)
        self._pending: _Pending | None = None
        self._committer = runtime.background("checkpoint-commit")
        self._failures = 0
        self._saved_step = self._resume.step

    @property
    def first_step(self) -> int:
        """The step after the checkpoint that the run resumes from."""
        return self._resume.step + 1

    @property
    def source(self) -> str | None:
        """The checkpoint that the run resumes from."""
        return str(self._resume.folder) if self._resume.folder else None

    @property
    def saved_step(self) -> int:
        """Step of the newest checkpoint, 0 without one."""
        return self._saved_step

    @property
    def saved(self) -> str | None:
        """The newest checkpoint."""
        return self.source if self._saved_step == self._resume.step else str(self._folder.latest())

    def verify(self, worker_group: WorkerGroup) -> None:
        """Read the checkpoint that the run resumes from completely, and put later ones aside if the run leaves them. To
        be called before the step log is opened."""
        self._resume.verify(worker_group)
        self._saved_step = self._resume.step

    def resume(self, worker_group: WorkerGroup) -> None:
        """Load the checkpoint that the run resumes from, if any."""
        self._resume.load(worker_group)

    def fall_back(self, worker_group: WorkerGroup, *, metrics: MetricsExporter) -> int:
        """Load the newest intact checkpoint; return its step, 0 without one."""
        if self._pending is not None:  # abandoned if it was not on disk
            pending = self._pending
            self._note(pending, self._conclude(pending), metrics=metrics)
        self._saved_step = self._resume.fall_back(worker_group)
        metrics.set_checkpoint(self._saved_step)
        return self._saved_step

    def after_step(
        self, step: int, worker_group: WorkerGroup, *, ranks: Sequence[RankReport], metrics: MetricsExporter
    ) -> None:
        """Commit a checkpoint that is on disk; begin a write if one is due."""
        pending = self._pending
        if pending is not None:
            for report in ranks:
                pending.add(report.number, report.saved)
            if pending.commit is None and len(pending.parts) == pending.world_size:
                self._commit(pending)
            if pending.commit is not None and pending.commit.done():
                self._count(pending, self._conclude(pending), metrics=metrics)
        every = self._config.checkpoint.every_steps
        if every and step % every == 0 and step < self._config.train.steps:
            if self._pending is None:
                self._begin(step, worker_group)
            else:
                self._log(
                    f"checkpoint of step {self._pending.step} is still being written; that of step {step} is skipped"
                )

    def save_now(self, step: int, worker_group: WorkerGroup) -> None:
        """Begin a write, unless one is under way."""
        if self._pending is None and step > self._saved_step:
            self._begin(step, worker_group)

    def finish(self, worker_group: WorkerGroup, *, metrics: MetricsExporter) -> None:
        """Wait for the write under way and commit it, before devices leave."""
        if self._pending is not None:
            pending = self._pending
            self._count(pending, self._wait(pending, worker_group), metrics=metrics)

    def abandon(self) -> None:
        """Give up the write under way, as devices were lost, unless all of it is on disk. Its folder is removed later,
        since remaining devices may still write there."""
        if self._pending is not None and self._pending.commit is None:
            self._folder.drop(self._pending.folder)
            self._pending = None

    def last(self, step: int, worker_group: WorkerGroup, *, metrics: MetricsExporter) -> Path | None:
        """Save the last step and wait until it is on disk; None if no step was done at all.

        Raises:
            CannotGoOnError: it could not be written.
        """
        if self._pending is not None:
            self._note(self._pending, self._wait(self._pending, worker_group), metrics=metrics)
        if step > self._saved_step:
            pending = self._begin(step, worker_group)
            problem = self._wait(pending, worker_group)
            self._note(pending, problem, metrics=metrics)
            if problem:
                raise RunAbortedError(
                    f"the last checkpoint, of step {step}, could not be written ({problem}); {self._remedy()}"
                )
        return self._folder.latest()

    def _begin(self, step: int, worker_group: WorkerGroup) -> _Pending:
        folder = self._folder.unfinished(step).absolute()
        # Set before the calls: a loss during them must find what to give up.
        pending = self._pending = _Pending(step=step, folder=folder, world_size=len(worker_group))
        worker_group.call(lambda _, worker: worker.begin_save.remote(str(folder)))
        return pending

    def _wait(self, pending: _Pending, worker_group: WorkerGroup) -> str:
        """Wait until it is committed; return the problem, empty if none."""
        if pending.commit is None:
            for number, part in enumerate(worker_group.call(lambda _, worker: worker.finish_save.remote())):
                pending.add(number, part)
            self._commit(pending)
        return self._conclude(pending)

    def _commit(self, pending: _Pending) -> None:
        """Commit in the background: on slow storage renaming and removing are slow too."""
        parts = [part for _, part in sorted(pending.parts.items())]
        manifest = Manifest(
            step=pending.step,
            world_size=pending.world_size,
            model=self._resume.model,
            data=self._sampler.state(pending.step),
            files=tuple(sorted((each for part in parts for each in part.files), key=lambda file: file.name)),
        )
        problem = next((part.error for part in parts if part.error), "")
        if len(parts) < pending.world_size:
            problem = f"{len(parts)} of {pending.world_size} devices wrote their part"
        pending.commit = self._committer.submit(_commit, self._folder, pending.folder, manifest, problem)

    def _conclude(self, pending: _Pending) -> str:
        assert pending.commit is not None
        self._pending = None
        problem: str = pending.commit.result()
        if not problem:
            self._saved_step, self._failures = pending.step, 0
        return problem

    def _note(self, pending: _Pending, problem: str, *, metrics: MetricsExporter) -> None:
        if not problem:
            metrics.observe_checkpoint(max(part.seconds for part in pending.parts.values()), step=pending.step)
            return
        self._failures += 1
        metrics.count_failed_checkpoint()
        self._log(f"checkpoint of step {pending.step} could not be written: {problem}")

    def _count(self, pending: _Pending, problem: str, *, metrics: MetricsExporter) -> None:
        self._note(pending, problem, metrics=metrics)
        most = self._config.checkpoint.max_failures
        if problem and self._failures > most:
            raise RunAbortedError(
                f"{self._failures} checkpoints in a row could not be written, checkpoint.max_failures is {most} "
                f"({problem}); {self._remedy()}"
            )

    def _remedy(self) -> str:
        newest = self._folder.latest()
        return f"the newest good one is {newest or 'none'}; make {self._folder.root} writable, free space, and restart"


def _commit(checkpoints: CheckpointFolder, unfinished: Path, manifest: Manifest, problem: str) -> str:
    """Commit the checkpoint, or remove it if there is a `problem`; return the problem, empty if none."""
    if not problem:
        try:
            checkpoints.commit(unfinished, manifest)
        except OSError as error:
            problem = f"{error.strerror}: {error.filename}"
    if problem:
        checkpoints.drop(unfinished)
    checkpoints.sweep()
    return problem
