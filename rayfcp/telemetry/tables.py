"""The tables of a report: its last steps, and what happened between steps."""

from collections import Counter
from collections.abc import Sequence
from html import escape

from rayfcp.telemetry.events import Event, EventKind
from rayfcp.telemetry.progress import describe_degrees
from rayfcp.telemetry.summary import number, percent, seconds
from rayfcp.telemetry.tiles import duration
from rayfcp.values import StepReport

TABLE_STEPS, TABLE_EVENTS = 50, 200


def steps_table(reports: Sequence[StepReport]) -> str:
    """The last steps, folded away."""
    heads = ("step", "loss", "gradient norm", "tokens", "sequences", "took", "predicted", "wait", "MFU", "imbalance")
    rows = [
        (
            str(r.step) + (" (again)" if r.recovered else ""),
            number(r.loss),
            number(r.grad_norm),
            f"{r.num_tokens:,}",
            str(r.num_sequences),
            seconds(r.step_s),
            seconds(r.predicted_s),
            seconds(r.plan_wait_s),
            percent(r.mfu),
            percent(r.imbalance.compute),
            describe_degrees(r),
        )
        for r in reports[-TABLE_STEPS:]
    ]
    shown = f"Last {len(rows)} steps" if len(rows) < len(reports) else "All steps"
    table = _table((*heads, "degrees"), rows)
    return f"<details><summary>{shown} as a table</summary><div>{table}</div></details>"


def plans_table(reports: Sequence[StepReport]) -> str:
    """Which strategies planned how many steps, most first, and why the last plan of each is as it is; nothing where no
    step says why."""
    last = {report.strategy: report for report in reports if report.reason}
    if not last:
        return ""
    counts = Counter(report.strategy for report in reports).most_common()
    rows = [(name, f"{count:,}", str(last[name].step), last[name].reason) for name, count in counts if name in last]
    return f'<div class="card events">{_table(("strategy", "steps", "last one", "why its plan is so"), rows)}</div>'


def events_table(events: Sequence[Event]) -> str:
    """What happened when, why, and what it took; nothing where nothing is known."""
    if not events:
        return ""
    began_s = events[0].at_s - events[0].seconds
    rows = [
        (
            duration(max(0.0, event.at_s - began_s)),
            str(event.step),
            f"{event.kind}{f': {event.cause}' if event.cause else ''}",
            str(event.devices)
            if event.devices_before in (0, event.devices)
            else f"{event.devices_before} → {event.devices}",
            seconds(event.seconds) if event.kind is not EventKind.END and event.seconds > 0 else "",
            str(event.lost_steps) if event.lost_steps else "",
            event.reason,
        )
        for event in events[-TABLE_EVENTS:]
    ]
    heads = ("after", "at step", "what", "devices", "took", "ran again", "why")
    return f'<div class="card events">{_table(heads, rows)}</div>'


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
