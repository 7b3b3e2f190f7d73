"""`report.html`: a run on one page that needs nothing beside itself."""

import base64
import hashlib
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from rayfcp.telemetry import events as event_log
from rayfcp.telemetry import rank_times, trace
from rayfcp.telemetry.baseline import Baseline, baseline_charts
from rayfcp.telemetry.events import Event, read_events
from rayfcp.telemetry.files import write_whole
from rayfcp.telemetry.history import history_of, marks_of
from rayfcp.telemetry.rank_charts import rank_charts
from rayfcp.telemetry.rank_times import RankTimes
from rayfcp.telemetry.step_charts import BALANCE, LEARNING, PREDICTION, WORLD, degrees_chart, step_charts
from rayfcp.telemetry.steps import read_steps
from rayfcp.telemetry.style import STYLE
from rayfcp.telemetry.summary import RunSummary, summarize
from rayfcp.telemetry.tables import events_table, plans_table, steps_table
from rayfcp.telemetry.tiles import tiles_html, tiles_of
from rayfcp.telemetry.timeline import Trace, read_trace, timeline_view
from rayfcp.values import StepReport


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
