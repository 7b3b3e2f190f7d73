"""`ranks.json`: how long each device was busy, over all steps of a run, in a file that does not grow with them.

Which devices were slow: the slowest ones as bars, and how busy each was over the steps.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from rayfcp.telemetry.charts import key_mark, runs_of
from rayfcp.telemetry.files import write_whole
from rayfcp.telemetry.summary import seconds

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
        for number, busy_s in other.busy_s.items():
            self.busy_s[number] = self.busy_s.get(number, 0.0) + busy_s
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


WIDTH, LEFT, RIGHT, HEIGHT = 560, 84, 140, 224
MAX_BARS, MAX_ROWS, MAX_COLUMNS = 8, 24, 80
MOST_PITCH, LEAST_CELL, FOOT = 40.0, 12.0, 28


def rank_charts(times: RankTimes) -> str:
    """Two figures; nothing where no device told how busy it was, as where hosts do not wait for their accelerators."""
    whole = _whole(times.stretches)
    means = {number: whole.busy_s[number] / whole.count[number] for number in whole.busy_s}
    if not means:
        return ""
    order = sorted(means, key=lambda number: (-means[number], number))
    return _slowest(means, order=order) + _heat(times.stretches, rows=sorted(order[:MAX_ROWS]), all_ranks=len(order))


def _slowest(means: dict[int, float], *, order: Sequence[int]) -> str:
    shown, most_s = order[:MAX_BARS], means[order[0]] or 1.0
    mean_s = sum(means.values()) / len(means)
    pitch = min(MOST_PITCH, HEIGHT / len(shown))
    height, bar = len(shown) * pitch, pitch * 0.6
    room = WIDTH - LEFT - RIGHT
    rows = []
    for index, number in enumerate(shown):
        top, width = index * pitch + pitch * 0.2, room * means[number] / most_s
        more = means[number] / mean_s - 1 if mean_s > 0 else 0.0
        told = f"{seconds(means[number])}, {_signed(more)}"
        rows.append(
            f'<text class="tick" x="{LEFT - 8}" y="{top + bar / 2 + 4:.1f}" text-anchor="end">device {number}</text>'
            f'<rect class="fill1" x="{LEFT}" y="{top:.1f}" width="{max(width, 0.5):.2f}" height="{bar:.1f}" rx="2"/>'
            f'<text class="tick strong" x="{WIDTH - RIGHT + 10}" y="{top + bar / 2 + 4:.1f}">{escape(told)}</text>'
        )
    x = LEFT + room * mean_s / most_s
    rows.append(f'<line class="level" x1="{x:.2f}" x2="{x:.2f}" y1="0" y2="{height:.1f}"/>')
    title, note = "Slowest devices", f"Busy seconds a step, waiting left out; dashed: mean of all {len(means)}"
    return _figure(title, note, body="".join(rows), height=height)


def _heat(stretches: Sequence[Stretch], *, rows: Sequence[int], all_ranks: int) -> str:
    columns = [_whole(run) for run in runs_of(list(stretches), limit=MAX_COLUMNS)]
    pitch = (WIDTH - LEFT - 12) / len(columns)
    cell = min(MOST_PITCH, max(LEAST_CELL, (HEIGHT - FOOT) / len(rows)))
    parts = []
    for at, number in enumerate(rows):
        middle = (at + 0.5) * cell + 3.5
        label = f'<text class="tick" x="{LEFT - 8}" y="{middle:.1f}" text-anchor="end">device {number}</text>'
        parts.append(label if cell >= 14 or at % 2 == 0 else "")
        for index, column in enumerate(columns):
            own_s = column.mean_s(number)
            if own_s is None:
                continue
            others = [each for each in map(column.mean_s, column.busy_s) if each is not None]
            mean_s = sum(others) / len(others)
            more = own_s / mean_s - 1 if mean_s > 0 else 0.0
            tip = f"device {number}, {_steps(column)}: {seconds(own_s)}, {_signed(more)} of the mean"
            parts.append(
                f'<rect class="heat{_shade(more)}" x="{LEFT + index * pitch:.2f}" y="{at * cell:.1f}" '
                f'width="{max(pitch - 0.6, 0.4):.2f}" height="{cell - 1.5:.1f}"><title>{escape(tip)}</title></rect>'
            )
    height = len(rows) * cell + FOOT
    ends = ((columns[0].first_step, LEFT, "start"), (columns[-1].last_step, WIDTH - 12, "end"))
    parts += [
        f'<text class="tick" x="{x}" y="{height - 10}" text-anchor="{anchor}">step {step}</text>'
        for step, x, anchor in ends[: 2 if len(columns) > 1 else 1]
    ]
    of = f"the {len(rows)} slowest of {all_ranks} devices" if len(rows) < all_ranks else "every device"
    return _figure(
        "Busy time, device by device", f"Over the mean of its steps; {of}", body="".join(parts), height=height
    )


SHADES = ((-0.15, 1), (-0.05, 2), (0.05, 3), (0.15, 4), (0.4, 5))


def _shade(more: float) -> int:
    """1, far faster than the mean, to 6, far slower."""
    return next((shade for bound, shade in SHADES if more < bound), 6)


def _signed(more: float) -> str:
    return f"{'+' if more >= 0 else '−'}{abs(more):.1%}".replace("%", " %")


def _steps(stretch: Stretch) -> str:
    first, last = stretch.first_step, stretch.last_step
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _whole(stretches: Sequence[Stretch]) -> Stretch:
    whole = Stretch(first_step=stretches[0].first_step if stretches else 0, last_step=0)
    for stretch in stretches:
        whole.add(stretch)
    return whole


def _figure(title: str, note: str, *, body: str, height: float) -> str:
    keys = ""
    if "heat" in body:
        words = ("15 % faster", "5 %", "even", "15 %", "40 %", "more")
        entries = "".join(f"<li>{key_mark(f'heat{at}')}{word}</li>" for at, word in enumerate(words, start=1))
        keys = f'<ul class="legend">{entries}</ul>'
    title, note = escape(title), escape(note)
    return (
        f'<figure class="top"><figcaption><h3>{title}</h3><p>{note}</p></figcaption>{keys}'
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{title}: {note}">'
        f"{body}</svg></figure>"
    )
