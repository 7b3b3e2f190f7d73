"""`ranks.json`: how long each device was busy, over all steps of a run, in a file that does not grow with them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayfcp.telemetry.files import write_whole

FILE = "ranks.json"
MAX_CELLS = 20_000


@dataclass(slots=True, kw_only=True)
class Stretch:
    """Steps `[first_step, last_step]`: of each device the seconds in which it did not wait, and in how many steps."""

    first_step: int
    last_step: int
    num_steps: int = 0
    busy_s: dict[int, float] = field(default_factory=dict)
    count: dict[int, int] = field(default_factory=dict)

    def mean_s(self, number: int) -> float | None:
        """Seconds a step of device `number`; None if it was not there."""
        return self.busy_s[number] / self.count[number] if self.count.get(number) else None

    def add(self, other: "Stretch") -> None:
        """Takes in the stretch that follows."""
        self.last_step = other.last_step
        self.num_steps += other.num_steps
        for number, seconds in other.busy_s.items():
            self.busy_s[number] = self.busy_s.get(number, 0.0) + seconds
            self.count[number] = self.count.get(number, 0) + other.count[number]


class RankTimes:
    """Stretches of equally many steps. Once the devices of all stretches come to more than `max_cells`, each two
    stretches become one, until they fit or two are left, so that memory and file stay bounded however long the run is
    and however often devices are others."""

    def __init__(self, *, max_cells: int = MAX_CELLS) -> None:
        self.stretches: list[Stretch] = []
        self._steps_each, self._max_cells = 1, max_cells

    def add(self, step: int, busy_s: Mapping[int, float]) -> None:
        """What the devices of a step, by their numbers, took without waiting."""
        if not busy_s:
            return
        one = Stretch(first_step=step, last_step=step, num_steps=1, busy_s=dict(busy_s), count=dict.fromkeys(busy_s, 1))
        if self.stretches and self.stretches[-1].num_steps < self._steps_each:
            self.stretches[-1].add(one)
        else:
            self.stretches.append(one)
        while len(self.stretches) > 2 and sum(len(each.busy_s) for each in self.stretches) > self._max_cells:
            self._halve()

    def write(self, path: str | Path) -> None:
        """Puts the file in its place, whole."""
        rows = [
            (
                each.first_step,
                each.last_step,
                each.num_steps,
                [(number, round(seconds, 6), each.count[number]) for number, seconds in sorted(each.busy_s.items())],
            )
            for each in self.stretches
        ]
        write_whole(path, json.dumps({"steps_each": self._steps_each, "stretches": rows}) + "\n")

    @classmethod
    def read(cls, path: str | Path, *, up_to: int | None = None) -> "RankTimes":
        """What was written, without stretches that reach beyond step `up_to`; nothing where the file is absent or
        broken."""
        found = cls()
        try:
            told: Any = json.loads(Path(path).read_text(encoding="utf-8"))
            found._steps_each = int(told["steps_each"])
            for first, last, num_steps, devices in told["stretches"]:
                stretch = Stretch(first_step=first, last_step=last, num_steps=num_steps)
                for number, seconds, count in devices:
                    stretch.busy_s[number], stretch.count[number] = seconds, count
                if up_to is None or last <= up_to:
                    found.stretches.append(stretch)
        except (OSError, ValueError, KeyError, TypeError):
            return cls()
        return found

    def _halve(self) -> None:
        self._steps_each *= 2
        for one, two in zip(self.stretches[::2], self.stretches[1::2], strict=False):
            one.add(two)
        self.stretches = self.stretches[::2]
