"""From values to places on a chart: round ticks, linear scales, thinning of long series.

Charts as inline SVG: lines over steps, and shares stacked over steps. They are whole without any script; the page's
own adds a hairline and a box with the values of the step that is pointed at.

Which charts a report shows of a run's steps.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeVar

from rayfcp.telemetry.summary import number, percent, seconds
from rayfcp.values import StepReport

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Maps `[low, high]` of values onto `[start, stop]` of pixels; a range of no width maps to the middle."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        if self.high <= self.low:
            return (self.start + self.stop) / 2
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)


def ticks(low: float, high: float, *, count: int = 4) -> tuple[float, ...]:
    """About `count` round numbers (1, 2 or 5 times a power of ten apart) whose ends cover `[low, high]`.

    >>> ticks(0.0, 0.93)
    (0.0, 0.5, 1.0)
    >>> ticks(3.1, 5.6)
    (3.0, 4.0, 5.0, 6.0)
    """
    size = max(abs(low), abs(high))
    if high - low <= max(1e-9 * size, 1e-100):
        high = low + (abs(low) if size > 1e-100 else 1.0)
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * power for unit in (1.0, 2.0, 5.0, 10.0) if unit * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = max(0, 1 - math.floor(math.log10(step)))
    return tuple(round(index * step, digits) for index in range(first, last + 1))


def runs_of(values: Sequence[T], *, limit: int) -> list[Sequence[T]]:
    """Cut into at most `limit` runs of equal length, but for the last.

    >>> runs_of((1, 2, 3, 4, 5), limit=3)
    [(1, 2), (3, 4), (5,)]
    """
    run = max(1, math.ceil(len(values) / limit))
    return [values[start : start + run] for start in range(0, len(values), run)]


def thin(values: Sequence[float], *, limit: int) -> tuple[float, ...]:
    """Means of equal runs so that at most `limit` values are left; non-finite values stay out of a mean.

    >>> thin((1.0, 3.0, 5.0, 7.0), limit=2)
    (2.0, 6.0)
    """
    chunks = runs_of(values, limit=limit)
    return tuple(_mean([value for value in chunk if math.isfinite(value)]) for chunk in chunks)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


WIDTH, HEIGHT = 560, 236
LEFT, RIGHT, TOP, BOTTOM = 60, 12, 14, 34
MAX_POINTS, MAX_BARS = 400, 140

Format = Callable[[float], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A line across a chart where something happened after `step` steps; `kind` is its colour: recovery or resize."""

    step: int
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What a chart says: `series` are parallel to `steps`, drawn in the order given. `stepped`: values hold until the
    next one; `dots`: each point is marked."""

    title: str
    note: str
    steps: tuple[int, ...]
    series: Mapping[str, Sequence[float]]
    format: Format = number
    from_zero: bool = True
    marks: tuple[Mark, ...] = ()
    stepped: bool = False
    dots: bool = False
    level: float | None = None


def line_chart(chart: Chart) -> str:
    """A figure with one line per series."""
    steps = thin(chart.steps, limit=MAX_POINTS)
    series = {name: thin(values, limit=MAX_POINTS) for name, values in chart.series.items()}
    finite = [value for values in series.values() for value in values if math.isfinite(value)] or [0.0]
    finite += [] if chart.level is None else [chart.level]
    marks = ticks(min(0.0, *finite) if chart.from_zero else min(finite), max(finite))
    across = Scale(low=chart.steps[0], high=chart.steps[-1], start=LEFT + 8, stop=WIDTH - RIGHT - 8)
    up = Scale(low=marks[0], high=marks[-1], start=HEIGHT - BOTTOM, stop=TOP)
    lines = [
        _line(values, steps=steps, across=across, up=up, colour=index % 6 + 1, chart=chart)
        for index, values in enumerate(series.values())
    ]
    body = _grid(marks, up=up, form=chart.format) + _step_labels(chart.steps, across=across)
    body += _level(chart.level, up=up) + _mark_lines(chart.marks, across=across) + "".join(lines)
    last = {name: chart.format(_last(values)) for name, values in chart.series.items()}
    return _figure(chart, body=body, legend=last, tips=_tips(chart, series=series, across=across, limit=MAX_POINTS))


def stacked_chart(chart: Chart) -> str:
    """A figure with one bar a step, its series stacked to 100 %; a step without any has no bar."""
    series = {name: thin(values, limit=MAX_BARS) for name, values in chart.series.items()}
    num_bars = len(thin(chart.steps, limit=MAX_BARS))
    totals = [math.fsum(column) for column in zip(*series.values(), strict=True)] or [0.0] * num_bars
    shares = {
        name: [value / total if total > 0 else 0.0 for value, total in zip(values, totals, strict=True)]
        for name, values in series.items()
    }
    pitch = (WIDTH - LEFT - RIGHT) / num_bars
    up = Scale(low=0.0, high=1.0, start=HEIGHT - BOTTOM, stop=TOP)
    bars = []
    bottoms = [0.0] * num_bars
    for layer, values in enumerate(shares.values()):
        colour = 1 + round(layer * 5 / max(1, len(shares) - 1))
        for index, share in enumerate(values):
            if share > 0:
                top, left = up(bottoms[index] + share), LEFT + pitch * (index + 0.08)
                bars.append(
                    f'<rect class="ramp{colour}" x="{left:.2f}" y="{top:.2f}" '
                    f'width="{pitch * 0.84:.2f}" height="{up(bottoms[index]) - top:.2f}"/>'
                )
            bottoms[index] += share
    middle = Scale(low=chart.steps[0], high=chart.steps[-1], start=LEFT + pitch / 2, stop=WIDTH - RIGHT - pitch / 2)
    body = _grid((0.0, 0.5, 1.0), up=up, form=percent) + _step_labels(chart.steps, across=middle) + "".join(bars)
    body += _mark_lines(chart.marks, across=middle)
    last = {name: percent(values[-1]) for name, values in shares.items()}
    tips = _tips(chart, series=shares, across=middle, limit=MAX_BARS)
    return _figure(chart, body=body, legend=last, tips=tips, ramp=True)


def key_mark(colour: str) -> str:
    """The small square of a legend, filled by the class `colour`."""
    square = f'<rect class="{colour}" width="10" height="10" rx="2.5"/>'
    return f'<svg class="key" viewBox="0 0 10 10" aria-hidden="true">{square}</svg>'


def _line(
    values: Sequence[float], *, steps: Sequence[float], across: Scale, up: Scale, colour: int, chart: Chart
) -> str:
    """A path that breaks where a value is missing; a lone value is a dot."""
    path, pen, dots = [], "M", []
    for index, (step, value) in enumerate(zip(steps, values, strict=True)):
        if not math.isfinite(value):
            pen = "M"
            continue
        x, y = across(step), up(value)
        path.append(f"H{x:.2f} V{y:.2f}" if chart.stepped and pen == "L" else f"{pen}{x:.2f} {y:.2f}")
        alone = pen == "M" and (index + 1 == len(values) or not math.isfinite(values[index + 1]))
        if alone or chart.dots or index + 1 == len(values):
            dots.append(f'<circle class="fill{colour}" cx="{x:.2f}" cy="{y:.2f}" r="3.2"/>')
        pen = "L"
    return f'<path class="line stroke{colour}" d="{" ".join(path)}"/>{"".join(dots)}' if path else ""


def _grid(marks: Sequence[float], *, up: Scale, form: Format) -> str:
    return "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(mark):.2f}" y2="{up(mark):.2f}"/>'
        f'<text class="tick" x="{LEFT - 7}" y="{up(mark) + 3.5:.2f}" text-anchor="end">{escape(form(mark))}</text>'
        for mark in marks
    )


def _level(value: float | None, *, up: Scale) -> str:
    """A dashed line that values are to be seen against."""
    if value is None:
        return ""
    return f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(value):.2f}" y2="{up(value):.2f}"/>'


def _mark_lines(marks: Sequence[Mark], *, across: Scale) -> str:
    """What happened before the first step stands at it."""
    places = {(each.kind, round(across(max(each.step, across.low)), 1)) for each in marks if each.step <= across.high}
    return "".join(
        f'<line class="mark-{escape(kind)}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 4}" y2="{HEIGHT - BOTTOM}"/>'
        for kind, x in sorted(places)
    )


def _step_labels(steps: Sequence[float], *, across: Scale) -> str:
    inside = [mark for mark in ticks(steps[0], steps[-1], count=6) if steps[0] <= mark <= steps[-1] and mark % 1 == 0]
    shown = sorted({steps[0], steps[-1], *inside})
    gap = 18.0 + 6.0 * len(str(steps[-1]))
    kept: list[float] = []
    for step in shown:
        near_end = step != steps[-1] and across(steps[-1]) - across(step) < gap
        if not near_end and (not kept or across(step) - across(kept[-1]) >= gap):
            kept.append(step)
    labels = "".join(
        f'<text class="tick" x="{across(step):.2f}" y="{HEIGHT - 9}" text-anchor="middle">{step:.0f}</text>'
        for step in kept
    )
    return f'{labels}<text class="tick" x="{LEFT - 7}" y="{HEIGHT - 9}" text-anchor="end">step</text>'


def _tips(chart: Chart, *, series: Mapping[str, Sequence[float]], across: Scale, limit: int) -> str:
    """Places of the points on the drawing and what is told of them, as JSON."""
    runs = runs_of(chart.steps, limit=limit)
    places = [round(across(step), 1) for step in thin(chart.steps, limit=limit)]
    told = []
    for index, run in enumerate(runs):
        when = f"step {run[0]}" if len(run) == 1 else f"steps {run[0]} to {run[-1]}, mean"
        told.append([when, *(f"{name}\t{chart.format(values[index])}" for name, values in series.items() if values)])
    return json.dumps({"x": places, "t": told}, separators=(",", ":"))


def _last(values: Sequence[float]) -> float:
    return next((value for value in reversed(values) if math.isfinite(value)), math.nan)


def _figure(chart: Chart, *, body: str, legend: Mapping[str, str], tips: str, ramp: bool = False) -> str:
    spread = max(1, len(legend) - 1)
    colours = [f"ramp{1 + round(i * 5 / spread)}" if ramp else f"fill{i % 6 + 1}" for i in range(len(legend))]
    entries = "".join(
        f"<li>{key_mark(colour)}{escape(name)} <b>{escape(value)}</b></li>"
        for colour, (name, value) in zip(colours, legend.items(), strict=True)
    )
    title, note = escape(chart.title), escape(chart.note)
    return (
        f"<figure><figcaption><h3>{title}</h3><p>{note}</p></figcaption>"
        f'<ul class="legend">{entries}</ul>'
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}: {note}" '
        f'data-tips="{escape(tips)}">{body}<line class="hair" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg></figure>'
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """A line chart in words: what each of its lines reads from a report."""

    title: str
    note: str
    series: dict[str, Callable[[StepReport], float]]
    format: Format = number
    from_zero: bool = True
    stepped: bool = False
    level: float | None = None


def _tokens_per_s(report: StepReport) -> float:
    return report.num_tokens / report.step_s if report.step_s > 0 else 0.0


def _error(report: StepReport) -> float:
    return report.predicted_s / report.step_s if report.step_s > 0 else math.nan


LEARNING = (
    Lines(title="Loss", note="Nats per target token", series={"loss": lambda r: r.loss}, from_zero=False),
    Lines(title="Throughput", note="Tokens per second, over all devices", series={"tokens per second": _tokens_per_s}),
    Lines(
        title="MFU",
        note="Model FLOPs over time and peak; of attention alone likewise",
        series={"all": lambda r: r.mfu, "attention": lambda r: r.attention_mfu},
        format=percent,
    ),
    Lines(title="Gradient norm", note="Before clipping", series={"norm": lambda r: r.grad_norm}),
)
PREDICTION = (
    Lines(
        title="Step time",
        note="What the plan promised and what the clock said",
        series={"measured": lambda r: r.step_s, "predicted": lambda r: r.predicted_s},
        format=seconds,
    ),
    Lines(
        title="Predicted over measured",
        note="1 is right; below, steps took longer than foretold",
        series={"ratio": _error},
        level=1.0,
    ),
    Lines(
        title="Gap",
        note="Predicted step over its lower bound; 1 is perfect",
        series={"gap": lambda r: r.gap},
        from_zero=False,
    ),
    Lines(
        title="Planning",
        note="Time to plan a batch, and what the step waited for it",
        series={"plan": lambda r: r.plan_s, "wait": lambda r: r.plan_wait_s},
        format=seconds,
    ),
)
BALANCE = (
    Lines(
        title="Imbalance",
        note="(max − mean) / max over ranks, by resource, as planned",
        series={
            "compute": lambda r: r.imbalance.compute,
            "attention": lambda r: r.imbalance.attention,
            "memory": lambda r: r.imbalance.memory,
            "communication": lambda r: r.imbalance.communication,
            "encoder": lambda r: math.nan if r.imbalance.encoder is None else r.imbalance.encoder,
        },
        format=percent,
    ),
    Lines(
        title="Bubble",
        note="Share of rank time spent waiting for other ranks",
        series={"bubble": lambda r: r.bubble},
        format=percent,
    ),
)
WORLD = Lines(
    title="Devices",
    note="In use at each step",
    series={"devices": lambda r: float(r.world_size)},
    stepped=True,
)


def step_charts(group: Sequence[Lines], reports: Sequence[StepReport], *, marks: tuple[Mark, ...] = ()) -> str:
    """A figure for each; what no step has a number of is left out, line by line."""
    return "".join(
        _draw(lines, reports, marks=marks)
        for lines in group
        if lines is LEARNING[0]
        or any(math.isfinite(read(report)) for read in lines.series.values() for report in reports)
    )


def degrees_chart(reports: Sequence[StepReport], *, marks: tuple[Mark, ...] = ()) -> str:
    """Degrees over time."""
    degrees = sorted({degree for report in reports for degree in report.degrees})
    return stacked_chart(
        Chart(
            title="Degrees",
            note="Share of rank slots in groups of each degree",
            steps=tuple(report.step for report in reports),
            series={f"degree {d}": [float(d * report.degrees.get(d, 0)) for report in reports] for d in degrees},
            marks=marks,
        )
    )


def _draw(lines: Lines, reports: Sequence[StepReport], *, marks: tuple[Mark, ...]) -> str:
    def known(values: Sequence[float]) -> bool:
        return any(math.isfinite(each) for each in values)

    series = {name: [read(report) for report in reports] for name, read in lines.series.items()}
    return line_chart(
        Chart(
            title=lines.title,
            note=lines.note,
            steps=tuple(report.step for report in reports),
            series={name: values for name, values in series.items() if known(values)} or series,
            format=lines.format,
            from_zero=lines.from_zero,
            marks=marks,
            stepped=lines.stepped,
            level=lines.level,
        )
    )
