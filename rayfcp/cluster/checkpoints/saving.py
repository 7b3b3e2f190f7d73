"""Checkpoints that a run saves in the background."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rayfcp.cluster.checkpoints.folder import (
    CheckpointFolder,
    Manifest,
)
from rayfcp.cluster.checkpoints.resuming import Resume
from rayfcp.cluster.errors import RunAbortedError
from rayfcp.cluster.recovery.replication import Replication
from rayfcp.cluster.recovery.stores import CopyStores
from rayfcp.cluster.runtime import CallError, Task, TaskFailedError
from rayfcp.cluster.workers.group import WorkerGroup
from rayfcp.config import Config
from rayfcp.config.models import TrainConfig
from rayfcp.elastic.recoverable import RecoverableState
from rayfcp.execute.reports import SavedPart
from rayfcp.execute.state.saving import CopyMissingError
from rayfcp.telemetry.metrics import MetricsExporter
from rayfcp.values import StateId

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

    Devices copy their state to shared memory and go on; the copy store of each node writes these copies, which stay
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
        stores: CopyStores,
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
                pending.problem = f"the copy store on {node[:8]} is lost: {' '.join(str(error).split())}"
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
