"""A run in a few numbers, and the text that closes it on a terminal."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rayfcp.values import StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Medians and means leave the first step out where there are others: it pays for warming up.

    `tokens_per_s`, `step_s`, `plan_s`, `mfu`, `attention_mfu`: medians over steps. `compute_imbalance`: mean.
    `mean_degree`: degree that a rank meets, i.e. each group weighted by its ranks; 0 without groups. `plan_ratio`:
    median of plan_s / step_s; likewise what a step waited for its plan, median and maximum. `prediction_error`:
    median of |predicted - measured| / measured.
    """

    num_steps: int
    first_step: int
    last_step: int
    num_tokens: int
    strategy: str
    world_size: int
    first_loss: float
    last_loss: float
    tokens_per_s: float
    step_s: float
    plan_s: float
    plan_ratio: float
    median_plan_wait_ratio: float
    max_plan_wait_ratio: float
    compute_imbalance: float
    mean_degree: float
    mfu: float
    attention_mfu: float
    prediction_error: float


def summarize(reports: Sequence[StepReport]) -> RunSummary:
    """The run of these reports, in step order.

    Raises:
        ValueError: There is no step.
    """
    if not reports:
        raise ValueError("steps are none, must be at least 1; let the run commit a step first")
    steady = reports[1:] or reports
    waits = [_ratio(report.plan_wait_s, report.step_s) for report in steady]
    return RunSummary(
        num_steps=len(reports),
        first_step=reports[0].step,
        last_step=reports[-1].step,
        num_tokens=sum(report.num_tokens for report in reports),
        strategy=_strategies(reports),
        world_size=reports[-1].world_size,
        first_loss=reports[0].loss,
        last_loss=reports[-1].loss,
        tokens_per_s=statistics.median(_ratio(report.num_tokens, report.step_s) for report in steady),
        step_s=statistics.median(report.step_s for report in steady),
        plan_s=statistics.median(report.plan_s for report in steady),
        plan_ratio=statistics.median(_ratio(report.plan_s, report.step_s) for report in steady),
        median_plan_wait_ratio=statistics.median(waits),
        max_plan_wait_ratio=max(waits),
        compute_imbalance=statistics.fmean(report.imbalance.compute for report in steady),
        mean_degree=mean_degree(reports),
        mfu=statistics.median(report.mfu for report in steady),
        attention_mfu=statistics.median(report.attention_mfu for report in steady),
        prediction_error=statistics.median(
            _ratio(abs(report.predicted_s - report.step_s), report.step_s) for report in steady
        ),
    )


def _strategies(reports: Sequence[StepReport]) -> str:
    """All that planned steps, where there are several with their steps, most first."""
    counts = Counter(report.strategy for report in reports).most_common()
    return counts[0][0] if len(counts) == 1 else ", ".join(f"{name} ({count} steps)" for name, count in counts)


def mean_degree(reports: Sequence[StepReport]) -> float:
    """The degree that a rank meets: sum of degree^2 x groups over sum of degree x groups."""
    groups = [(degree, count) for report in reports for degree, count in report.degrees.items()]
    num_ranks = sum(degree * count for degree, count in groups)
    return _ratio(sum(degree * degree * count for degree, count in groups), num_ranks)


def format_summary(summary: RunSummary, *, run_dir: str | Path) -> str:
    """A few aligned lines without a newline at the end."""
    folder = Path(run_dir)
    steps = f"{summary.num_steps} ({summary.first_step} to {summary.last_step}), {summary.num_tokens:,} tokens"
    rows = [
        ("steps", steps),
        ("loss", f"{number(summary.first_loss)} -> {number(summary.last_loss)}"),
        (
            "speed",
            f"{number(summary.tokens_per_s)} tokens/s, {seconds(summary.step_s)} a step, MFU {percent(summary.mfu)}",
        ),
        ("layout", f"{summary.strategy} on {summary.world_size} devices, mean degree {number(summary.mean_degree)}"),
        ("imbalance", f"{percent(summary.compute_imbalance)} of compute"),
        (
            "planning",
            f"{seconds(summary.plan_s)} a plan, {percent(summary.plan_ratio)} of a step; "
            f"steps waited {percent(summary.median_plan_wait_ratio)} of their time for it, "
            f"at most {percent(summary.max_plan_wait_ratio)}",
        ),
        ("report", str(folder / "report.html")),
        ("checkpoint", str(folder / "checkpoints")),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows)


def number(value: float) -> str:
    """Three digits or more, thousands marked.

    >>> number(5.5461), number(12345.6), number(0.00012), number(4.0)
    ('5.546', '12,346', '0.00012', '4')
    """
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else "infinite"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def seconds(value: float) -> str:
    """Three digits, in milliseconds below 0.1 s.

    >>> seconds(0.00021), seconds(0.0123), seconds(2.5), seconds(1501), seconds(0.0)
    ('0.21 ms', '12.3 ms', '2.5 s', '1,501 s', '0 s')
    """
    if 0 < abs(value) < 0.1:
        return f"{value * 1e3:.3g} ms"
    return f"{number(value)} s" if abs(value) >= 1000 else f"{value:.3g} s"


def percent(ratio: float) -> str:
    """Three digits, at most two decimals.

    >>> percent(0.1234), percent(0.00041), percent(0.0), percent(7e-6), percent(12.5), percent(1.0)
    ('12.3 %', '0.04 %', '0 %', 'under 0.01 %', '1,250 %', '100 %')
    """
    share = ratio * 100
    if 0 < share < 0.01:
        return "under 0.01 %"
    return f"{share:,.0f} %" if abs(share) >= 1000 else f"{round(share, 2):.3g} %"


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
