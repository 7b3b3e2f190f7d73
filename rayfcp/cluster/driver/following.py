"""The user's side of a run: follows its controller, or one after the other, until the run ends."""

import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from rayfcp.cluster.dataset import Evaluation, Training
from rayfcp.cluster.errors import CapacityError
from rayfcp.cluster.jobs.controller import Outcome
from rayfcp.cluster.jobs.evaluate import Evaluated
from rayfcp.cluster.runtime import ActorLostError, ActorSpec, Role, Runtime
from rayfcp.cluster.runtime.lifetime import run_key
from rayfcp.cluster.session.lock import sweep
from rayfcp.cluster.workers.starting import end_leftovers
from rayfcp.config import Config
from rayfcp.telemetry.serving import target_files
from rayfcp.values import StepReport

POLL_S = 0.1

CONTROLLER_START_S = 60.0
"""Minimum time for the controller to be scheduled and to import the model library."""


class Watcher(Protocol):
    """Shows the progress of a run."""

    def log(self, text: str) -> None:
        """Show one line about what is being done."""

    def update(self, report: StepReport) -> None:
        """Show a committed step."""

    def evaluating(self, done: int, total: int) -> None:
        """Show that so many batches of an evaluation are done."""


def follow(
    config: Config, job: Training | Evaluation, *, runtime: Runtime, watcher: Watcher
) -> tuple[Outcome, list[StepReport]]:
    """Run a job to its end; return the outcome and the reports of all steps.

    A controller whose process is lost is started again, up to `elastic.controller_restarts` times, and continues with
    the workers that are alive. Nothing is left behind, however the job ends.

    Raises:
        CapacityError: there is no CPU for the controller.
    """
    follower = _Follower(config, job, runtime=runtime, watcher=watcher)
    try:
        return follower.run(), follower.reports
    finally:
        follower.end_controller()
        end_leftovers(runtime, run_key(config))
        sweep(config.run_dir, names=target_files(config.run_dir))


def evaluate(config: Config, wanted: Evaluation, *, runtime: Runtime, watcher: Watcher) -> Evaluated:
    """Evaluate a state on prepared sets, in the run directory of `config`, and write nothing but temporary files there.

    Raises:
        ConfigError, InfeasiblePlanError: the configuration cannot be run; one clear line.
        RunFailedError: a worker or the controller failed; holds the cause.
        KeyboardInterrupt: the user stopped it.
    """
    config = config.changed(elastic={"snapshot_every_steps": 0}, metrics={"loggers": (), "port": 0})
    outcome, _ = follow(config, wanted, runtime=runtime, watcher=watcher)
    found = outcome.checked().evaluated
    if found is None:
        raise KeyboardInterrupt
    return found


@contextmanager
def own_folder(parent: Path) -> Iterator[Path]:
    """A folder in `parent` for the files of one evaluation, which are gone afterwards. Others may have theirs in
    `parent` at the same time."""
    parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=parent, ignore_cleanup_errors=True) as own:
            yield Path(own) / "run"  # with files beside it
    finally:
        for each in (parent, parent.parent):
            with suppress(OSError):  # others use it, or a run has written there
                each.rmdir()


class _Follower:
    def __init__(
        self,
        config: Config,
        job: Training | Evaluation,
        *,
        runtime: Runtime,
        watcher: Watcher,
    ) -> None:
        self._config, self._job, self._runtime, self._watcher = config, job, runtime, watcher
        self.reports: list[StepReport] = []
        self._stop_requested = False
        self._controller: Any = None

    def run(self) -> Outcome:
        restarts = self._config.elastic.controller_restarts
        while True:
            self._start()
            try:
                return self._follow()
            except ActorLostError as error:
                self.end_controller()
                if restarts == 0:
                    return Outcome(error=f"the controller was lost once more than it may be started again: {error}")
                restarts -= 1
                self._watcher.log(f"the controller was lost and starts again, {restarts} more times at most: {error}")

    def _start(self) -> None:
        spec = ActorSpec(role=Role.CONTROLLER)
        self._controller = self._runtime.start(spec, self._config, self._job, runtime=self._runtime)
        timeout_s = max(self._config.elastic.start_timeout_s, CONTROLLER_START_S)
        if not self._runtime.wait([self._controller.poll.remote(messages=0, reports=0)], timeout_s=timeout_s):
            raise CapacityError(
                f"the controller needs 1 CPU, Ray gave none within {timeout_s:.0f} s; add CPUs to the cluster"
            )

    def _follow(self) -> Outcome:
        """Follow this controller to its end; the first Ctrl-C or SIGTERM makes it stop after the step under way."""
        running = self._controller.run.remote()
        num_messages = num_reports = 0
        if self._stop_requested:
            self._controller.stop.remote()
        while True:
            try:
                done = self._runtime.wait([running], timeout_s=POLL_S)
                poll = self._controller.poll.remote(messages=num_messages, reports=num_reports)
                messages, reports, evaluated = self._runtime.get(poll)
                num_messages, num_reports = num_messages + len(messages), num_reports + len(reports)
                self._show(messages, reports)
                if evaluated[1]:
                    self._watcher.evaluating(*evaluated)
                if done:
                    outcome: Outcome = self._runtime.get(running)
                    return outcome
            except KeyboardInterrupt:
                if self._stop_requested:
                    raise
                self._stop_requested = True
                self._watcher.log("stopping after this step with a checkpoint; Ctrl-C or SIGTERM again stops at once")
                self._controller.stop.remote()

    def _show(self, messages: Sequence[str], reports: Sequence[StepReport]) -> None:
        """Show all but the steps that an earlier controller reported."""
        for message in messages:
            self._watcher.log(message)
        for report in reports:
            if not self.reports or report.step > self.reports[-1].step:
                self.reports.append(report)
                self._watcher.update(report)

    def end_controller(self) -> None:
        if self._controller is not None:
            self._runtime.end(self._controller)
            self._controller = None


@contextmanager
def sigterm_interrupts() -> Iterator[Callable[[], None]]:
    """Make SIGTERM raise KeyboardInterrupt, as Ctrl-C does; `ray job stop`, schedulers and `kill` send it.

    Yields a function that installs the handler again, for use after calls that set their own, such as `ray.init`. Only
    the main thread may handle signals: in others nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return

    def install() -> None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)

    before = signal.getsignal(signal.SIGTERM)
    install()
    try:
        yield install
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
