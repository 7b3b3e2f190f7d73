"""Which charts a report shows of a run's steps."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rayfcp.telemetry.charts import Chart, Format, Mark, line_chart, stacked_chart
from rayfcp.telemetry.summary import number, percent, seconds
from rayfcp.values import StepReport


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
