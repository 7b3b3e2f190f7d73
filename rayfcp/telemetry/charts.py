"""Charts as inline SVG: lines over steps, and shares stacked over steps. No script, no outside asset."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from rayfcp.telemetry.scales import Scale, thin, ticks
from rayfcp.telemetry.summary import number, percent

WIDTH, HEIGHT = 560, 230
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 26
MAX_POINTS, MAX_BARS = 400, 140

Format = Callable[[float], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What a chart says: `series` are parallel to `steps`, drawn in the order given."""

    title: str
    note: str
    steps: tuple[int, ...]
    series: Mapping[str, Sequence[float]]
    format: Format = number
    from_zero: bool = True


def line_chart(chart: Chart) -> str:
    """A figure with one line per series; hovering over a step tells its values."""
    steps = thin(chart.steps, limit=MAX_POINTS)
    series = {name: thin(values, limit=MAX_POINTS) for name, values in chart.series.items()}
    finite = [value for values in series.values() for value in values if math.isfinite(value)] or [0.0]
    marks = ticks(min(0.0, *finite) if chart.from_zero else min(finite), max(finite))
    across = Scale(low=chart.steps[0], high=chart.steps[-1], start=LEFT + 8, stop=WIDTH - RIGHT - 8)
    up = Scale(low=marks[0], high=marks[-1], start=HEIGHT - BOTTOM, stop=TOP)
    lines = [
        _line(values, steps=steps, across=across, up=up, colour=index % 6 + 1)
        for index, values in enumerate(series.values())
    ]
    body = _grid(marks, up=up, form=chart.format) + _step_labels(chart.steps, across=across)
    body += "".join(lines) + _hits(steps, series=series, across=across, form=chart.format)
    last = {name: chart.format(values[-1]) for name, values in chart.series.items()}
    return _figure(chart.title, chart.note, body=body, legend=last)


def stacked_chart(chart: Chart) -> str:
    """A figure with one bar a step, its series stacked to 100 %; a step without any has no bar."""
    steps = thin(chart.steps, limit=MAX_BARS)
    series = {name: thin(values, limit=MAX_BARS) for name, values in chart.series.items()}
    totals = [math.fsum(column) for column in zip(*series.values(), strict=True)] or [0.0] * len(steps)
    shares = {
        name: [value / total if total > 0 else 0.0 for value, total in zip(values, totals, strict=True)]
        for name, values in series.items()
    }
    pitch = (WIDTH - LEFT - RIGHT) / len(steps)
    across = Scale(low=0, high=len(steps), start=LEFT, stop=WIDTH - RIGHT)
    up = Scale(low=0.0, high=1.0, start=HEIGHT - BOTTOM, stop=TOP)
    bars = []
    bottoms = [0.0] * len(steps)
    for layer, values in enumerate(shares.values()):
        colour = 1 + round(layer * 5 / max(1, len(shares) - 1))
        for index, share in enumerate(values):
            if share > 0:
                top = up(bottoms[index] + share)
                bars.append(
                    f'<rect class="ramp{colour}" x="{across(index) + pitch * 0.08:.2f}" y="{top:.2f}" '
                    f'width="{pitch * 0.84:.2f}" height="{up(bottoms[index]) - top:.2f}"/>'
                )
            bottoms[index] += share
    middle = Scale(low=chart.steps[0], high=chart.steps[-1], start=LEFT + pitch / 2, stop=WIDTH - RIGHT - pitch / 2)
    body = _grid((0.0, 0.5, 1.0), up=up, form=percent) + _step_labels(chart.steps, across=middle) + "".join(bars)
    body += _hits(steps, series=shares, across=middle, form=percent)
    last = {name: percent(values[-1]) for name, values in shares.items()}
    return _figure(chart.title, chart.note, body=body, legend=last, ramp=True)


def key_mark(colour: str) -> str:
    """The small square of a legend, filled by the class `colour`."""
    square = f'<rect class="{colour}" width="10" height="10" rx="2.5"/>'
    return f'<svg class="key" viewBox="0 0 10 10" aria-hidden="true">{square}</svg>'


def _line(values: Sequence[float], *, steps: Sequence[float], across: Scale, up: Scale, colour: int) -> str:
    """A path that breaks where a value is missing; a lone value is a dot."""
    path, pen, dots = [], "M", []
    for index, (step, value) in enumerate(zip(steps, values, strict=True)):
        if not math.isfinite(value):
            pen = "M"
            continue
        path.append(f"{pen}{across(step):.2f} {up(value):.2f}")
        alone = pen == "M" and (index + 1 == len(values) or not math.isfinite(values[index + 1]))
        if alone or index + 1 == len(values):
            dots.append(f'<circle class="fill{colour}" cx="{across(step):.2f}" cy="{up(value):.2f}" r="3.2"/>')
        pen = "L"
    return f'<path class="line stroke{colour}" d="{" ".join(path)}"/>{"".join(dots)}' if path else ""


def _grid(marks: Sequence[float], *, up: Scale, form: Format) -> str:
    return "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(mark):.2f}" y2="{up(mark):.2f}"/>'
        f'<text class="tick" x="{LEFT - 7}" y="{up(mark) + 3.5:.2f}" text-anchor="end">{escape(form(mark))}</text>'
        for mark in marks
    )


def _step_labels(steps: Sequence[float], *, across: Scale) -> str:
    inside = [mark for mark in ticks(steps[0], steps[-1], count=6) if steps[0] <= mark <= steps[-1] and mark % 1 == 0]
    shown = sorted({steps[0], steps[-1], *inside})
    gap = 26.0
    kept: list[float] = []
    for step in shown:
        near_end = step != steps[-1] and across(steps[-1]) - across(step) < gap
        if not near_end and (not kept or across(step) - across(kept[-1]) >= gap):
            kept.append(step)
    return "".join(
        f'<text class="tick" x="{across(step):.2f}" y="{HEIGHT - 8}" text-anchor="middle">{step:.0f}</text>'
        for step in kept
    )


def _hits(steps: Sequence[float], *, series: Mapping[str, Sequence[float]], across: Scale, form: Format) -> str:
    """An invisible column over each step that names the step's values when pointed at."""
    width = (WIDTH - LEFT - RIGHT) / len(steps)
    columns = []
    for index, step in enumerate(steps):
        told = [f"{name}: {form(values[index])}" for name, values in series.items() if values[index]]
        title = escape("\n".join([f"step {step:.0f}", *told]))
        columns.append(
            f'<rect class="hit" x="{across(step) - width / 2:.2f}" y="{TOP}" width="{width:.2f}" '
            f'height="{HEIGHT - TOP - BOTTOM}"><title>{title}</title></rect>'
        )
    return "".join(columns)


def _figure(title: str, note: str, *, body: str, legend: Mapping[str, str], ramp: bool = False) -> str:
    spread = max(1, len(legend) - 1)
    colours = [f"ramp{1 + round(i * 5 / spread)}" if ramp else f"fill{i % 6 + 1}" for i in range(len(legend))]
    entries = "".join(
        f"<li>{key_mark(colour)}{escape(name)} <b>{escape(value)}</b></li>"
        for colour, (name, value) in zip(colours, legend.items(), strict=True)
    )
    return (
        f"<figure><figcaption><h3>{escape(title)}</h3><p>{escape(note)}</p></figcaption>"
        f'<ul class="legend">{entries}</ul>'
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}: {escape(note)}">'
        f"{body}</svg></figure>"
    )
