"""A run in a few numbers, the text that ends it on a terminal, and the formats of numbers on pages and terminals."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayfcp.values import EvalResult, StepReport
from rayfcp.values.counted import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Numbers of a run. Medians and means leave out the first step of each start, which compiles and warms up.

    `tokens_per_s`, `step_s`, `plan_s`, `mfu`, `attention_mfu`: medians over steps. `prepare_s`, `prepare_ratio`:
    medians of prepare_s and of prepare_s / step_s, NaN if no step has it. `compute_imbalance`: mean. `mean_degree`:
    mean over ranks of the degree of their group; 0 without groups. `median_plan_wait_ratio`, `max_plan_wait_ratio`:
    blocked on the plan, over plan_wait_s + step_s. `prediction_error`: median of |predicted - measured| / measured.
    `first_loss`, at `first_loss_step`, and `last_loss`: of steps with targets, None without any. `num_broken`: rows
    without targets since an image of theirs cannot be decoded.
    """

    num_steps: int
    first_step: int
    last_step: int
    num_tokens: int
    strategy: str
    world_size: int
    first_loss_step: int
    first_loss: float | None
    last_loss: float | None
    tokens_per_s: float
    step_s: float
    plan_s: float
    prepare_s: float
    prepare_ratio: float
    median_plan_wait_ratio: float
    max_plan_wait_ratio: float
    compute_imbalance: float
    mean_degree: float
    mfu: float
    attention_mfu: float
    prediction_error: float
    num_broken: int = 0


def summarize(reports: Sequence[StepReport], *, started_after: Sequence[int] = (0,), num_broken: int = 0) -> RunSummary:
    """Return the summary of reports in step order; the run was started or resumed after the steps `started_after`.

    Raises:
        ValueError: There is no step.
    """
    if not reports:
        raise ValueError("reports has 0 steps, must have at least 1; let the run commit a step first")
    trained = [report for report in reports if report.loss is not None] or reports
    first_steps = {reports[0].step, *(step + 1 for step in started_after)}
    steady = [report for report in reports if report.step not in first_steps] or reports
    prepared = [report for report in steady if math.isfinite(report.prepare_s)]
    waits = [_ratio(report.plan_wait_s, report.plan_wait_s + report.step_s) for report in steady]
    return RunSummary(
        num_steps=len(reports),
        first_step=reports[0].step,
        last_step=reports[-1].step,
        num_tokens=sum(report.num_tokens for report in reports),
        strategy=_strategies(reports),
        world_size=reports[-1].world_size,
        first_loss_step=trained[0].step,
        first_loss=trained[0].loss,
        last_loss=trained[-1].loss,
        tokens_per_s=statistics.median(_ratio(report.num_tokens, report.step_s) for report in steady),
        step_s=statistics.median(report.step_s for report in steady),
        plan_s=statistics.median(report.plan_s for report in steady),
        prepare_s=_median([report.prepare_s for report in prepared]),
        prepare_ratio=_median([_ratio(report.prepare_s, report.step_s) for report in prepared]),
        median_plan_wait_ratio=statistics.median(waits),
        max_plan_wait_ratio=max(waits),
        compute_imbalance=statistics.fmean(report.imbalance.compute for report in steady),
        mean_degree=mean_degree(reports),
        mfu=statistics.median(report.mfu for report in steady),
        attention_mfu=statistics.median(report.attention_mfu for report in steady),
        prediction_error=statistics.median(
            _ratio(abs(report.predicted_s - report.step_s), report.step_s) for report in steady
        ),
        num_broken=num_broken,
    )


def _strategies(reports: Sequence[StepReport]) -> str:
    """Return the strategies that planned steps, the most frequent first."""
    counts = Counter(report.strategy for report in reports).most_common()
    return counts[0][0] if len(counts) == 1 else ", ".join(f"{name} ({counted(n, 'step')})" for name, n in counts)


def mean_degree(reports: Sequence[StepReport]) -> float:
    """Mean over ranks of the degree of their group: sum of degree^2 x groups over sum of degree x groups."""
    groups = [(degree, count) for report in reports for degree, count in report.degrees.items()]
    num_ranks = sum(degree * count for degree, count in groups)
    return _ratio(sum(degree * degree * count for degree, count in groups), num_ranks)


def format_summary(summary: RunSummary, *, run_dir: str | Path) -> str:
    """Return a few aligned lines, without a newline at the end."""
    folder = Path(run_dir)
    steps = f"{summary.num_steps} ({summary.first_step} to {summary.last_step}), {summary.num_tokens:,} tokens"
    rows = [
        ("steps", steps),
        ("loss", f"{number(summary.first_loss)} -> {number(summary.last_loss)}"),
        *([("broken", broken_text(summary.num_broken))] if summary.num_broken else []),
        (
            "speed",
            f"{number(summary.tokens_per_s)} tokens/s, {seconds(summary.step_s)} per step, MFU {percent(summary.mfu)}",
        ),
        (
            "layout",
            f"{summary.strategy} on {counted(summary.world_size, 'device')}, mean degree {number(summary.mean_degree)}",
        ),
        ("imbalance", f"{percent(summary.compute_imbalance)} of compute"),
        (
            "planning",
            f"{seconds(summary.plan_s)} per plan, {prepared_text(summary)}; blocked on planning: "
            f"{percent(summary.median_plan_wait_ratio)} of step time (median), "
            f"{percent(summary.max_plan_wait_ratio)} at most",
        ),
        ("report", str(folder / "report.html")),
        ("checkpoint", str(folder / "checkpoints")),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows)


def number(value: float | None) -> str:
    """Return four digits, or all digits of larger numbers with thousands marked.

    >>> number(5.5461), number(12345.6), number(0.00012), number(4.0), number(None)
    ('5.546', '12,346', '0.00012', '4', '–')
    """
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else "infinite"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def seconds(value: float) -> str:
    """Return three digits, in milliseconds below 0.1 s.

    >>> seconds(0.00021), seconds(0.0123), seconds(2.5), seconds(1501), seconds(0.0)
    ('0.21 ms', '12.3 ms', '2.5 s', '1,501 s', '0 s')
    """
    if 0 < abs(value) < 0.1:
        return f"{value * 1e3:.3g} ms"
    return f"{number(value)} s" if abs(value) >= 1000 else f"{value:.3g} s"


def percent(ratio: float) -> str:
    """Return three digits, at most two decimals.

    >>> percent(0.1234), percent(0.00041), percent(0.0), percent(7e-6), percent(12.5), percent(1.0)
    ('12.3 %', '0.04 %', '0 %', 'under 0.01 %', '1,250 %', '100 %')
    """
    share = ratio * 100
    if 0 < share < 0.01:
        return "under 0.01 %"
    return f"{share:,.0f} %" if abs(share) >= 1000 else f"{round(share, 2):.3g} %"


def result_text(result: EvalResult) -> str:
    """Return an evaluation in words.

    >>> from rayfcp.values import PairStats
    >>> result_text(EvalResult(loss=0.0, tokens=1234))
    'loss 0, perplexity 1, 1,234 tokens'
    >>> result_text(EvalResult(loss=0.5, tokens=9, pairs=PairStats(num_pairs=2, chosen=1.5, rejected=1, accuracy=0.5)))
    'loss 0.5, accuracy 50 %, margin 0.5, 2 pairs'
    """
    pairs = result.pairs
    if pairs is not None:
        rates = f"accuracy {percent(pairs.accuracy)}, margin {number(pairs.margin)}"
        return f"loss {number(result.loss)}, {rates}, {pairs.num_pairs:,} pairs"
    broken = f", {broken_text(result.broken_rows)}" if result.broken_rows else ""
    if not result.tokens:
        return f"no targets{broken}"
    return f"loss {number(result.loss)}, perplexity {number(result.perplexity)}, {result.tokens:,} tokens{broken}"


def broken_text(num_rows: int) -> str:
    """Return the number of rows that were not trained, or evaluated, since an image of theirs cannot be decoded."""
    return f"{counted(num_rows, 'row')} with a broken image without targets"


def finite(value: Any) -> Any:
    """Return plain data for JSON: None for each non-finite float, at any depth."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def prepared_text(summary: RunSummary) -> str:
    """Return how long the programs of a step took, and its share of a step."""
    if math.isnan(summary.prepare_s):
        return "programs not timed"
    return f"{seconds(summary.prepare_s)} to programs, {percent(summary.prepare_ratio)} of a step"


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else math.nan


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
