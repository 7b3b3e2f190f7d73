"""Counters that outlive a controller: `counters.json`, what `steps.jsonl` does not tell.

`events.jsonl`: what happened to a run between its steps, a line each: starts, recoveries, resizes, ends.
"""

import dataclasses
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rayfcp.telemetry.files import write_whole
from rayfcp.telemetry.names import METRICS, Kept
from rayfcp.values import ClusterSpec

COUNTERS_FILE = "counters.json"

logger = logging.getLogger(__name__)

Labels = tuple[tuple[str, str], ...]
"""Names and values, sorted, without `run`."""


class KeptCounters:
    """The counters of `METRICS` that are kept in `path`, each change written whole. A first run starts from 0.

    A file that is broken is left out with a warning, and a change that cannot be written goes with the next one: no
    training ends for a count.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._values = _read(self._path)

    def add(self, name: str, amount: float, *, labels: Mapping[str, str]) -> None:
        """Count `amount` more; nothing is written for 0."""
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
        """Name, labels and value of each series."""
        return ((name, labels, value) for (name, labels), value in self._values.items())


def _read(path: Path) -> dict[tuple[str, Labels], float]:
    """What the file holds of counters that are known and kept there."""
    wanted = {metric.name: set(metric.labels) for metric in METRICS if metric.kept is Kept.COUNTERS}
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
"""Characters of a reason that are kept: a worker's whole traceback is in the run's messages."""


class EventKind(StrEnum):
    """What happened."""

    START = "start"
    RECOVERY = "recovery"
    RESIZE = "resize"
    END = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """After `step` steps were done, `at_s` seconds after the epoch: the run (again) had `devices` devices in use,
    `devices_before` until then.

    `seconds`: what it took (0 where that was not timed). `lost_steps`: finished steps that ran again. `cause`: of a
    recovery. `reason`: one sentence for people. `cluster`: what plans are made for from here on, None at the end.
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


def to_line(event: Event) -> str:
    """One line of JSON with its newline."""
    fields = dataclasses.asdict(event) | {"reason": event.reason[:MAX_REASON]}
    return json.dumps(fields) + "\n"


def from_line(line: str) -> Event:
    """The event of one line.

    Raises:
        ValueError: Not a whole event.
    """
    fields: Any = json.loads(line)
    try:
        cluster = fields.pop("cluster")
        if cluster is not None:
            cluster = ClusterSpec(**{key: _given(value) for key, value in cluster.items()})
        fields["kind"] = EventKind(fields["kind"])
        return Event(**fields, cluster=cluster)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"line is not an event: {error}") from error


def _given(value: Any) -> Any:
    """JSON has lists where a value has tuples."""
    return tuple(value) if isinstance(value, list) else value


def read_events(path: str | Path) -> tuple[Event, ...]:
    """All whole events in the order in which they happened; broken lines are left out, an absent file has none."""
    file = Path(path)
    found = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []:
        try:
            found.append(from_line(line))
        except ValueError:
            logger.warning("%s holds a line that is no event", file)
    return tuple(found)


def append_event(path: str | Path, event: Event) -> None:
    """Adds a line in one write. A disk that has no room for it is logged: no run stops for that."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, to_line(event).encode())
        finally:
            os.close(handle)
    except OSError as error:
        logger.warning("%s of step %d is not in %s: %s", event.kind, event.step, path, error.strerror)
