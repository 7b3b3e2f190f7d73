"""What a run went through, in a few numbers: time, goodput, losses and resizes, how many devices it had.

The numbers that a report begins with.

The tables of a report: its last steps, and what happened between steps.

`report.html`: a run on one page that needs nothing beside itself.
"""

import base64
import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from rayfcp.telemetry import events as event_log
from rayfcp.telemetry import rank_times, trace
from rayfcp.telemetry.baseline import Baseline, baseline_charts
from rayfcp.telemetry.charts import BALANCE, LEARNING, PREDICTION, WORLD, Format, Mark, degrees_chart, step_charts
from rayfcp.telemetry.events import Event, EventKind, read_events
from rayfcp.telemetry.files import write_whole
from rayfcp.telemetry.progress import describe_degrees
from rayfcp.telemetry.rank_times import RankTimes, rank_charts
from rayfcp.telemetry.steps import read_steps
from rayfcp.telemetry.style import STYLE
from rayfcp.telemetry.summary import RunSummary, number, percent, seconds, summarize
from rayfcp.telemetry.trace import Trace, read_trace, timeline_view
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


MAX_WORLDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """`key` names it in the page, for whoever reads it by machine."""

    key: str
    name: str
    value: str
    note: str


def tiles_of(summary: RunSummary, history: History, *, baseline: Baseline | None) -> list[Tile]:
    """What was learned, how fast, how evenly, and what came between."""
    learned = f"from {number(summary.first_loss)} at step {summary.first_step}"
    tokens_note = f"{summary.num_tokens:,} tokens in all"
    balance = "(max − mean) / max over ranks"
    if baseline is not None:
        balance = f"{baseline.static} on the same batches: {percent(baseline.before)}"
    attention = f"of attention alone {percent(summary.attention_mfu)}"
    waits = f"steps waited {percent(summary.median_plan_wait_ratio)} of their time for one"
    return [
        Tile(key="steps", name="Steps", value=f"{summary.last_step:,}", note=f"{summary.num_steps:,} in steps.jsonl"),
        Tile(key="loss", name="Loss", value=number(summary.last_loss), note=learned),
        Tile(key="wall", name="Wall time", value=_or_dash(history.wall_s, duration), note=_starts(history)),
        Tile(
            key="goodput",
            name="Goodput",
            value=_or_dash(history.goodput, percent),
            note="time in steps, over wall time",
        ),
        Tile(key="speed", name="Tokens per second", value=number(summary.tokens_per_s), note=tokens_note),
        Tile(key="mfu", name="MFU", value=percent(summary.mfu), note=attention),
        Tile(
            key="step",
            name="Step",
            value=seconds(summary.step_s),
            note=f"prediction off by {percent(summary.prediction_error)}",
        ),
        Tile(key="imbalance", name="Compute imbalance", value=percent(summary.compute_imbalance), note=balance),
        Tile(
            key="degree",
            name="Mean degree",
            value=number(summary.mean_degree),
            note="ranks per group, as a rank sees it",
        ),
        Tile(key="planning", name="Planning a batch", value=seconds(summary.plan_s), note=waits),
        Tile(key="devices", name="Devices", value=_worlds(history.worlds), note=_resizes(history)),
        Tile(key="recoveries", name="Recoveries", value=str(history.num_recoveries), note=_recoveries(history)),
    ]


def tiles_html(tiles: Sequence[Tile]) -> str:
    """A list of definitions."""
    cells = "".join(
        f'<div data-tile="{tile.key}"><dt>{escape(tile.name)}</dt>'
        f"<dd><b>{escape(tile.value)}</b><small>{_unbroken(tile.note)}</small></dd></div>"
        for tile in tiles
    )
    return f'<dl class="tiles">{cells}</dl>'


def _unbroken(text: str) -> str:
    """A number and its unit stay on one line."""
    return escape(text).replace(" %", "\u00a0%")


def duration(value: float) -> str:
    """The two largest units.

    >>> duration(42.4), duration(754.0), duration(7500.0), duration(200000.0)
    ('42.4 s', '12 min 34 s', '2 h 5 min', '2 d 7 h')
    """
    if value < 60:
        return seconds(value)
    whole = round(value)
    for size, name, below, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // below} {smaller}"
    raise AssertionError("a minute or more has a unit")


def _or_dash(value: float, form: Format) -> str:
    return form(value) if math.isfinite(value) else "–"


def _starts(history: History) -> str:
    if not history.num_starts:
        return "not written down by this run"
    return "one start" if history.num_starts == 1 else f"over {history.num_starts} starts"


def _worlds(worlds: Sequence[int]) -> str:
    shown = [str(each) for each in worlds]
    if len(shown) > MAX_WORLDS:
        return f"{min(worlds)}–{max(worlds)}"
    return " → ".join(shown)


def _resizes(history: History) -> str:
    return "the same all along" if len(history.worlds) == 1 else f"{len(history.worlds) - 1} changes"


def _recoveries(history: History) -> str:
    if not history.num_recoveries:
        return "nothing was lost"
    steps = f"{history.lost_steps} {'step' if history.lost_steps == 1 else 'steps'} ran again"
    return f"{duration(history.recovery_s)} in all, {steps}"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """What a run directory holds, at least one report."""

    name: str
    reports: tuple[StepReport, ...]
    events: tuple[Event, ...]
    times: RankTimes
    trace: Trace
    config_text: str
    last_write_s: float


def read_run(run_dir: str | Path) -> RunFiles:
    """All that is there; only `steps.jsonl` must be.

    Raises:
        ValueError: The folder holds no committed step, or a broken line.
    """
    folder = Path(run_dir)
    steps, config = folder / "steps.jsonl", folder / "config.yaml"
    reports = read_steps(steps)
    if not reports:
        raise ValueError(
            f"run directory {str(folder)!r} has no step in steps.jsonl; give the folder of a run that has trained"
        )
    return RunFiles(
        name=folder.name,
        reports=reports,
        events=read_events(folder / event_log.FILE),
        times=RankTimes.read(folder / rank_times.FILE, up_to=reports[-1].step),
        trace=read_trace(folder / trace.FILE),
        config_text=config.read_text(encoding="utf-8") if config.exists() else "",
        last_write_s=steps.stat().st_mtime,
    )


def write_report(run_dir: str | Path, *, baseline: Baseline | None = None) -> Path:
    """Makes `run_dir/report.html` from what the run wrote, and from a baseline where one was made.

    Raises:
        ValueError: As `read_run`.
    """
    run = read_run(run_dir)
    page = Path(run_dir) / "report.html"
    write_whole(page, render(run, baseline=baseline))
    return page


def render(run: RunFiles, *, baseline: Baseline | None = None) -> str:
    """The page. Its policy lets no script run but its own, and nothing be loaded."""
    config = yaml.safe_load(run.config_text) if run.config_text else {}
    name = str(_at(config, "run", "name") or run.name)
    summary = summarize(run.reports)
    history = history_of(run.events, run.reports, last_write_s=run.last_write_s)
    parts = [
        f"<header><h1>{escape(name)}</h1><p>{escape(_subtitle(summary, config=config))}</p></header>",
        tiles_html(tiles_of(summary, history, baseline=baseline)),
        *_sections(run, baseline=baseline),
        f"<h2>Details</h2>{steps_table(run.reports)}",
    ]
    if run.config_text:
        text = escape(run.config_text)
        parts.append(f"<details><summary>Configuration</summary><div><pre>{text}</pre></div></details>")
    return _page(f"{name} · rayfcp", body="".join(parts))


def _sections(run: RunFiles, *, baseline: Baseline | None) -> list[str]:
    marks = marks_of(run.events)
    before = baseline_charts(baseline, marks=marks) if baseline is not None else ""
    steps = run.reports
    balance = before + step_charts(BALANCE, steps, marks=marks) + degrees_chart(steps, marks=marks)
    balance += step_charts([WORLD], steps, marks=marks) + rank_charts(run.times)
    view = timeline_view(run.trace)
    note = "Values beside the names are those of the last step."
    lines = {"recovery": "recoveries", "resize": "resizes"}
    shown = [
        f'<span class="of-{kind}">{word}</span>' for kind, word in lines.items() if kind in {m.kind for m in marks}
    ]
    note += f" Lines across charts: {', '.join(shown)}." if shown else ""
    return [
        f"<h2>Training</h2><p>{note}</p>{_charts(step_charts(LEARNING, steps, marks=marks))}",
        f"<h2>Predicted and measured</h2>{_charts(step_charts(PREDICTION, steps, marks=marks))}",
        f"<h2>Balance and devices</h2>{_charts(balance)}",
        f"<h2>Plans</h2>{plans}" if (plans := plans_table(steps)) else "",
        f"<h2>Starts, losses and resizes</h2>{events_table(run.events)}" if run.events else "",
        f"<h2>Time by rank</h2><p>{_told(run.trace)}</p>{view}" if view else "",
    ]


def _charts(figures: str) -> str:
    return f'<div class="charts">{figures}</div>'


def _told(told: Trace) -> str:
    both = len({track.process for track in told.tracks}) > 1
    foretold = "Predicted by the simulator (all fixed costs at the load), beside what was measured"
    which = foretold if both else "As measured"
    return f"{which}, in the last steps of the run. All of it is in trace.json, for https://ui.perfetto.dev."


def _page(title: str, *, body: str) -> str:
    script = (files("rayfcp.telemetry") / "data" / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f'<body><main>{body}</main><div class="tip" hidden></div><script>{script}</script></body></html>\n'
    )


def _subtitle(summary: RunSummary, *, config: Any) -> str:
    shape = _at(config, "model", "architecture") or {}
    named = _at(config, "model", "path") or _at(config, "model", "name")
    model = named or (
        f"{shape.get('model_type')}, {shape.get('num_layers')} layers of width {shape.get('hidden_size')}"
        if shape
        else ""
    )
    devices = f"{summary.world_size} {'device' if summary.world_size == 1 else 'devices'}"
    facts = [summary.strategy, devices, model, _at(config, "model", "dtype")]
    return " · ".join(str(fact) for fact in facts if fact)


def _at(config: Any, *keys: str) -> Any:
    for key in keys:
        config = config.get(key) if isinstance(config, dict) else None
    return config
