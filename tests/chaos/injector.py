"""Carries out the faults of a schedule against a run that trains, in a thread of its own."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.clusters import ManyNodes, OneNode
from tests.chaos.faults import FaultActions
from tests.chaos.progress import Progress, RunEndedError
from tests.chaos.schedule import Kind, Planned

STEPS_APART = 2

STANDSTILL_S = 300.0
"""After so long without a step something is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedFault:
    """A fault that came about while `step` ran. `at_s`: seconds since the epoch. `what`: what it hit, in words."""

    kind: Kind
    step: int
    at_s: float
    what: str


class Injector(threading.Thread):
    """Injects a fault when `steps.jsonl` shows that the run has reached the fault's step, and trained for `STEPS_APART`
    steps after the last fault, and `num_devices` are in use, or, after `patience_s`, fewer.

    `log`: gets one line for each fault.
    """

    def __init__(
        self,
        schedule: Sequence[Planned],
        *,
        run_dir: str | Path,
        cluster: OneNode | ManyNodes,
        num_devices: int,
        patience_s: float = 30.0,
        last_step: int = 0,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__(name="injector", daemon=True)
        self._schedule, self._num_devices, self._patience_s, self._log = schedule, num_devices, patience_s, log
        self._last_step, self._over = last_step, threading.Event()
        self._progress = Progress(run_dir, over=self._over)
        self._actions = FaultActions(self._progress, cluster=cluster)
        self._error: BaseException | None = None
        self._injected: list[InjectedFault] = []
        self._afterwards: tuple[int, Callable[[], None]] = (0, lambda: None)

    def then(self, num_steps: int, call: Callable[[], None]) -> None:
        """Call it so many steps after the last fault, not before `last_step`; at once if a fault cannot be brought
        about."""
        self._afterwards = (num_steps, call)

    def run(self) -> None:
        try:
            for planned in self._schedule:
                self._await(planned)
                step, at_s = self._progress.committed + 1, time.time()
                what = self._actions.inject(planned.kind, target=planned.target)
                self._injected.append(InjectedFault(kind=planned.kind, step=step, at_s=at_s, what=what))
                self._log(f"fault {len(self._injected)} of {len(self._schedule)}, step {step}: {planned.kind}, {what}")
            self._await_step(max(self._progress.committed + self._afterwards[0], self._last_step))
        except RunEndedError:
            return
        except BaseException as error:
            self._error = error
        self._afterwards[1]()

    def end(self) -> tuple[InjectedFault, ...]:
        """Return the injected faults; to be called when the run has ended.

        Raises:
            AssertionError: some faults were not injected.
        """
        self._over.set()
        self.join()
        if self._error is not None:
            raise self._error
        missing = [f"{each.kind} in step {each.step}" for each in self._schedule[len(self._injected) :]]
        assert not missing, f"the run ended before these faults came about: {', '.join(missing)}"
        return tuple(self._injected)

    def _await(self, planned: Planned) -> None:
        progress = self._progress
        last = self._injected[-1].step if self._injected else 0
        self._await_step(max(planned.step - 1, last + STEPS_APART))
        progress.within(self._patience_s, lambda: progress.running(at_least=self._num_devices))
        progress.pause(planned.moment * progress.usual_s)

    def _await_step(self, step: int) -> None:
        """
        Raises:
            TimeoutError: the run stands still.
        """
        while (done := self._progress.committed) < step:
            self._progress.until(
                lambda done=done: self._progress.committed != done,
                what=f"a step after {done}",
                timeout_s=STANDSTILL_S,
            )
