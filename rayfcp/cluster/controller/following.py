"""SIGTERM like Ctrl-C, as `ray job stop`, schedulers and `kill` send it.

The user's side of a run: a controller, or one after the other, followed until the run ends.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rayfcp.cluster.controller.training import Outcome, Poll
from rayfcp.cluster.lock import sweep
from rayfcp.cluster.recovery.adoption import end_leftovers
from rayfcp.cluster.runtime import ActorLostError, ActorSpec, Role, Runtime
from rayfcp.cluster.workers.lifetime import run_key
from rayfcp.cluster.workers.placement import CapacityError
from rayfcp.config import Config
from rayfcp.telemetry.serving import target_files
from rayfcp.values import StepReport


@contextmanager
def sigterm_interrupts() -> Iterator[Callable[[], None]]:
    """SIGTERM raises KeyboardInterrupt in here; what it did before is put back afterwards.

    Gives a function that sees to it again, for after calls that set their own handler, as `ray.init` does. Only the
    main thread may handle signals: in others nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return

    def heed() -> None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)

    before = signal.getsignal(signal.SIGTERM)
    heed()
    try:
        yield heed
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


POLL_S = 0.1

CONTROLLER_START_S = 60.0
"""The least that the controller gets to be scheduled and to import the model library."""


class Watcher(Protocol):
    """Who is told what a run does."""

    def say(self, text: str) -> None:
        """One line of what is being done."""
        ...

    def update(self, report: StepReport) -> None:
        """A step was committed."""
        ...


def follow(config: Config, data_dir: str, *, runtime: Runtime, watcher: Watcher) -> tuple[Outcome, list[StepReport]]:
    """Run to the end, telling the watcher; how it ended, and the reports of its steps. A controller whose process is
    lost is started again, `elastic.controller_restarts` times, and goes on with the workers that live. Nothing is
    left behind, however it ends.

    Raises:
        CapacityError: there is no CPU for the controller.
    """
    following = _Following(config, data_dir, runtime=runtime, watcher=watcher)
    try:
        return following.to_the_end(), following.reports
    finally:
        following.end()


class _Following:
    def __init__(self, config: Config, data_dir: str, *, runtime: Runtime, watcher: Watcher) -> None:
        self._config, self._data_dir, self._runtime, self._watcher = config, data_dir, runtime, watcher
        self.reports: list[StepReport] = []
        self._asked_to_stop = False
        self._controller: Any = None

    def to_the_end(self) -> Outcome:
        left = self._config.elastic.controller_restarts
        while True:
            self._start()
            try:
                return self._listen()
            except ActorLostError as error:
                self.end(controller_only=True)
                why = str(error)
                if left == 0:
                    return Outcome(error=f"the controller was lost once more than it may be started again: {why}")
                left -= 1
                self._watcher.say(f"the controller was lost and starts again, {left} more times at most: {why}")

    def _start(self) -> None:
        spec = ActorSpec(role=Role.CONTROLLER)
        self._controller = self._runtime.start(spec, self._config, self._data_dir, runtime=self._runtime)
        timeout_s = max(self._config.elastic.start_timeout_s, CONTROLLER_START_S)
        if not self._runtime.wait([self._controller.poll.remote(messages=0, reports=0)], timeout_s=timeout_s):
            raise CapacityError(
                f"the controller needs 1 CPU, Ray gave none within {timeout_s:.0f} s; add CPUs to the cluster"
            )

    def _listen(self) -> Outcome:
        """Until this controller ends; the first Ctrl-C or SIGTERM asks it to stop."""
        running = self._controller.run.remote()
        heard = [0, 0]
        if self._asked_to_stop:
            self._controller.stop.remote()
        while True:
            try:
                done = self._runtime.wait([running], timeout_s=POLL_S)
                self._hear(heard)
                if done:
                    outcome: Outcome = self._runtime.get(running)
                    return outcome
            except KeyboardInterrupt:
                if self._asked_to_stop:
                    raise
                self._asked_to_stop = True
                self._watcher.say("stopping after this step with a checkpoint; Ctrl-C or SIGTERM again stops at once")
                self._controller.stop.remote()

    def _hear(self, heard: list[int]) -> None:
        """What this controller has to tell beyond `heard` messages and reports; a step that an earlier one reported is
        not told again."""
        poll: Poll = self._runtime.get(self._controller.poll.remote(messages=heard[0], reports=heard[1]))
        heard[0] += len(poll.messages)
        heard[1] += len(poll.reports)
        for message in poll.messages:
            self._watcher.say(message)
        for report in poll.reports:
            if not self.reports or report.step > self.reports[-1].step:
                self.reports.append(report)
                self._watcher.update(report)

    def end(self, *, controller_only: bool = False) -> None:
        """The controller is gone, and, if it was ended by force, so is what it left behind."""
        if self._controller is not None:
            self._runtime.end(self._controller)
            self._controller = None
        if not controller_only:
            end_leftovers(self._runtime, run_key(self._config))
            sweep(self._config.run_dir, names=target_files(self._config.run_dir))
