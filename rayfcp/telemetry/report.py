"""`report.html`: a run on one self-contained page: headline, tiles, charts, tables."""

import math
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from rayfcp.telemetry import events as event_log
from rayfcp.telemetry import rank_times, trace
from rayfcp.telemetry.baseline import Baseline, baseline_charts, refit_text
from rayfcp.telemetry.charts import Mark, degrees_chart, evaluation_charts, step_values
from rayfcp.telemetry.events import Event, EventKind, read_events
from rayfcp.telemetry.files import write_whole
from rayfcp.telemetry.page import Chart, data_script, figure, html_page, table
from rayfcp.telemetry.rank_times import RankTimes, rank_charts
from rayfcp.telemetry.steps import read_steps
from rayfcp.telemetry.summary import RunSummary, number, percent, prepared_text, seconds, summarize
from rayfcp.telemetry.trace import PREDICTED, timeline_chart
from rayfcp.values import SourceReport, StepReport
from rayfcp.values.counted import counted, degrees_text


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Time and events of a run.

    `wall_s`: summed over the starts of the run, each until its end; `goodput`: seconds of committed steps over
    `wall_s`; both NaN without recorded events. `start_s`: time until the first step of each start; `evaluation_s`: of
    evaluations, which are no part of steps; `worlds`: numbers of devices in use, one entry per change.
    """

    wall_s: float
    goodput: float
    num_starts: int
    num_recoveries: int
    lost_steps: int
    recovery_s: float
    start_s: float
    evaluation_s: float
    worlds: tuple[int, ...]


def history_of(events: Sequence[Event], reports: Sequence[StepReport], *, last_write_s: float) -> History:
    """Return the history; `last_write_s`: time of the last step, which ends a start without an end event (the run was
    killed, or is still training)."""
    recoveries = [event for event in events if event.kind is EventKind.RECOVERY]
    wall_s = _wall_s(events, last_write_s=last_write_s)
    productive_s = sum(report.step_s for report in reports)
    return History(
        wall_s=wall_s,
        goodput=min(1.0, productive_s / wall_s) if wall_s > 0 else math.nan,
        num_starts=sum(event.kind is EventKind.START for event in events),
        num_recoveries=len(recoveries),
        lost_steps=sum(event.lost_steps for event in events),
        recovery_s=sum(event.seconds for event in recoveries),
        start_s=sum(event.seconds for event in events if event.kind is EventKind.START),
        evaluation_s=sum(event.seconds for event in events if event.kind is EventKind.EVALUATION),
        worlds=tuple(devices for devices, _ in groupby(report.world_size for report in reports)),
    )


def marks_of(events: Sequence[Event]) -> tuple[Mark, ...]:
    """Return recoveries and resizes, which charts show as lines."""
    shown = (EventKind.RECOVERY, EventKind.RESIZE)
    return tuple((event.step, event.kind.value) for event in events if event.kind in shown)


def _wall_s(events: Sequence[Event], *, last_write_s: float) -> float:
    """Sum over starts: each counts until its end event, else until the last event or step."""
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


MAX_WORLDS = 4
"""Changes of the number of devices that a tile spells out."""

Tile = tuple[str, str, str, str]
"""Key (names the tile in the page for machines), name, value, note."""


def tiles_of(summary: RunSummary, history: History, *, baseline: Baseline | None) -> list[Tile]:
    """Return the tiles: loss, speed, balance, and interruptions. Medians leave out the first step."""
    balance = "(max − mean) / max over ranks"
    if baseline is not None:
        balance = f"{baseline.static} on the same batches: {percent(baseline.static_imbalance)}"
    starts = "one start" if history.num_starts == 1 else f"over {history.num_starts} starts"
    worlds = " → ".join(map(str, history.worlds))
    if len(history.worlds) > MAX_WORLDS:
        worlds = f"{min(history.worlds)}–{max(history.worlds)}"
    resizes = "constant" if len(history.worlds) == 1 else counted(len(history.worlds) - 1, "change")
    blocked = f"blocked on planning: {percent(summary.median_plan_wait_ratio)} of step time"
    off = f"prediction off by {percent(summary.prediction_error)}"
    repeated = f"{duration(history.recovery_s)} in total, {counted(history.lost_steps, 'step')} repeated"
    broken = ("broken", "Broken images", f"{summary.num_broken:,}", "rows that have no targets because of them")
    return [
        ("steps", "Steps", f"{summary.last_step:,}", f"{summary.num_steps:,} in steps.jsonl"),
        *([broken] if summary.num_broken else []),
        (
            "loss",
            "Loss",
            number(summary.last_loss),
            f"from {number(summary.first_loss)} at step {summary.first_loss_step}",
        ),
        (
            "wall",
            "Wall time",
            duration(history.wall_s) if math.isfinite(history.wall_s) else "–",
            starts if history.num_starts else "not recorded by this run",
        ),
        ("goodput", "Goodput", percent(history.goodput) if math.isfinite(history.goodput) else "–", _goodput(history)),
        ("speed", "Tokens per second", number(summary.tokens_per_s), f"median; {summary.num_tokens:,} tokens in total"),
        ("mfu", "MFU", percent(summary.mfu), f"median; attention alone {percent(summary.attention_mfu)}"),
        ("step", "Step time", seconds(summary.step_s), f"median; {off}"),
        ("imbalance", "Compute imbalance", percent(summary.compute_imbalance), f"mean; {balance}"),
        ("degree", "Mean CP degree", number(summary.mean_degree), "ranks per group, averaged over ranks"),
        ("planning", "Planning a batch", seconds(summary.plan_s), f"median; {prepared_text(summary)}; {blocked}"),
        ("devices", "Devices", worlds, resizes),
        ("recoveries", "Recoveries", str(history.num_recoveries), repeated if history.num_recoveries else "no losses"),
    ]


def tiles_html(tiles: Sequence[Tile]) -> str:
    """Return the tiles as a definition list."""
    body = "".join(
        f'<div data-tile="{key}"><dt>{escape(name)}</dt>'
        f"<dd><b>{escape(value)}</b><small>{_unbroken(note)}</small></dd></div>"
        for key, name, value, note in tiles
    )
    return f'<dl class="tiles">{body}</dl>'


def _unbroken(text: str) -> str:
    """Escape, and keep a number and its unit on one line."""
    return escape(text).replace(" %", "\u00a0%")


def duration(value: float) -> str:
    """Return the two largest units of a duration in seconds.

    >>> duration(42.4), duration(754.0), duration(7500.0), duration(200000.0)
    ('42.4 s', '12 min 34 s', '2 h 5 min', '2 d 7 h')
    """
    if value < 60:
        return seconds(value)
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def _goodput(history: History) -> str:
    """Return where the rest of the wall time went, as far as it is recorded."""
    if not math.isfinite(history.goodput):
        return "committed steps over wall time"
    parts = {"starting": history.start_s, "recovering": history.recovery_s, "evaluating": history.evaluation_s}
    other_s = max(0.0, (1 - history.goodput) * history.wall_s - sum(parts.values()))
    parts |= {"compiling, saving and other work": other_s}
    rest = ", ".join(f"{duration(spent_s)} {name}" for name, spent_s in parts.items() if spent_s >= 0.05)
    return "of wall time in committed steps" + (f"; the rest: {rest}" if rest else "")


TABLE_STEPS, TABLE_EVENTS = 50, 200


def steps_table(reports: Sequence[StepReport]) -> str:
    """Return the last steps as a folded table."""
    heads = ("step", "loss", "gradient norm", "tokens", "sequences", "took", "predicted", "blocked", "MFU", "imbalance")
    rows = [
        (
            str(r.step) + (" (repeated)" if r.recovered else ""),
            *map(number, (r.loss, r.grad_norm)),
            f"{r.num_tokens:,}",
            str(r.num_sequences),
            *map(seconds, (r.step_s, r.predicted_s, r.plan_wait_s)),
            *map(percent, (r.mfu, r.imbalance.compute)),
            degrees_text(r.degrees),
        )
        for r in reports[-TABLE_STEPS:]
    ]
    shown = f"Last {len(rows)} steps" if len(rows) < len(reports) else "All steps"
    return _folded(f"{shown} as a table", table((*heads, "degrees"), rows))


def _folded(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary><div>{body}</div></details>"


def sources_table(reports: Sequence[StepReport]) -> str:
    """Return what each source of a mixture gave to the run; empty without one."""
    given: dict[str, list[SourceReport]] = {}
    for report in reports:
        for name, source in report.sources.items():
            given.setdefault(name, []).append(source)
    total = sum(source.num_tokens for sources in given.values() for source in sources)
    rows = []
    for name, sources in given.items():
        sequences, tokens = (sum(getattr(each, key) for each in sources) for key in ("num_sequences", "num_tokens"))
        losses = [each.loss for each in sources if each.loss is not None]
        share, mean = percent(tokens / max(total, 1)), number(tokens / max(sequences, 1))
        loss = f"{number(losses[0])} → {number(losses[-1])}" if losses else ""  # pairs have none by source
        rows.append((name, f"{sequences:,}", f"{tokens:,}", share, mean, loss))
    heads = ("source", "sequences", "tokens", "share of tokens", "mean length", "loss")
    return f'<h2>Sources</h2><div class="card events">{table(heads, rows)}</div>' if rows else ""


def plans_table(reports: Sequence[StepReport]) -> str:
    """Return the strategies that planned steps, most frequent first, each with the reason of its last plan; empty
    without reasons."""
    last = {report.strategy: report for report in reports if report.reason}
    if not last:
        return ""
    counts = Counter(report.strategy for report in reports).most_common()
    rows = [(name, f"{count:,}", str(last[name].step), last[name].reason) for name, count in counts if name in last]
    return (
        f'<div class="card events">{table(("strategy", "steps", "last step", "reason of its last plan"), rows)}</div>'
    )


def events_table(events: Sequence[Event]) -> str:
    """Return all events with their times and reasons, but only the first row with broken images."""
    broken = [event for event in events if event.kind is EventKind.BROKEN][:1]
    events = [event for event in events if event.kind is not EventKind.BROKEN or event in broken]
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
    heads = ("after", "at step", "event", "devices", "took", "steps repeated", "reason")
    return f'<div class="card events">{table(heads, rows)}</div>'


def last_told(events: Sequence[Event], kind: EventKind) -> str:
    """Return a paragraph on the last decision of this kind: how often the state is copied and what is expected to be
    lost, or how many planners work how many steps ahead, and what to change if they cannot keep up; empty without."""
    told = [event for event in events if event.kind is kind]
    return f"<p>From step {told[-1].step} on, {_unbroken(told[-1].reason)}.</p>" if told else ""


class RunFiles:
    """Contents of a run directory, of which only `steps.jsonl` is required.

    Raises:
        ValueError: It holds no committed step, or a broken line.
    """

    def __init__(self, run_dir: str | Path) -> None:
        folder = Path(run_dir)
        steps, config = folder / "steps.jsonl", folder / "config.yaml"
        self.name, self.reports = folder.name, read_steps(steps)
        if not self.reports:
            raise ValueError(
                f"run directory {str(folder)!r} has no step in steps.jsonl; give that of a run that has trained"
            )
        self.events = read_events(folder / event_log.FILE)
        self.summary = _summary(self.reports, self.events)
        self.times = RankTimes.read(folder / rank_times.FILE, up_to=self.reports[-1].step)
        self.timeline = timeline_chart(folder / trace.FILE)
        self.config_text = config.read_text(encoding="utf-8") if config.exists() else ""
        self.last_write_s = steps.stat().st_mtime


def summary_of(run_dir: str | Path) -> RunSummary | None:
    """Return the summary of a run directory; None without a committed step."""
    folder = Path(run_dir)
    reports = read_steps(folder / "steps.jsonl")
    return _summary(reports, read_events(folder / event_log.FILE)) if reports else None


def _summary(reports: Sequence[StepReport], events: Sequence[Event]) -> RunSummary:
    steps = {kind: [event.step for event in events if event.kind is kind] for kind in EventKind}
    return summarize(reports, started_after=steps[EventKind.START], num_broken=len(steps[EventKind.BROKEN]))


def write_report(run_dir: str | Path, *, baseline: Baseline | None = None) -> Path:
    """Write `run_dir/report.html` from the run's files, and a static baseline if there is one.

    Raises:
        ValueError: As `RunFiles`.
    """
    page = Path(run_dir) / "report.html"
    write_whole(page, _render(RunFiles(run_dir), baseline=baseline))
    return page


def _render(run: RunFiles, *, baseline: Baseline | None) -> str:
    config = yaml.safe_load(run.config_text) if run.config_text else {}
    name = str(_at(config, "run", "name") or run.name)
    summary = run.summary
    history = history_of(run.events, run.reports, last_write_s=run.last_write_s)
    lead = _unbroken(_headline(summary, history, baseline=baseline))
    parts = [
        f'<header><h1>{escape(name)}</h1><p class="lead">{lead}</p>',
        *(f"<p>{escape(line)}</p>" for line in _facts(run, config=config)),
        f"</header>{tiles_html(tiles_of(summary, history, baseline=baseline))}",
        *_sections(run, baseline=baseline),
        f"<h2>Details</h2>{steps_table(run.reports)}",
    ]
    if run.config_text:
        parts.append(_folded("Configuration", f"<pre>{escape(run.config_text)}</pre>"))
    return html_page(f"{name} · rayfcp", "".join(parts))


def _headline(summary: RunSummary, history: History, *, baseline: Baseline | None) -> str:
    """Return in one or two sentences what the run achieved."""
    text = (
        f"{counted(summary.num_steps, 'step')} on {counted(summary.world_size, 'device')}: "
        f"{number(summary.tokens_per_s)} tokens per second at {percent(summary.mfu)} MFU, "
        f"loss {number(summary.first_loss)} → {number(summary.last_loss)}"
    )
    text += f", {counted(history.num_recoveries, 'recovery', plural='recoveries')}." if history.num_recoveries else "."
    if baseline is None:
        return text
    return (
        f"{text} Its plans are {baseline.speedup:.2f} times as fast as {baseline.static}'s on the same batches "
        "(simulated)."
    )


def _facts(run: RunFiles, *, config: Any) -> list[str]:
    """Return lines of the header: strategy and model; data, date, host and version."""
    from rayfcp import __version__

    shape = _at(config, "model", "architecture") or {}
    model = _at(config, "model", "path") or _at(config, "model", "name")
    if not model and shape:
        model = f"{shape.get('model_type')}, {shape.get('num_layers')} layers of width {shape.get('hidden_size')}"
    what = [run.summary.strategy, model, _at(config, "model", "dtype"), _at(config, "cluster", "device")]
    started = [f"started {_date(run.events[0].at_s)}"] if run.events else []
    written = f"report written {_date(time.time())} on {socket.gethostname()} by rayfcp {__version__}"
    data = _at(config, "data", "paths") or list(_at(config, "data", "sources") or {})
    where = [f"data {', '.join(map(str, data))}"] if isinstance(data, list) else []
    return [" · ".join(str(fact) for fact in facts if fact) for facts in (what, [*where, *started, written])]


def _date(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at_s))


def _sections(run: RunFiles, *, baseline: Baseline | None) -> list[str]:
    marks, steps = marks_of(run.events), run.reports
    balance = [
        *map(figure, baseline_charts(baseline, marks=marks) if baseline is not None else []),
        _step_figures("imbalance", "bubble"),
        figure(degrees_chart(steps, marks=marks)),
        _step_figures("devices"),
        *map(figure, rank_charts(run.times)),
    ]
    view, plans = run.timeline, plans_table(steps)
    refitted = f"<p>{_unbroken(refit_text(baseline))}</p>" if baseline is not None and baseline.unrefitted else ""
    note = "Legends show the last step, tiles the median or mean of all. Point at a chart to read a step."
    kinds = {kind for _, kind in marks}
    lines = {"recovery": "recoveries", "resize": "resizes"}
    trained = _step_figures("loss", "rewards", "accuracy", "throughput", "mfu", "grad-norm")
    trained += "".join(map(figure, evaluation_charts(steps, marks=marks)))
    shown = [f'<span class="of-{kind}">{word}</span>' for kind, word in lines.items() if kind in kinds]
    note += f" Lines across charts: {', '.join(shown)}." if shown else ""
    return [
        data_script(step_values(steps, marks=marks), attributes=' id="step-values"'),
        f"<h2>Training</h2><p>{note}</p>{_charts(trained)}",
        sources_table(steps),
        f"<h2>Predicted and measured</h2>{refitted}{last_told(run.events, EventKind.PLANNING)}"
        f"{_charts(_step_figures('step-time', 'prediction', 'gap', 'planning'))}",
        f"<h2>Balance and devices</h2>{_charts(''.join(balance))}",
        f"<h2>Plans</h2>{plans}" if plans else "",
        f"<h2>Starts, losses and resizes</h2>{last_told(run.events, EventKind.COPIES)}{events_table(run.events)}"
        if run.events
        else "",
        f"<h2>Time by rank</h2><p>{_trace_note(view)}</p>{figure(view)}" if view else "",
    ]


def _charts(figures: str) -> str:
    return f'<div class="charts">{figures}</div>'


def _step_figures(*names: str) -> str:
    """Return figures for some of `STEP_CHARTS` of the renderer."""
    return "".join(f'<figure data-steps="{name}"></figure>' for name in names)


def _trace_note(timeline: Chart) -> str:
    both = any(group["name"].startswith(PREDICTED) for group in timeline["groups"])
    which = "Predicted by the simulator (fixed costs at the load) beside measured" if both else "As measured"
    return f"{which}, in the last steps of the run. trace.json holds all of it, for https://ui.perfetto.dev."


def _at(config: Any, *keys: str) -> Any:
    for key in keys:
        config = config.get(key) if isinstance(config, dict) else None
    return config
