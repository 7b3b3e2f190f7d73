"""The user's side of a run: a controller, or one after the other, followed until the run ends."""

from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError

from rayfcp.cluster.adoption import end_leftovers
from rayfcp.cluster.controller import Controller, Outcome, Poll
from rayfcp.cluster.local import CONTROLLER_CPUS
from rayfcp.cluster.lock import sweep
from rayfcp.cluster.naming import run_key
from rayfcp.cluster.placement import CapacityError
from rayfcp.cluster.worker import RankWorker
from rayfcp.config import Config
from rayfcp.telemetry.targets import target_files
from rayfcp.values import StepReport

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


def follow(
    config: Config, data_dir: str, *, watcher: Watcher, worker: type[RankWorker] = RankWorker
) -> tuple[Outcome, list[StepReport]]:
    """Run to the end, telling the watcher; how it ended, and the reports of its steps. A controller whose process is
    lost is started again, `elastic.controller_restarts` times, and goes on with the workers that live. Nothing is
    left behind, however it ends.

    Raises:
        CapacityError: Ray has no CPU for the controller.
    """
    following = _Following(config, data_dir, watcher=watcher, worker=worker)
    try:
        return following.to_the_end(), following.reports
    finally:
        following.end()


class _Following:
    def __init__(self, config: Config, data_dir: str, *, watcher: Watcher, worker: type[RankWorker]) -> None:
        self._config, self._data_dir, self._watcher, self._worker = config, data_dir, watcher, worker
        self.reports: list[StepReport] = []
        self._asked_to_stop = False
        self._controller: Any = None

    def to_the_end(self) -> Outcome:
        left = self._config.elastic.controller_restarts
        while True:
            self._start()
            try:
                return self._listen()
            except RayActorError as error:
                self.end(controller_only=True)
                why = " ".join(str(error).split())[:300]
                if left == 0:
                    return Outcome(error=f"the controller was lost once more than it may be started again: {why}")
                left -= 1
                self._watcher.say(f"the controller was lost and starts again, {left} more times at most: {why}")

    def _start(self) -> None:
        actor = ray.remote(Controller).options(num_cpus=CONTROLLER_CPUS, max_concurrency=3)
        self._controller = actor.remote(self._config, self._data_dir, worker=self._worker)
        timeout_s = max(self._config.elastic.start_timeout_s, CONTROLLER_START_S)
        done, _ = ray.wait([self._controller.poll.remote(messages=0, reports=0)], timeout=timeout_s)
        if not done:
            raise CapacityError(
                f"the controller needs {CONTROLLER_CPUS} CPU, Ray gave none within {timeout_s:.0f} s; add CPUs to the "
                "cluster"
            )

    def _listen(self) -> Outcome:
        """Until this controller ends; the first Ctrl-C or SIGTERM asks it to stop."""
        running = self._controller.run.remote()
        heard = [0, 0]
        if self._asked_to_stop:
            self._controller.stop.remote()
        while True:
            try:
                done, _ = ray.wait([running], timeout=POLL_S)
                self._hear(heard)
                if done:
                    outcome: Outcome = ray.get(running)
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
        poll: Poll = ray.get(self._controller.poll.remote(messages=heard[0], reports=heard[1]))
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
            ray.kill(self._controller, no_restart=True)
            self._controller = None
        if not controller_only:
            end_leftovers(run_key(self._config))
            sweep(self._config.run_dir, names=target_files(self._config.run_dir))
