"""Checks of a run with faults: it ends with the undisturbed run's steps, the right metrics, and nothing left behind."""

import gc
import json
import math
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from rayfcp.telemetry.serving import SD_FILE
from rayfcp.values import StepReport
from tests.chaos.leftovers import all_actors, is_running, listening_ports, named_actors, reservations
from tests.chaos.reference import Wanted
from tests.waiting import PATIENCE_S

RELATIVE = 1e-4

RUN_FILES = {"config.yaml", "steps.jsonl", "trace.json", "report.html", "profile.json", "checkpoints"}
MAYBE_FILES = {"skipped_rows.jsonl", "counters.json", "events.jsonl", "generations.jsonl", "ranks.json"}

POLL_S = 0.1


def assert_steps(found: Sequence[StepReport], want: Sequence[Wanted], *, losses: bool = True) -> None:
    """Check that no step is missing or done twice, that samples are the same and, to rounding, losses too."""
    steps = [report.step for report in found]
    assert steps == [report.step for report in want], steps
    assert [report.samples_hash for report in found] == [report.samples_hash for report in want]
    if losses:
        wrong = [
            f"step {have.step}: loss {have.loss}, undisturbed {wanted.loss}"
            for have, wanted in zip(found, want, strict=True)
            if not math.isclose(have.loss, wanted.loss, rel_tol=RELATIVE)
        ]
        assert not wrong, "; ".join(wrong)


def assert_gradients_after(steps: Iterable[int], found: Sequence[StepReport], *, want: Sequence[Wanted]) -> None:
    """The norm of all gradients together is the undisturbed run's in the step that a fault hit and in the next: one
    of them is the first that ran after it."""
    norms = {report.step: report.grad_norm for report in found}
    wanted = {report.step: report.grad_norm for report in want}
    near = {each for step in steps for each in (step, step + 1) if each in wanted}
    wrong = [
        f"step {step}: gradient norm {norms[step]}, undisturbed {wanted[step]}"
        for step in sorted(near)
        if not math.isclose(norms[step], wanted[step], rel_tol=RELATIVE)
    ]
    assert not wrong, "; ".join(wrong)


class Audience:
    """A watcher of a run that keeps its log lines and the metrics that it served last. After the loss of a controller
    its successor continues the counters."""

    def __init__(self, run_dir: str | Path) -> None:
        self._run_dir = Path(run_dir)
        self.lines: list[str] = []
        self._texts: dict[str, str] = {}
        self._lock = threading.Lock()

    def log(self, text: str) -> None:
        self.lines.append(text)

    def evaluating(self, done: int, total: int) -> None: ...

    def update(self, report: StepReport) -> None:
        self.look()

    def look(self) -> None:
        """Fetch the metrics from the run's own endpoint."""
        try:
            target = json.loads((self._run_dir / SD_FILE).read_text())[0]["targets"][0]
            with urlopen(f"http://{target}/metrics", timeout=PATIENCE_S) as answer:
                text = answer.read().decode()
        except (OSError, URLError, ValueError):
            return  # Between two controllers, or after the last step, nobody answers.
        with self._lock:
            self._texts[target] = text

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(self._texts)

    def counter(self, name: str, **labels: str) -> float:
        """Sum of a counter's series that have these labels, 0 if there are none."""
        last = list(self._texts.values())[-1:]
        return sum(value for text in last for value in _of(_values(text), name, labels))

    def gauge(self, name: str) -> float:
        """Last value of a gauge.

        Raises:
            StopIteration: it was never shown.
        """
        last = list(self._texts.values())[-1]
        return next(_of(_values(last), name, {}))


Series = tuple[str, dict[str, str], float]


def _values(text: str) -> list[Series]:
    return [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]


def _of(values: Iterable[Series], name: str, labels: dict[str, str]) -> Iterable[float]:
    return (value for each, has, value in values if each == f"rayfcp_{name}" and labels.items() <= has.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Resources that this process holds before a run, to be compared with those after it."""

    pid: int
    ports: frozenset[int]
    threads: frozenset[str]
    actors: frozenset[int]

    @classmethod
    def take(cls, pid: int) -> "Footprint":
        return cls(
            pid=pid,
            ports=frozenset(listening_ports([pid])[pid]),
            threads=frozenset(
                thread.name
                for thread in threading.enumerate()
                if not thread.name.startswith("Dummy")  # Ray's own, seen when they first call Python
            ),
            actors=frozenset(actor.pid for actor in all_actors()),
        )


def leaks(
    before: Footprint, *, run_dir: str | Path, targets: Iterable[str], timeout_s: float = PATIENCE_S
) -> tuple[str, ...]:
    """Describe what a run left behind: processes and actors of the run, reservations, ports, threads, files. Killed
    processes take a moment to go; what is there after `timeout_s` is left."""
    end_s = time.monotonic() + timeout_s
    while True:
        gc.collect()
        found = _left(before, run_dir=run_dir, targets=targets)
        if not found or time.monotonic() > end_s:
            return tuple(found)
        time.sleep(POLL_S)


def _left(before: Footprint, *, run_dir: str | Path, targets: Iterable[str]) -> list[str]:
    actors = [actor for actor in all_actors() if actor.pid not in before.actors]
    after = Footprint.take(before.pid)
    return [
        *(f"actor {each.class_name} is {each.state}" for each in actors if each.is_alive),
        *(f"process {each.pid} of {each.class_name} runs" for each in actors if each.pid and is_running(each.pid)),
        *(f"named actor {name}" for name in named_actors()),
        *(f"placement group {name}" for name in reservations()),
        *(f"port {port} is listened on" for port in after.ports - before.ports),
        *(f"thread {name}" for name in after.threads - before.threads),
        *(f"metrics are served at {target}" for target in targets if _answers(target)),
        *(f"file {name}" for name in left_files(run_dir)),
    ]


def left_files(run_dir: str | Path) -> list[str]:
    """Files of a run that has ended which are not among those that it is to leave."""
    folder = Path(run_dir)
    top = {path.name for path in folder.iterdir()}
    inside = {path.name for path in (folder / "checkpoints").iterdir() if not path.name.startswith("step-")}
    return sorted(top - RUN_FILES - MAYBE_FILES) + sorted(f"checkpoints/{name}" for name in inside)


def _answers(target: str) -> bool:
    try:
        with urlopen(f"http://{target}/metrics", timeout=1):
            return True
    except (OSError, URLError):
        return False
