"""Charts of a run's steps, as data for the renderer (`data/charts.js`)."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TypeVar

from rayfcp.telemetry.page import Chart
from rayfcp.values import Imbalance, StepReport

T = TypeVar("T")

MAX_POINTS, MAX_BARS = 400, 140
"""Points of a line and bars of a chart of shares: about as many as a figure has pixels for."""

Mark = tuple[int, str]
"""A recovery or resize after that many steps: a line across charts. The second field is its kind."""


def runs_of(values: Sequence[T], *, limit: int) -> list[Sequence[T]]:
    """Cut into at most `limit` runs of equal length, except for the last.

    >>> runs_of((1, 2, 3, 4, 5), limit=3)
    [(1, 2), (3, 4), (5,)]
    """
    run = max(1, math.ceil(len(values) / limit))
    return [values[start : start + run] for start in range(0, len(values), run)]


def thin(values: Sequence[float], *, limit: int) -> tuple[float, ...]:
    """Means of at most `limit` equal runs; non-finite values stay out of a mean.

    >>> thin((1.0, 3.0, 5.0, 7.0), limit=2)
    (2.0, 6.0)
    """
    means = []
    for run in runs_of(values, limit=limit):
        known = [value for value in run if math.isfinite(value)]
        means.append(float(f"{math.fsum(known) / len(known):.6g}") if known else math.nan)
    return tuple(means)


def over_steps(
    kind: str, title: str, *, note: str, steps: Sequence[int], series: Mapping[str, Sequence[float]], **options: object
) -> Chart:
    """Return a chart of values over steps, long runs as means of neighbouring steps."""
    limit = MAX_BARS if kind == "shares" else MAX_POINTS
    spans = [(run[0], run[-1]) for run in runs_of(steps, limit=limit)]
    return {
        "kind": kind,
        "title": title,
        "note": note,
        "x": [(first + last) / 2 for first, last in spans],
        "spans": spans,
        "series": [{"name": name, "values": thin(values, limit=limit)} for name, values in series.items()],
        **options,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """Lines over steps, each the value that a function reads from a report; NaN where a step has none.

    `format`: number, seconds or percent. `zero`: the axis begins at 0. `stepped`: a value holds until the next one.
    `smooth`: a moving average is drawn over the values. `level`: a dashed line to compare with.
    """

    title: str
    note: str
    series: dict[str, Callable[[StepReport], float]]
    format: str = "number"
    zero: bool = True
    stepped: bool = False
    smooth: bool = False
    level: float | None = None


def tokens_per_s(report: StepReport) -> float:
    """Tokens of a step over its seconds; 0 for a step that took no time."""
    return report.num_tokens / report.step_s if report.step_s > 0 else 0.0


def _imbalance(report: StepReport, *, of: str) -> float:
    return report.imbalance.by_resource.get(of, math.nan)


IMBALANCES: dict[str, Callable[[StepReport], float]] = {
    field.name: partial(_imbalance, of=field.name) for field in fields(Imbalance)
}
"""Imbalance of a step by resource, NaN where unknown."""

LOSS = LineChart(title="Loss", note="Nats per target token", series={"loss": lambda r: r.loss}, zero=False)
TRAINING = (
    LOSS,
    LineChart(
        title="Throughput",
        note="Tokens per second, all devices together",
        series={"tokens per second": tokens_per_s},
        smooth=True,
    ),
    LineChart(
        title="MFU",
        note="Model FLOPs over step time and the devices' peak; attention FLOPs alone likewise",
        series={"all": lambda r: r.mfu, "attention": lambda r: r.attention_mfu},
        format="percent",
        smooth=True,
    ),
    LineChart(title="Gradient norm", note="Before clipping", series={"norm": lambda r: r.grad_norm}),
)
PREDICTION = (
    LineChart(
        title="Step time",
        note="Measured, and as the plan predicted it",
        series={"measured": lambda r: r.step_s, "predicted": lambda r: r.predicted_s},
        format="seconds",
    ),
    LineChart(
        title="Predicted over measured",
        note="1 is exact; below 1, steps took longer than predicted",
        series={"ratio": lambda r: r.predicted_s / r.step_s if r.step_s > 0 else math.nan},
        level=1.0,
    ),
    LineChart(
        title="Gap",
        note="Predicted step time over its lower bound; 1 is optimal",
        series={"gap": lambda r: r.gap},
        zero=False,
    ),
    LineChart(
        title="Planning",
        note="Time to plan a batch, and how long the step was blocked on its plan",
        series={"plan": lambda r: r.plan_s, "blocked": lambda r: r.plan_wait_s},
        format="seconds",
    ),
)
BALANCE = (
    LineChart(
        title="Imbalance",
        note="(max − mean) / max over ranks, by resource, as planned",
        series=IMBALANCES,
        format="percent",
    ),
    LineChart(
        title="Bubble",
        note="Share of rank time spent waiting for other ranks",
        series={"bubble": lambda r: r.bubble},
        format="percent",
    ),
)
DEVICES = LineChart(
    title="Devices", note="In use at each step", series={"devices": lambda r: float(r.world_size)}, stepped=True
)


def step_charts(
    charts: Sequence[LineChart], reports: Sequence[StepReport], *, marks: Sequence[Mark] = ()
) -> list[Chart]:
    """Return the charts with at least one finite value, and the loss whatever it was."""
    drawn = []
    for chart in charts:
        series = {name: [read(report) for report in reports] for name, read in chart.series.items()}
        known = {name: values for name, values in series.items() if any(map(math.isfinite, values))}
        if known or chart is LOSS:
            drawn.append(
                over_steps(
                    "lines",
                    chart.title,
                    note=chart.note,
                    steps=[report.step for report in reports],
                    series=known or series,
                    format=chart.format,
                    zero=chart.zero,
                    stepped=chart.stepped,
                    smooth=chart.smooth,
                    level=chart.level,
                    marks=marks,
                )
            )
    return drawn


def degrees_chart(reports: Sequence[StepReport], *, marks: Sequence[Mark] = ()) -> Chart:
    """Return the share of rank slots in groups of each degree over the steps."""
    degrees = sorted({degree for report in reports for degree in report.degrees})
    return over_steps(
        "shares",
        "Context-parallel degrees",
        note="Share of rank slots in groups of each degree",
        steps=[report.step for report in reports],
        series={f"degree {d}": [float(d * report.degrees.get(d, 0)) for report in reports] for d in degrees},
        marks=marks,
    )
