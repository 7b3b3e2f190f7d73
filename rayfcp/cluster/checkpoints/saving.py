"""When a run saves, and what it does where storage fails."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayfcp.cluster.checkpoints.folder import CheckpointFolder, Manifest
from rayfcp.cluster.checkpoints.resuming import Resume
from rayfcp.cluster.runtime import Runtime, Task
from rayfcp.cluster.workers.facts import CannotGoOnError
from rayfcp.cluster.workers.group import Crew
from rayfcp.config import Config
from rayfcp.data import Sampler
from rayfcp.execute.reports import RankReport, SavedPart
from rayfcp.telemetry.metrics import MetricsExporter


@dataclass(slots=True, kw_only=True)
class _Pending:
    """A checkpoint on its way to disk. `parts`: what devices said of theirs, by number; `commit`: once all did."""

    step: int
    folder: Path
    world_size: int
    parts: dict[int, SavedPart] = field(default_factory=dict)
    commit: Task | None = None

    def hear(self, number: int, part: SavedPart | None) -> None:
        """What device `number` says; what it says of another write is dropped."""
        if part is not None and part.folder == str(self.folder):
            self.parts[number] = part


class Saver:
    """Saves every `checkpoint.every_steps` steps in the background and once at the end.

    A checkpoint is committed when all ranks have reported that their part is on disk; a step later, or
    many, the training goes on meanwhile. Storage never holds steps up: while a write is under way no other begins, and
    one that fails is told of, counted and forgotten.

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
        say: Callable[[str], None],
    ) -> None:
        self._config, self._sampler, self._say = config, sampler, say
        self._folder = CheckpointFolder(
            Path(config.run_dir) / "checkpoints", keep=config.checkpoint.keep, owner=f"{runtime.new_id()}-"
        )
        self._folder.open()
        self._resume = Resume(config, self._folder, sampler=sampler, model=model, say=say)
        self._pending: _Pending | None = None
        self._committer = runtime.background("checkpoint-commit")
        self._failures = 0
        self._saved_step = self._resume.step

    @property
    def first_step(self) -> int:
        """The step after the checkpoint that the run goes on from."""
        return self._resume.step + 1

    @property
    def source(self) -> str | None:
        """The checkpoint that the run goes on from."""
        return str(self._resume.folder) if self._resume.folder else None

    @property
    def saved_step(self) -> int:
        """Of the newest checkpoint, 0 if there is none."""
        return self._saved_step

    @property
    def saved(self) -> str | None:
        """The newest checkpoint."""
        return self.source if self._saved_step == self._resume.step else str(self._folder.latest())

    def verify(self, crew: Crew) -> None:
        """Settle, by reading it whole, from which checkpoint the run goes on; later ones are put aside where it does
        not go on with them. To be called before the step log is opened."""
        self._resume.verify(crew)
        self._saved_step = self._resume.step

    def resume(self, crew: Crew) -> None:
        """Load the checkpoint that the run goes on from, if there is one."""
        self._resume.load(crew)

    def fall_back(self, crew: Crew, *, metrics: MetricsExporter) -> int:
        """Load the newest whole checkpoint that the run has by now; its step, 0 if it has none."""
        if self._pending is not None:  # what was not on disk yet was given up
            pending = self._pending
            self._note(pending, self._conclude(pending), metrics=metrics)
        self._saved_step = self._resume.fall_back(crew)
        metrics.set_checkpoint(self._saved_step)
        return self._saved_step

    def after_step(self, step: int, crew: Crew, *, ranks: Sequence[RankReport], metrics: MetricsExporter) -> None:
        """Commit what is on disk by now; begin a new write where one is due."""
        pending = self._pending
        if pending is not None:
            for report in ranks:
                pending.hear(report.number, report.saved)
            if pending.commit is None and len(pending.parts) == pending.world_size:
                self._commit(pending)
            if pending.commit is not None and pending.commit.done():
                self._count(pending, self._conclude(pending), metrics=metrics)
        every = self._config.checkpoint.every_steps
        if every and step % every == 0 and step < self._config.train.steps:
            if self._pending is None:
                self._begin(step, crew)
            else:
                self._say(
                    f"checkpoint of step {self._pending.step} is still being written; that of step {step} is left out"
                )

    def save_now(self, step: int, crew: Crew) -> None:
        """Begin a write out of turn, unless one is under way."""
        if self._pending is None and step > self._saved_step:
            self._begin(step, crew)

    def finish(self, crew: Crew, *, metrics: MetricsExporter) -> None:
        """Wait for the write under way and commit it. To be called before devices leave in order."""
        if self._pending is not None:
            pending = self._pending
            self._count(pending, self._wait(pending, crew), metrics=metrics)

    def abandon(self) -> None:
        """Devices were lost: give up the write under way unless all of it is on disk. Waits for nothing; its folder
        goes later, since devices that are left may still write there."""
        if self._pending is not None and self._pending.commit is None:
            self._folder.drop(self._pending.folder)
            self._pending = None

    def last(self, step: int, crew: Crew, *, metrics: MetricsExporter) -> Path | None:
        """The checkpoint of the last step, on disk when this returns; None if no step was done at all.

        Raises:
            CannotGoOnError: it could not be written.
        """
        if self._pending is not None:
            self._note(self._pending, self._wait(self._pending, crew), metrics=metrics)
        if step > self._saved_step:
            pending = self._begin(step, crew)
            problem = self._wait(pending, crew)
            self._note(pending, problem, metrics=metrics)
            if problem:
                raise CannotGoOnError(
                    f"the last checkpoint, of step {step}, could not be written ({problem}); {self._remedy()}"
                )
        return self._folder.latest()

    def _begin(self, step: int, crew: Crew) -> _Pending:
        folder = self._folder.unfinished(step).absolute()
        # Known before anybody writes: a loss meanwhile must find what to give up.
        pending = self._pending = _Pending(step=step, folder=folder, world_size=len(crew))
        crew.each(lambda _, worker: worker.begin_save.remote(str(folder)))
        return pending

    def _wait(self, pending: _Pending, crew: Crew) -> str:
        """Until it is committed; what was wrong, empty if nothing."""
        if pending.commit is None:
            for number, part in enumerate(crew.each(lambda _, worker: worker.finish_save.remote())):
                pending.hear(number, part)
            self._commit(pending)
        return self._conclude(pending)

    def _commit(self, pending: _Pending) -> None:
        """In the background: what lies on slow storage is slow to rename and to remove, too."""
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
        self._say(f"checkpoint of step {pending.step} could not be written: {problem}")

    def _count(self, pending: _Pending, problem: str, *, metrics: MetricsExporter) -> None:
        self._note(pending, problem, metrics=metrics)
        most = self._config.checkpoint.max_failures
        if problem and self._failures > most:
            raise CannotGoOnError(
                f"{self._failures} checkpoints in a row could not be written, checkpoint.max_failures is {most} "
                f"({problem}); {self._remedy()}"
            )

    def _remedy(self) -> str:
        newest = self._folder.latest()
        return f"the newest good one is {newest or 'none'}; make {self._folder.root} writable with room, start again"


def _commit(checkpoints: CheckpointFolder, unfinished: Path, manifest: Manifest, problem: str) -> str:
    """Make it complete, or remove it if `problem` says that it cannot be; what was wrong, empty if nothing."""
    if not problem:
        try:
            checkpoints.commit(unfinished, manifest)
        except OSError as error:
            problem = f"{error.strerror}: {error.filename}"
    if problem:
        checkpoints.drop(unfinished)
    checkpoints.sweep()
    return problem
