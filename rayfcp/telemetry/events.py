"""`counters.json`: counters that persist across controllers; `events.jsonl`: starts, recoveries, resizes, ends, how
often the state is copied, how far ahead steps are planned, evaluations, rows with broken images."""

import dataclasses
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pydantic import TypeAdapter

from rayfcp.telemetry.files import write_whole
from rayfcp.telemetry.names import METRICS, Persistence
from rayfcp.values import ClusterSpec

COUNTERS_FILE = "counters.json"

logger = logging.getLogger(__name__)

Labels = tuple[tuple[str, str], ...]
"""Sorted names and values, without `run`."""


class KeptCounters:
    """Counters of `METRICS` that are persisted in `path`, which is rewritten atomically on each change.

    A broken file is ignored with a warning, and a change that cannot be written is written with the next one: counting
    never stops training.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._values = _read(self._path)

    def add(self, name: str, amount: float, *, labels: Mapping[str, str]) -> None:
        """Increase a counter; 0 writes nothing."""
        if amount == 0:
            return
        key = name, tuple(sorted(labels.items()))
        self._values[key] = self._values.get(key, 0.0) + amount
        lines = [{"name": each, "labels": dict(pairs), "value": value} for each, pairs, value in self]
        try:
            write_whole(self._path, json.dumps(lines, indent=1) + "\n")
        except OSError as error:
            logger.warning("%s is not written yet: %s", self._path, error.strerror)

    def __iter__(self) -> Iterator[tuple[str, Labels, float]]:
        """Yield name, labels and value of each series."""
        return ((name, labels, value) for (name, labels), value in self._values.items())


def _read(path: Path) -> dict[tuple[str, Labels], float]:
    """Read the known persistent counters."""
    wanted = {metric.name: set(metric.labels) for metric in METRICS if metric.kept is Persistence.COUNTERS}
    try:
        lines = json.loads(path.read_text(encoding="utf-8"))
        found = {
            (str(line["name"]), tuple(sorted((str(key), str(value)) for key, value in line["labels"].items()))): float(
                line["value"]
            )
            for line in lines
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s cannot be read (%s); its counters start from 0", path, error)
        return {}
    return {
        (name, labels): value
        for (name, labels), value in found.items()
        if wanted.get(name) == {key for key, _ in labels} and value >= 0
    }


FILE = "events.jsonl"
MAX_REASON = 500
"""Characters of a reason: whole tracebacks are in the run's messages."""


class EventKind(StrEnum):
    """Kind of an event."""

    START = "start"
    RECOVERY = "recovery"
    RESIZE = "resize"
    END = "end"
    COPIES = "copies"
    PLANNING = "planning"
    EVALUATION = "evaluation"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Event after `step` steps, `at_s` seconds after the epoch, from which on `devices` are in use (`devices_before`
    until then).

    `seconds`: its duration (0 if not timed). `lost_steps`: finished steps to be repeated. `cause`: of a recovery; of
    `BROKEN`, the row. `reason`: one sentence; of `COPIES`, how often the state is copied from here on, and what it
    costs; of `PLANNING`, how many planners work how many steps ahead, or why they cannot keep up; of `EVALUATION`, the
    losses; of `BROKEN`, why an image of the row cannot be decoded. `cluster`: the cluster of later plans, None at the
    end and with these four.
    """

    kind: EventKind
    step: int
    at_s: float
    devices: int
    devices_before: int = 0
    seconds: float = 0.0
    lost_steps: int = 0
    cause: str = ""
    reason: str = ""
    cluster: ClusterSpec | None = None


_EVENT = TypeAdapter(Event)


def read_events(path: str | Path) -> tuple[Event, ...]:
    """Read all complete events in order; broken lines are skipped with a warning."""
    file = Path(path)
    found = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []:
        try:
            found.append(_EVENT.validate_json(line))
        except ValueError:
            logger.warning("%s has a line that is not an event", file)
    return tuple(found)


def append_event(path: str | Path, event: Event) -> None:
    """Append a line in one write. A full disk is logged and does not stop the run."""
    fields = dataclasses.asdict(event) | {"reason": event.reason[:MAX_REASON]}
    try:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, f"{json.dumps(fields)}\n".encode())
        finally:
            os.close(handle)
    except OSError as error:
        logger.warning("%s of step %d is not in %s: %s", event.kind, event.step, path, error.strerror)
