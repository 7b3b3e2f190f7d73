"""`report.html`: a run on one page that needs nothing beside itself."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

from rayfcp.telemetry.files import write_whole
from rayfcp.telemetry.progress import describe_degrees
from rayfcp.telemetry.step_charts import step_charts
from rayfcp.telemetry.steps import read_steps
from rayfcp.telemetry.style import STYLE
from rayfcp.telemetry.summary import RunSummary, number, percent, seconds, summarize
from rayfcp.telemetry.timeline import read_tracks, timelines
from rayfcp.values import StepReport

TABLE_STEPS = 50


def write_report(run_dir: str | Path) -> Path:
    """Makes `run_dir/report.html` from `steps.jsonl` and, where present, `config.yaml` and `trace.json`.

    Raises:
        ValueError: The folder holds no committed step, or a broken line.
    """
    folder = Path(run_dir)
    reports = read_steps(folder / "steps.jsonl")
    if not reports:
        raise ValueError(
            f"run directory {str(folder)!r} has no step in steps.jsonl; give the folder of a run that has trained"
        )
    config = folder / "config.yaml"
    text = config.read_text(encoding="utf-8") if config.exists() else ""
    page = render(reports, config_text=text, timeline=timelines(read_tracks(folder / "trace.json")), title=folder.name)
    write_whole(folder / "report.html", page)
    return folder / "report.html"


def render(reports: Sequence[StepReport], *, config_text: str, timeline: str, title: str) -> str:
    """The page. `timeline` is finished HTML, everything else is escaped here."""
    config = yaml.safe_load(config_text) if config_text else {}
    name = str(_at(config, "run", "name") or title)
    summary = summarize(reports)
    parts = [
        f"<header><h1>{escape(name)}</h1><p>{escape(_subtitle(summary, config=config))}</p></header>",
        _tiles(summary),
        "<h2>Steps</h2><p>Values beside the names are those of the last step.</p>",
        f'<div class="charts">{step_charts(reports)}</div>',
    ]
    if timeline:
        parts.append(f'<h2>Last steps, rank by rank</h2><div class="stack">{timeline}</div>')
    parts.append("<h2>Details</h2>" + _table(reports))
    if config_text:
        parts.append(f"<details><summary>Configuration</summary><div><pre>{escape(config_text)}</pre></div></details>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)} · rayfcp</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _subtitle(summary: RunSummary, *, config: Any) -> str:
    shape = _at(config, "model", "architecture") or {}
    model = _at(config, "model", "path") or (
        f"{shape.get('model_type')}, {shape.get('num_layers')} layers of width {shape.get('hidden_size')}"
        if shape
        else ""
    )
    devices = f"{summary.world_size} {'device' if summary.world_size == 1 else 'devices'}"
    facts = [summary.strategy, devices, model, _at(config, "model", "dtype")]
    return " · ".join(str(fact) for fact in facts if fact)


def _tiles(summary: RunSummary) -> str:
    tiles = [
        ("Loss", number(summary.last_loss), f"from {number(summary.first_loss)} at step {summary.first_step}"),
        ("Tokens per second", number(summary.tokens_per_s), f"{summary.num_tokens:,} tokens in all"),
        ("Step", seconds(summary.step_s), f"prediction off by {percent(summary.prediction_error)}"),
        ("MFU", percent(summary.mfu), "model FLOPs over peak"),
        ("Compute imbalance", percent(summary.compute_imbalance), "(max − mean) / max over ranks"),
        ("Mean degree", number(summary.mean_degree), "ranks per group, as a rank sees it"),
        ("Planning", seconds(summary.plan_s), f"a batch, {percent(summary.plan_ratio)} of a step"),
        (
            "Waiting for plans",
            percent(summary.median_plan_wait_ratio),
            f"of a step, at most {percent(summary.max_plan_wait_ratio)}",
        ),
    ]
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
        for name, value, note in tiles
    )
    return f'<dl class="tiles">{cells}</dl>'


def _table(reports: Sequence[StepReport]) -> str:
    heads = (
        "step",
        "loss",
        "gradient norm",
        "tokens",
        "sequences",
        "step",
        "predicted",
        "wait",
        "MFU",
        "imbalance",
        "degrees",
    )
    rows = [
        (
            str(r.step),
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
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    shown = f"Last {len(rows)} steps" if len(rows) < len(reports) else "All steps"
    return (
        f"<details><summary>{shown} as a table</summary><div><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div></details>"
    )


def _at(config: Any, *keys: str) -> Any:
    for key in keys:
        config = config.get(key) if isinstance(config, dict) else None
    return config
