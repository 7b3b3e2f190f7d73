"""Values of a run's steps for charts, as data for the renderer (`data/charts.js`)."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

from rayfcp.telemetry.page import Chart
from rayfcp.telemetry.summary import result_text
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
    steps: Sequence[int], series: Mapping[str, Sequence[float]], *, limit: int = MAX_POINTS
) -> dict[str, Any]:
    """Return the steps and series of a chart, long runs as means of neighbouring steps."""
    spans = [(run[0], run[-1]) for run in runs_of(steps, limit=limit)]
    return {
        "x": [(first + last) / 2 for first, last in spans],
        "spans": spans,
        "series": [{"name": name, "values": thin(values, limit=limit)} for name, values in series.items()],
    }


def tokens_per_s(report: StepReport) -> float:
    """Tokens of a step over its seconds; 0 for a step that took no time."""
    return report.num_tokens / report.step_s if report.step_s > 0 else 0.0


def _imbalance(report: StepReport, *, of: str) -> float:
    return report.imbalance.by_resource.get(of, math.nan)


def _of_pairs(report: StepReport, *, name: str) -> float:
    return getattr(report.pairs, name, math.nan)


COLUMNS: Mapping[str, Callable[[StepReport], float]] = {
    "step": attrgetter("step"),
    "loss": lambda report: math.nan if report.loss is None else report.loss,
    **{name: attrgetter(name) for name in ("grad_norm", "step_s", "predicted_s")},
    "predicted_ratio": lambda report: report.predicted_s / report.step_s if report.step_s > 0 else math.nan,
    "tokens_per_s": lambda report: tokens_per_s(report) or math.nan,
    **{name: attrgetter(name) for name in ("plan_s", "prepare_s", "plan_wait_s", "mfu", "attention_mfu", "bubble")},
    **{field.name: partial(_imbalance, of=field.name) for field in fields(Imbalance)},
    **{name: attrgetter(name) for name in ("gap", "world_size")},
    **{name: partial(_of_pairs, name=name) for name in ("chosen", "rejected", "accuracy")},
}
"""Values of a step that charts show, NaN where unknown; imbalances by resource."""


def step_values(reports: Sequence[StepReport], *, marks: Sequence[Mark]) -> dict[str, Any]:
    """Return `COLUMNS` over the steps, from which `STEP_CHARTS` of the renderer are drawn."""
    columns = {name: [read(report) for report in reports] for name, read in COLUMNS.items()}
    return {**over_steps([report.step for report in reports], columns), "marks": marks}


def evaluation_charts(reports: Sequence[StepReport], *, marks: Sequence[Mark]) -> list[Chart]:
    """Return the loss on each evaluation set over the steps after which it was evaluated, and the accuracy of pairs;
    none without evaluation."""
    charts: list[Chart] = []
    for name in dict.fromkeys(name for report in reports for name in report.eval):
        evaluated = [each for each in reports if name in each.eval]
        steps, results = [each.step for each in evaluated], [each.eval[name] for each in evaluated]
        accuracies = [math.nan if each.pairs is None else each.pairs.accuracy for each in results]
        unit = "Nats per target token" if results[-1].pairs is None else "Mean over pairs of answers"
        common = {
            "kind": "lines",
            "format": "number",
            "note": f"{unit}; after step {steps[-1]}: {result_text(results[-1])}",
            "zero": False,
            "dots": True,
            "marks": marks,
        }
        losses = over_steps(steps, {"loss": [each.loss for each in results]})
        charts.append({**common, "title": f"Evaluation loss: {name}", **losses})
        if results[-1].pairs is not None:
            shares = over_steps(steps, {"accuracy": accuracies})
            charts.append({**common, "title": f"Evaluation accuracy: {name}", "format": "percent", **shares})
    return charts


def degrees_chart(reports: Sequence[StepReport], *, marks: Sequence[Mark]) -> Chart:
    """Return the share of rank slots in groups of each degree over the steps."""
    degrees = sorted({degree for report in reports for degree in report.degrees})
    series = {f"degree {d}": [float(d * report.degrees.get(d, 0)) for report in reports] for d in degrees}
    return {
        "kind": "shares",
        "title": "Context-parallel degrees",
        "note": "Share of rank slots in groups of each degree",
        **over_steps([report.step for report in reports], series, limit=MAX_BARS),
        "marks": marks,
    }
