"""`ranks.json`: busy seconds of each device over all steps of a run, in a file of bounded size, and its charts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayfcp.telemetry.charts import runs_of
from rayfcp.telemetry.files import write_whole
from rayfcp.telemetry.page import Chart
from rayfcp.telemetry.summary import seconds

FILE = "ranks.json"
MAX_ENTRIES = 20_000


@dataclass(slots=True, kw_only=True)
class Stretch:
    """Busy seconds (waiting excluded) of each device over the steps `[first_step, last_step]`, and its step count."""

    first_step: int
    last_step: int
    num_steps: int = 0
    busy_s: dict[int, float] = field(default_factory=dict)
    count: dict[int, int] = field(default_factory=dict)

    def add(self, other: "Stretch") -> None:
        """Add the stretch that follows."""
        self.last_step = other.last_step
        self.num_steps += other.num_steps
        for number, busy_s in other.busy_s.items():
            self.busy_s[number] = self.busy_s.get(number, 0.0) + busy_s
            self.count[number] = self.count.get(number, 0) + other.count[number]


class RankTimes:
    """Stretches of equally many steps.

    Once the stretches hold more than `max_entries` entries of devices, neighbouring ones are merged until they fit or
    two are left: memory and file stay bounded however long the run is and however often its devices change.
    """

    def __init__(self, *, max_entries: int = MAX_ENTRIES) -> None:
        self.stretches: list[Stretch] = []
        self._steps_each, self._max_entries = 1, max_entries

    def add(self, step: int, busy_s: Mapping[int, float]) -> None:
        """Record the busy seconds of a step's devices, by their numbers."""
        if not busy_s:
            return
        one = Stretch(first_step=step, last_step=step, num_steps=1, busy_s=dict(busy_s), count=dict.fromkeys(busy_s, 1))
        if self.stretches and self.stretches[-1].num_steps < self._steps_each:
            self.stretches[-1].add(one)
        else:
            self.stretches.append(one)
        while len(self.stretches) > 2 and sum(len(each.busy_s) for each in self.stretches) > self._max_entries:
            self._steps_each *= 2
            for one, two in zip(self.stretches[::2], self.stretches[1::2], strict=False):
                one.add(two)
            self.stretches = self.stretches[::2]

    def write(self, path: str | Path) -> None:
        """Write the file atomically."""
        rows = []
        for each in self.stretches:
            devices = [(number, round(busy_s, 6), each.count[number]) for number, busy_s in sorted(each.busy_s.items())]
            rows.append((each.first_step, each.last_step, each.num_steps, devices))
        write_whole(path, json.dumps({"steps_each": self._steps_each, "stretches": rows}) + "\n")

    @classmethod
    def read(cls, path: str | Path, *, up_to: int | None = None) -> "RankTimes":
        """Read stretches that end by step `up_to`; none if the file is absent or broken."""
        found = cls()
        try:
            data: Any = json.loads(Path(path).read_text(encoding="utf-8"))
            found._steps_each = int(data["steps_each"])
            for first, last, num_steps, devices in data["stretches"]:
                stretch = Stretch(first_step=first, last_step=last, num_steps=num_steps)
                for number, busy_s, count in devices:
                    stretch.busy_s[number], stretch.count[number] = busy_s, count
                if up_to is None or last <= up_to:
                    found.stretches.append(stretch)
        except (OSError, ValueError, KeyError, TypeError):
            return cls()
        return found


MAX_BARS, MAX_ROWS, MAX_COLUMNS = 8, 24, 80
SHADES = ((-0.15, 1), (-0.05, 2), (0.05, 3), (0.15, 4), (0.4, 5))
"""Upper bounds of the relative deviation from the mean, and their shades; 6 above the last."""

SHADE_NAMES = ("15 % faster", "5 %", "even", "15 %", "40 %", "more")


def rank_charts(times: RankTimes) -> list[Chart]:
    """Return the slowest devices and a heat map of all; none where busy times are unknown, as on accelerators."""
    whole = _sum(times.stretches)
    means = {number: whole.busy_s[number] / whole.count[number] for number in whole.busy_s}
    if not means:
        return []
    order = sorted(means, key=lambda number: (-means[number], number))
    return [_slowest(means, order=order), _heat(times.stretches, rows=sorted(order[:MAX_ROWS]), num_devices=len(order))]


def _slowest(means: Mapping[int, float], *, order: Sequence[int]) -> Chart:
    mean_s = sum(means.values()) / len(means)
    rows = []
    for number in order[:MAX_BARS]:
        text = f"{seconds(means[number])}, {_deviation(means[number], mean_s=mean_s):+.1%}".replace("%", " %")
        rows.append(
            {"name": f"device {number}", "parts": [(means[number], "fill1")], "text": text, "lines": [f"busy\t{text}"]}
        )
    return {
        "kind": "bars",
        "title": "Slowest devices",
        "note": f"Busy seconds per step, waiting excluded; dashed: mean of all {len(means)} devices",
        "rows": rows,
        "high": means[order[0]] or 1.0,
        "bound": mean_s,
        "format": "seconds",
    }


def _heat(stretches: Sequence[Stretch], *, rows: Sequence[int], num_devices: int) -> Chart:
    columns = [_sum(run) for run in runs_of(stretches, limit=MAX_COLUMNS)]
    fields = []
    for index, column in enumerate(columns):
        known = {number: busy_s / column.count[number] for number, busy_s in column.busy_s.items()}
        mean_s = sum(known.values()) / max(len(known), 1)
        for at, number in enumerate(rows):
            if number in known:
                more = _deviation(known[number], mean_s=mean_s)
                shade = next((shade for bound, shade in SHADES if more < bound), 6)
                words = f"{seconds(known[number])}\t{more:+.1%} of the mean".replace("%", " %")
                fields.append((at, index, shade, words))
    shown = f"the {len(rows)} slowest of {num_devices} devices" if len(rows) < num_devices else "all devices"
    return {
        "kind": "heat",
        "title": "Busy time by device",
        "note": f"Relative to the mean of its steps; {shown}",
        "rows": [f"device {number}" for number in rows],
        "columns": [(column.first_step, column.last_step) for column in columns],
        "fields": fields,
        "legend": [(f"heat{shade}", name) for shade, name in enumerate(SHADE_NAMES, start=1)],
    }


def _deviation(own_s: float, *, mean_s: float) -> float:
    return own_s / mean_s - 1 if mean_s > 0 else 0.0


def _sum(stretches: Sequence[Stretch]) -> Stretch:
    whole = Stretch(first_step=stretches[0].first_step if stretches else 0, last_step=0)
    for stretch in stretches:
        whole.add(stretch)
    return whole
