"""Counters that outlive a controller: `counters.json`, what `steps.jsonl` does not tell."""

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from rayfcp.telemetry.files import write_whole
from rayfcp.telemetry.names import METRICS, Kept

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
