"""Runs that lose processes at chosen moments, on the session's cluster."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

from ray._private.state import actors

from rayfcp.cluster.facts.devices import DeviceFacts
from rayfcp.cluster.workers.worker import DeviceWorker
from rayfcp.config import Config
from rayfcp.values import StepReport
from tests.cluster.processes import lives

CLOSED = "closed to new workers"
"""A file in a run's folder while which no worker can start."""


class PickyWorker(DeviceWorker):
    """Cannot start while the run's folder says so, as if the cluster were full."""

    def open(self) -> DeviceFacts:
        if (Path(self._config.run_dir) / CLOSED).exists():
            raise RuntimeError("there is no device here")
        return super().open()


def pids(class_name: str) -> list[int]:
    """Processes of living actors of a class by name, so that first workers are in the order of their devices."""
    found = [each for each in actors().values() if each["ActorClassName"].endswith(class_name)]
    return [each["Pid"] for each in sorted(found, key=lambda each: each["Name"]) if _is_up(each)]


def _is_up(actor: dict) -> bool:
    return actor["State"] == "ALIVE" and bool(actor["Pid"]) and lives(actor["Pid"])


def kill(*victims: int) -> None:
    for pid in victims:
        os.kill(pid, signal.SIGKILL)


class Trouble:
    """Watches a run and makes trouble: `on_step[k]` is called once step k was committed, `on_size[n]` once a step of n
    devices was, `on_line[text]` when a line that begins so is said, each once. Then Ctrl-C is pressed as soon as `end`
    of a step's report is true."""

    def __init__(
        self,
        on_step: dict[int, Callable[[], object]] | None = None,
        *,
        on_size: dict[int, Callable[[], object]] | None = None,
        on_line: dict[str, Callable[[], object]] | None = None,
        end: Callable[[StepReport], bool] | None = None,
    ) -> None:
        self._end = end
        self._on_step, self._on_size, self._on_line = dict(on_step or {}), dict(on_size or {}), dict(on_line or {})
        self.lines: list[str] = []

    def log(self, text: str) -> None:
        self.lines.append(text)
        assert "\n" not in text, "one line each"
        for start in [each for each in self._on_line if text.startswith(each)]:
            self._on_line.pop(start)()

    def evaluating(self, done: int, total: int) -> None: ...

    def update(self, report: StepReport) -> None:
        for step in [each for each in self._on_step if each <= report.step]:
            self._on_step.pop(step)()
        if report.world_size in self._on_size:
            self._on_size.pop(report.world_size)()
        if self.is_over and self._end is not None and self._end(report):
            self._end = None
            raise KeyboardInterrupt

    def said(self, text: str) -> list[str]:
        """Lines that hold this."""
        return [line for line in self.lines if text in line]

    @property
    def is_over(self) -> bool:
        """All trouble was made."""
        return not (self._on_step or self._on_size or self._on_line)


def close(config: Config) -> None:
    (Path(config.run_dir) / CLOSED).touch()


def reopen(config: Config) -> None:
    (Path(config.run_dir) / CLOSED).unlink()
