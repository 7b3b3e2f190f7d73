"""Batches of a run planned by a static baseline and by the run's own strategy."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rayfcp.telemetry.charts import Mark, over_steps
from rayfcp.telemetry.page import Chart
from rayfcp.telemetry.summary import number
from rayfcp.values import Imbalance


@dataclass(frozen=True, slots=True, kw_only=True)
class Both:
    """One batch planned and simulated twice, on the same devices and costs: `before` by the static strategy, `after` by
    the run's own."""

    step: int
    before: Imbalance
    after: Imbalance
    before_s: float
    after_s: float
    before_degree: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """`static` and `own`: names of strategies; `steps`, in order, are some of the run's; at least one."""

    static: str
    own: str
    steps: tuple[Both, ...]

    @property
    def speedup(self) -> float:
        """Simulated seconds of all these batches, static over own."""
        after_s = sum(each.after_s for each in self.steps)
        return sum(each.before_s for each in self.steps) / after_s if after_s > 0 else 1.0

    @property
    def before(self) -> float:
        """Mean imbalance of compute with static plans."""
        return statistics.fmean(each.before.compute for each in self.steps)

    @property
    def after(self) -> float:
        """Mean imbalance of compute with the run's strategy."""
        return statistics.fmean(each.after.compute for each in self.steps)


def baseline_charts(baseline: Baseline, *, marks: Sequence[Mark]) -> list[Chart]:
    """Return imbalance and step time of some batches, planned statically and by the run's strategy."""
    steps = baseline.steps
    imbalance = (
        "Compute imbalance and the static baseline",
        f"(max − mean) / max over ranks; {len(steps)} of the run's batches, planned and simulated",
        "percent",
        [(each.before.compute, each.after.compute) for each in steps],
    )
    time = (
        "Simulated step and the static baseline",
        f"Without the optimizer; static plans take {number(round(baseline.speedup, 2))} times as long",
        "seconds",
        [(each.before_s, each.after_s) for each in steps],
    )
    names = (f"static baseline: {baseline.static}", f"this run: {baseline.own}")
    return [
        {
            "kind": "lines",
            "title": title,
            "note": note,
            **over_steps([each.step for each in steps], dict(zip(names, zip(*values, strict=True), strict=True))),
            "format": unit,
            "zero": True,
            "dots": True,
            "marks": marks,
        }
        for title, note, unit, values in (imbalance, time)
    ]
