"""What a run went through, in a few numbers: time, goodput, losses and resizes, how many devices it had."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rayfcp.telemetry.charts import Mark
from rayfcp.telemetry.events import Event, EventKind
from rayfcp.values import StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """`wall_s`: over all starts of the run, from each start to its end; `goodput`: seconds of the steps that count,
    over that. Both NaN where the run did not write down what happened to it. `worlds`: devices in use, each change
    once."""

    wall_s: float
    goodput: float
    num_starts: int
    num_recoveries: int
    num_resizes: int
    lost_steps: int
    recovery_s: float
    worlds: tuple[int, ...]


def history_of(events: Sequence[Event], reports: Sequence[StepReport], *, last_write_s: float) -> History:
    """`last_write_s`: when the last step was written down, for a start of the run without an end: it was killed, or is
    under way."""
    recoveries = [event for event in events if event.kind is EventKind.RECOVERY]
    wall_s = _wall_s(events, last_write_s=last_write_s)
    productive_s = sum(report.step_s for report in reports)
    return History(
        wall_s=wall_s,
        goodput=min(1.0, productive_s / wall_s) if wall_s > 0 else math.nan,
        num_starts=sum(event.kind is EventKind.START for event in events),
        num_recoveries=len(recoveries),
        num_resizes=sum(event.kind is EventKind.RESIZE for event in events),
        lost_steps=sum(event.lost_steps for event in events),
        recovery_s=sum(event.seconds for event in recoveries),
        worlds=_changes([report.world_size for report in reports]),
    )


def marks_of(events: Sequence[Event]) -> tuple[Mark, ...]:
    """Recoveries and resizes as lines across charts."""
    shown = (EventKind.RECOVERY, EventKind.RESIZE)
    return tuple(Mark(step=event.step, kind=event.kind.value) for event in events if event.kind in shown)


def _wall_s(events: Sequence[Event], *, last_write_s: float) -> float:
    """Each start counts until its end; without one, until the last thing known of it."""
    total_s, began_s, known_s = 0.0, math.nan, math.nan
    for event in events:
        if event.kind is EventKind.START:
            total_s += 0.0 if math.isnan(began_s) else known_s - began_s
            began_s = event.at_s - event.seconds
        known_s = event.at_s
        if event.kind is EventKind.END and not math.isnan(began_s):
            total_s += known_s - began_s
            began_s = math.nan
    if not math.isnan(began_s):
        total_s += max(known_s, last_write_s) - began_s
    return total_s if total_s > 0 else math.nan


def _changes(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(value for index, value in enumerate(values) if index == 0 or value != values[index - 1])
