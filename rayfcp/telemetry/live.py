"""The live page of a run: one HTML file that needs nothing but the run's own `/api/state`.

The last step as a time x rank picture: what was planned and what was measured, as JSON for the live page.

What the live page of a run shows: its state as JSON, bounded however long the run and however large the world.
"""

import base64
import functools
import hashlib
import heapq
import json
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from importlib.resources import files
from typing import Any, NamedTuple

from rayfcp.telemetry.style import STYLE
from rayfcp.values import Span, SpanKind, StepReport

SCRIPTS = ("charts.js", "pictures.js", "live.js")


def live_page(_accept: str = "") -> tuple[str, bytes]:
    """Its type and body. It may run its own script and ask its own server, nothing else."""
    return "text/html; charset=utf-8", _page().encode()


@functools.cache
def _page() -> str:
    folder = files("rayfcp.telemetry") / "data"
    script = "".join((folder / name).read_text(encoding="utf-8") for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    parts = {"policy": policy, "style": STYLE + (folder / "live.css").read_text(encoding="utf-8"), "script": script}
    page = (folder / "live.html").read_text(encoding="utf-8")
    for name, text in parts.items():
        page = page.replace(f"{{{{{name}}}}}", text)
    return page


ON_THE_WIRE = (SpanKind.TRANSFER, SpanKind.REDUCE)
"""What overlaps the computation gets a row of its own."""

MAX_BARS = 2000
"""Of a timeline, the longest."""

NARROWEST = 1 / 2000
"""Of the whole width: what is narrower cannot be seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGroup:
    """What the plan of a step has these ranks do together, from the start of the step's first microbatch on."""

    ranks: tuple[int, ...]
    microbatch: int
    num_tokens: int
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One step. `planned`: none where groups are not what takes the time, as with stages."""

    step: int
    planned: tuple[PlannedGroup, ...] = ()
    measured: tuple[Span, ...] = ()


class _Bar(NamedTuple):
    """`row`: stage, rank, and whether it is on the wire."""

    row: tuple[int, int, bool]
    start_s: float
    duration_s: float
    kind: str
    label: str


def picture_json(picture: Picture) -> str:
    """`{"step", "duration_s", "panels": [{"name", "rows": [{"name", "bars": [[start_s, duration_s, kind, label]]}]}]}`:
    a panel for each timeline that has bars, all from 0 on one scale. `kind`: a `SpanKind`, or `degree N`."""
    panels = {"planned": _planned(picture.planned), "measured": _measured(picture.measured)}
    stop_s = max((bar.start_s + bar.duration_s for bars in panels.values() for bar in bars), default=0.0)
    shown = [{"name": name, "rows": _rows(_visible(bars, whole_s=stop_s))} for name, bars in panels.items() if bars]
    return json.dumps({"step": picture.step, "duration_s": stop_s, "panels": shown}, allow_nan=False)


def _planned(groups: Sequence[PlannedGroup]) -> list[_Bar]:
    return [
        _Bar(
            row=(0, rank, False),
            start_s=group.start_s,
            duration_s=group.stop_s - group.start_s,
            kind=f"degree {len(group.ranks)}",
            label=f"microbatch {group.microbatch}, degree {len(group.ranks)}, {group.num_tokens:,} tokens",
        )
        for group in groups
        for rank in group.ranks
    ]


def _measured(spans: Sequence[Span]) -> list[_Bar]:
    begin_s = min((span.start_s for span in spans), default=0.0)
    return [
        _Bar(
            row=(span.stage, span.rank, span.kind in ON_THE_WIRE),
            start_s=span.start_s - begin_s,
            duration_s=span.duration_s,
            kind=str(span.kind),
            label=span.label,
        )
        for span in spans
    ]


def _visible(bars: Iterable[_Bar], *, whole_s: float) -> list[_Bar]:
    wide = [bar for bar in bars if bar.duration_s >= NARROWEST * whole_s]
    return heapq.nlargest(MAX_BARS, wide, key=lambda bar: bar.duration_s)


def _rows(bars: Iterable[_Bar]) -> list[dict[str, object]]:
    """What encloses comes before what it encloses."""
    rows: dict[tuple[int, int, bool], list[_Bar]] = defaultdict(list)
    for bar in sorted(bars, key=lambda bar: (bar.start_s, -bar.duration_s)):
        rows[bar.row].append(bar)
    stages = len({stage for stage, _, _ in rows}) > 1
    return [
        {
            "name": (f"stage {stage}, " if stages else "") + f"rank {rank}" + (" wire" if wire else ""),
            "bars": [[round(bar.start_s, 6), round(bar.duration_s, 6), bar.kind, bar.label] for bar in row],
        }
        for (stage, rank, wire), row in sorted(rows.items())
    ]


MAX_POINTS = 500
MAX_EVENTS = 50
RECENT_STEPS = 20
"""From which the time to the end is told."""

COLUMNS: Mapping[str, Callable[[StepReport], float]] = {
    "step": lambda r: r.step,
    "loss": lambda r: r.loss,
    "step_s": lambda r: r.step_s,
    "predicted_s": lambda r: r.predicted_s,
    "plan_s": lambda r: r.plan_s,
    "plan_wait_s": lambda r: r.plan_wait_s,
    "tokens_per_s": lambda r: r.num_tokens / r.step_s if r.step_s > 0 else math.nan,
    "mfu": lambda r: r.mfu,
    "attention_mfu": lambda r: r.attention_mfu,
    "compute": lambda r: r.imbalance.compute,
    "attention": lambda r: r.imbalance.attention,
    "memory": lambda r: r.imbalance.memory,
    "communication": lambda r: r.imbalance.communication,
    "encoder": lambda r: math.nan if r.imbalance.encoder is None else r.imbalance.encoder,
    "gap": lambda r: r.gap,
    "world_size": lambda r: r.world_size,
}
"""Of each step in `history`."""


class State(StrEnum):
    """What a run is doing."""

    STARTING = "starting"
    TRAINING = "training"
    RECOVERING = "recovering"
    SAVING = "saving"


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A device in the last step; `busy_s` without waiting for others, NaN where that is not known; `encode_s`: of its
    vision encoder, 0 where it saw no pictures."""

    rank: int
    step_s: float
    busy_s: float
    encode_s: float = 0.0
    speed: float = math.nan


class History:
    """A row of `COLUMNS` for at most `limit` steps, evenly spread, and always the last one."""

    def __init__(self, *, limit: int = MAX_POINTS) -> None:
        self._limit, self._stride, self._count = limit, 1, 0
        self._rows: list[str] = []
        self._last = ""

    def add(self, report: StepReport) -> None:
        """Each row is made into text once: the page asks far more often than steps end."""
        self._last = json.dumps([clean(read(report)) for read in COLUMNS.values()])
        if self._count % self._stride == 0:
            self._rows.append(self._last)
        self._count += 1
        if len(self._rows) >= self._limit:
            self._rows, self._stride = self._rows[::2], 2 * self._stride

    def text(self) -> str:
        """A JSON array of rows."""
        rows = self._rows if not self._last or self._rows[-1:] == [self._last] else [*self._rows, self._last]
        return f"[{','.join(rows)}]"


class Live:
    """State of a run, told by the thread that runs it and read by those that serve it."""

    def __init__(self, run: str, *, target_steps: int, wanted: int) -> None:
        self._lock = threading.Lock()
        self._fields: dict[str, Any] = {
            "run": run,
            "state": State.STARTING,
            "message": "",
            "started": time.time(),
            "step": 0,
            "target_steps": target_steps,
            "eta_s": None,
            "checkpoint_step": 0,
            "devices": {"in_use": 0, "standing_by": 0, "wanted": wanted},
            "last": None,
            "goodput": None,
            "workers": [],
            "recoveries": [],
            "counts": {},
        }
        self._history = History()
        self._ends_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._picture = Picture(step=0)
        self._drawn = self._picture, picture_json(self._picture)
        self._text = ""

    def tell(self, **fields: Any) -> None:
        """Some fields have these values from now on."""
        with self._change():
            self._fields |= fields

    def tell_devices(self, **counts: int) -> None:
        """`in_use`, `standing_by`."""
        with self._change():
            self._fields["devices"] = self._fields["devices"] | counts

    def remember(self, reports: Sequence[StepReport]) -> None:
        """Steps that were done before this process."""
        with self._change():
            for report in reports:
                self._history.add(report)
            if reports:
                self._fields["step"] = reports[-1].step

    def observe(self, report: StepReport, *, goodput: float) -> None:
        """A committed step."""
        with self._change():
            self._history.add(report)
            self._ends_s.append(time.monotonic())
            self._fields |= {
                "state": State.TRAINING,
                "step": report.step,
                "goodput": goodput,
                "eta_s": self._eta_s(report),
                "last": {
                    "strategy": report.strategy,
                    "num_tokens": report.num_tokens,
                    "num_sequences": report.num_sequences,
                    "num_microbatches": report.num_microbatches,
                    "degrees": {str(degree): count for degree, count in sorted(report.degrees.items())},
                    "grad_norm": report.grad_norm,
                    "learning_rate": report.learning_rate,
                    "bubble": report.bubble,
                },
            }

    def show(self, picture: Picture, *, workers: Sequence[Worker]) -> None:
        """Where the time of the last step went."""
        with self._change():
            self._picture = picture
            self._fields["workers"] = [
                {"rank": each.rank, "step_s": each.step_s, "busy_s": each.busy_s, "speed": each.speed}
                for each in workers
            ]

    def count(self, name: str, amount: float) -> None:
        """One of `counts`, over all labels."""
        with self._change():
            counts: dict[str, float] = self._fields["counts"]
            self._fields["counts"] = counts | {name: counts.get(name, 0) + amount}

    def recovered(self, cause: str, *, seconds: float) -> None:
        """The run went on after a loss."""
        with self._change():
            told = {"step": self._fields["step"], "cause": cause, "seconds": seconds, "at": time.time()}
            self._fields["recoveries"] = [*self._fields["recoveries"], told][-MAX_EVENTS:]
            self._fields["state"] = State.TRAINING

    def text(self) -> str:
        """The state as one JSON object; what is not a number is null."""
        picture, drawn = self._picture, self._drawn
        if drawn[0] is not picture:  # not under the lock: the run shall not wait for what many ranks take to draw
            drawn = self._drawn = picture, picture_json(picture)
        with self._lock:
            if not self._text:
                fields, columns = json.dumps(_cleaned(self._fields), allow_nan=False), json.dumps(list(COLUMNS))
                self._text = f'{fields[1:-1]}, "columns": {columns}, "history": {self._history.text()}'
            return f'{{"now": {time.time()}, {self._text}, "picture": {drawn[1]}}}'

    @contextmanager
    def _change(self) -> Iterator[None]:
        """What is within changes the state; it is made into text once, however many ask."""
        with self._lock:
            self._text = ""
            yield

    def _eta_s(self, report: StepReport) -> float:
        """By the pace of the last steps, all that came between them included."""
        ends_s, left = self._ends_s, max(0, int(self._fields["target_steps"]) - report.step)
        pace_s = (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1) if len(ends_s) > 1 else report.step_s
        return left * pace_s


def clean(value: float) -> float | None:
    """Five digits, which is finer than a screen; None for what is not finite.

    >>> clean(0.123456), clean(7), clean(math.nan)
    (0.12346, 7, None)
    """
    if isinstance(value, int):
        return value
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _cleaned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _cleaned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
