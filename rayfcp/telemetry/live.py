"""What the live page of a run shows: its state as JSON, bounded however long the run and however large the world."""

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rayfcp.telemetry.picture import Picture, picture_json
from rayfcp.values import StepReport

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
