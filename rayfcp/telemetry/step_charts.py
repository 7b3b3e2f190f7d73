"""Which charts a report shows of a run's steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rayfcp.telemetry.charts import Chart, Format, line_chart, stacked_chart
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


def _tokens_per_s(report: StepReport) -> float:
    return report.num_tokens / report.step_s if report.step_s > 0 else 0.0


BEFORE_DEGREES = (
    Lines(title="Loss", note="Nats per target token", series={"loss": lambda r: r.loss}, from_zero=False),
    Lines(
        title="Step time",
        note="What the plan promised and what the clock said",
        series={"measured": lambda r: r.step_s, "predicted": lambda r: r.predicted_s},
        format=seconds,
    ),
    Lines(title="Tokens per second", note="Over all devices", series={"tokens per second": _tokens_per_s}),
    Lines(
        title="MFU",
        note="Model FLOPs over time and peak",
        series={"all": lambda r: r.mfu, "attention": lambda r: r.attention_mfu},
        format=percent,
    ),
    Lines(
        title="Imbalance",
        note="(max − mean) / max over ranks, by resource",
        series={
            "compute": lambda r: r.imbalance.compute,
            "attention": lambda r: r.imbalance.attention,
            "memory": lambda r: r.imbalance.memory,
            "communication": lambda r: r.imbalance.communication,
        },
        format=percent,
    ),
)
AFTER_DEGREES = (
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


def step_charts(reports: Sequence[StepReport]) -> str:
    """Eight figures: what was learned, how fast, how evenly, and what planning cost."""
    before, after = ([_draw(lines, reports) for lines in group] for group in (BEFORE_DEGREES, AFTER_DEGREES))
    return "".join([*before, _degrees(reports), *after])


def _draw(lines: Lines, reports: Sequence[StepReport]) -> str:
    return line_chart(
        Chart(
            title=lines.title,
            note=lines.note,
            steps=tuple(report.step for report in reports),
            series={name: [read(report) for report in reports] for name, read in lines.series.items()},
            format=lines.format,
            from_zero=lines.from_zero,
        )
    )


def _degrees(reports: Sequence[StepReport]) -> str:
    degrees = sorted({degree for report in reports for degree in report.degrees})
    return stacked_chart(
        Chart(
            title="Degrees",
            note="Share of rank slots in groups of each degree",
            steps=tuple(report.step for report in reports),
            series={f"degree {d}": [float(d * report.degrees.get(d, 0)) for report in reports] for d in degrees},
        )
    )
