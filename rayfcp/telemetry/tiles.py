"""The numbers that a report begins with."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rayfcp.telemetry.baseline import Baseline
from rayfcp.telemetry.charts import Format
from rayfcp.telemetry.history import History
from rayfcp.telemetry.summary import RunSummary, number, percent, seconds

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
