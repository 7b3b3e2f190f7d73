"""The live page of a run, and its state as JSON: bounded however long the run and however large the world."""

import heapq
import json
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from rayfcp.telemetry.charts import COLUMNS
from rayfcp.telemetry.page import asset, html_page
from rayfcp.telemetry.summary import finite
from rayfcp.values import Span, SpanKind, StepReport


def live_page(_accept: str = "") -> tuple[str, bytes]:
    """Return content type and body of the page, which connects to its own server only."""
    page = html_page(
        "rayfcp",
        asset("live.html"),
        scripts=("live.js",),
        styles=("live.css",),
        policy="connect-src 'self'; img-src data:; form-action 'none'",
    )
    return "text/html; charset=utf-8", page.encode()


MESSAGES = (SpanKind.TRANSFER, SpanKind.REDUCE)
"""Kinds of spans that overlap computation: a row of their own."""

MAX_BARS = 2000
"""Bars of a timeline, the longest ones: bounds the answer that is sent every second."""

NARROWEST = 1 / 2000
"""Share of the width below which a bar is not visible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGroup:
    """A CP group of a step's plan; times from the start of its first microbatch."""

    ranks: tuple[int, ...]
    microbatch: int
    num_tokens: int
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeline:
    """Timeline of one step. `planned`: none with pipeline stages, where groups do not determine the time."""

    step: int
    planned: tuple[PlannedGroup, ...] = ()
    measured: tuple[Span, ...] = ()


class _Bar(NamedTuple):
    """`row`: stage, rank, and whether it is the row of messages."""

    row: tuple[int, int, bool]
    start_s: float
    duration_s: float
    kind: str
    label: str


def timeline_json(picture: StepTimeline) -> str:
    """Return `{"step", "duration_s", "panels": [{"name", "rows": [{"name", "bars": [[start_s, duration_s, kind,
    label]]}]}]}`: a panel for each timeline with bars, all from 0. `kind`: a `SpanKind`, or `degree N`."""
    panels = {"planned": _planned(picture.planned), "measured": _measured(picture.measured)}
    stop_s = max((bar.start_s + bar.duration_s for bars in panels.values() for bar in bars), default=0.0)
    shown = []
    for name, bars in panels.items():
        wide = [bar for bar in bars if bar.duration_s >= NARROWEST * stop_s]
        if bars:
            shown.append({"name": name, "rows": _rows(heapq.nlargest(MAX_BARS, wide, key=lambda bar: bar.duration_s))})
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
            row=(span.stage, span.rank, span.kind in MESSAGES),
            start_s=span.start_s - begin_s,
            duration_s=span.duration_s,
            kind=str(span.kind),
            label=span.label,
        )
        for span in spans
    ]


def _rows(bars: Iterable[_Bar]) -> list[dict[str, object]]:
    """Return rows whose enclosing bars precede the enclosed ones."""
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
"""Steps from which the remaining time is estimated."""


class RunState(StrEnum):
    """Activity of a run."""

    STARTING = "starting"
    TRAINING = "training"
    EVALUATING = "evaluating"
    RECOVERING = "recovering"
    SAVING = "saving"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTimes:
    """A device in the last step. `busy_s`: waiting excluded, NaN if unknown; `encode_s`: in its vision encoder, 0
    without images; `speed`: relative to a usual device, NaN if unknown."""

    rank: int
    step_s: float
    busy_s: float
    encode_s: float = 0.0
    speed: float = math.nan


class History:
    """Rows of `COLUMNS` for at most `limit` evenly spaced steps and the last one."""

    def __init__(self, *, limit: int = MAX_POINTS) -> None:
        self._limit, self._stride, self._count = limit, 1, 0
        self._rows: list[str] = []
        self._last = ""

    def add(self, report: StepReport) -> None:
        # Each row is encoded once: the page asks far more often than steps end.
        self._last = json.dumps([clean(read(report)) for read in COLUMNS.values()])
        if self._count % self._stride == 0:
            self._rows.append(self._last)
        self._count += 1
        if len(self._rows) >= self._limit:
            self._rows, self._stride = self._rows[::2], 2 * self._stride

    def text(self) -> str:
        """Return a JSON array of rows."""
        rows = self._rows if not self._last or self._rows[-1:] == [self._last] else [*self._rows, self._last]
        return f"[{','.join(rows)}]"


class Live:
    """State of a run, updated by the thread that runs it and read by server threads."""

    def __init__(self, run: str, *, target_steps: int, wanted: int) -> None:
        self._lock = threading.Lock()
        self._fields: dict[str, Any] = {
            "run": run,
            "state": RunState.STARTING,
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
            "evaluations": [],
        }
        self._history = History()
        self._ends_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._picture = StepTimeline(step=0)
        self._drawn = self._picture, timeline_json(self._picture)
        self._text = ""

    def set(self, **fields: Any) -> None:
        """Set fields of the state."""
        with self._change():
            self._fields |= fields

    def set_devices(self, **counts: int) -> None:
        """Set the number of devices `in_use` or `standing_by`."""
        with self._change():
            self._fields["devices"] = self._fields["devices"] | counts

    def restore(self, reports: Sequence[StepReport]) -> None:
        """Add steps committed before this process started."""
        with self._change():
            for report in reports:
                self._history.add(report)
                self._add_evaluation(report)
            if reports:
                self._fields["step"] = reports[-1].step

    def observe(self, report: StepReport, *, goodput: float) -> None:
        """Add a committed step."""
        with self._change():
            self._history.add(report)
            self._add_evaluation(report)
            self._ends_s.append(time.monotonic())
            self._fields |= {
                "state": RunState.TRAINING,
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

    def show(self, picture: StepTimeline, *, workers: Sequence[DeviceTimes]) -> None:
        """Set the timeline and the devices of the last step."""
        with self._change():
            self._picture = picture
            self._fields["workers"] = [
                {"rank": each.rank, "step_s": each.step_s, "busy_s": each.busy_s, "speed": each.speed}
                for each in workers
            ]

    def count(self, name: str, amount: float) -> None:
        """Increase one of `counts`, over all labels."""
        with self._change():
            counts: dict[str, float] = self._fields["counts"]
            self._fields["counts"] = counts | {name: counts.get(name, 0) + amount}

    def add_recovery(self, cause: str, *, seconds: float) -> None:
        """Add a recovery that has just finished."""
        with self._change():
            recovery = {"step": self._fields["step"], "cause": cause, "seconds": seconds, "at": time.time()}
            self._fields["recoveries"] = [*self._fields["recoveries"], recovery][-MAX_EVENTS:]
            self._fields["state"] = RunState.TRAINING

    def text(self) -> str:
        """Return the state as one JSON object, non-finite numbers as null."""
        picture, drawn = self._picture, self._drawn
        if drawn[0] is not picture:  # without the lock: encoding the spans of many ranks must not delay the run
            drawn = self._drawn = picture, timeline_json(picture)
        with self._lock:
            if not self._text:
                fields, columns = json.dumps(finite(self._fields), allow_nan=False), json.dumps(list(COLUMNS))
                self._text = f'{fields[1:-1]}, "columns": {columns}, "history": {self._history.text()}'
            return f'{{"now": {time.time()}, {self._text}, "picture": {drawn[1]}}}'

    def _add_evaluation(self, report: StepReport) -> None:
        """Add the losses of an evaluated state; of many evaluations every other one stays."""
        if report.eval:
            losses = {name: each.loss for name, each in report.eval.items()}
            known = [*self._fields["evaluations"], [report.step, losses]]
            self._fields["evaluations"] = known[-1::-2][::-1] if len(known) > MAX_POINTS else known

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Lock the state for a change; its text is encoded once per change, however many clients ask."""
        with self._lock:
            self._text = ""
            yield

    def _eta_s(self, report: StepReport) -> float:
        """Remaining seconds at the pace of the last steps, including everything between them."""
        ends_s, left = self._ends_s, max(0, int(self._fields["target_steps"]) - report.step)
        pace_s = (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1) if len(ends_s) > 1 else report.step_s
        return left * pace_s


def clean(value: float) -> float | None:
    """Return a number with five significant digits (finer than a screen); None if it is not finite.

    >>> clean(0.123456), clean(7), clean(math.nan)
    (0.12346, 7, None)
    """
    if isinstance(value, int):
        return value
    return float(f"{value:.5g}") if math.isfinite(value) else None
