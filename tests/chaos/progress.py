"""Progress of a run with faults and the processes that work in it, read from the files that it writes."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from jobs.bench.faults import BEGAN, Moment, read_moments
from rayfcp.telemetry.steps import read_steps
from tests.chaos.leftovers import is_running
from tests.chaos.workers import moments_dir
from tests.waiting import PATIENCE_S

POLL_S = 0.05

Found = TypeVar("Found")


class RunEndedError(Exception):
    """The run ended while something was waited for."""


class Progress:
    """Progress of the run in `run_dir`, until `over` is set."""

    def __init__(self, run_dir: str | Path, *, over: threading.Event) -> None:
        self.run_dir, self._over = Path(run_dir), over
        self._log = self.run_dir / "steps.jsonl"

    @property
    def committed(self) -> int:
        """Steps in the log."""
        return self._log.read_bytes().count(b"\n") if self._log.exists() else 0

    @property
    def usual_s(self) -> float:
        """The last step in the log."""
        reports = read_steps(self._log)
        return reports[-1].step_s if reports else 0.0

    def running(self, *, at_least: int = 1) -> list[Moment]:
        """Moments at which devices began the newest step, of those whose process lives, by number; none
        if they are fewer than `at_least`."""
        began = [moment for moment in read_moments(moments_dir(self.run_dir)) if moment.what == BEGAN]
        latest = {
            each.number: each
            for each in began
            if (each.step, each.num_devices) == (began[-1].step, began[-1].num_devices) and is_running(each.pid)
        }
        return [latest[number] for number in sorted(latest)] if len(latest) >= at_least else []

    def gone(self, pid: int) -> bool:
        """True if all devices of the newest step began it and this process is none of them. Before all did, it may
        yet."""
        latest = self.running()
        return bool(latest) and len(latest) == latest[0].num_devices and pid not in {each.pid for each in latest}

    def until(self, ready: Callable[[], Found], *, what: str, timeout_s: float = PATIENCE_S) -> Found:
        """Wait until `ready` returns a true value, and return that.

        Raises:
            TimeoutError: it is not for so long.
            RunEndedError
        """
        end_s = time.monotonic() + timeout_s
        while not (found := ready()):
            if time.monotonic() > end_s:
                raise TimeoutError(f"waited {timeout_s:.0f} s for {what}")
            self.pause(POLL_S)
        return found

    def within(self, timeout_s: float, ready: Callable[[], object]) -> float:
        """Seconds until `ready`, at most `timeout_s`."""
        start_s = time.monotonic()
        while not ready() and time.monotonic() < start_s + timeout_s:
            self.pause(POLL_S)
        return time.monotonic() - start_s

    def pause(self, seconds: float) -> None:
        """
        Raises:
            RunEndedError
        """
        if self._over.wait(seconds):
            raise RunEndedError
