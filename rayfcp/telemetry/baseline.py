"""What a static plan would have made of a run's batches, beside what the run's own strategy makes of them."""

import statistics
from dataclasses import dataclass

from rayfcp.telemetry.charts import Chart, Mark, line_chart
from rayfcp.telemetry.summary import number, percent, seconds
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


def baseline_charts(baseline: Baseline, *, marks: tuple[Mark, ...]) -> str:
    """Imbalance and step time before and after."""
    steps = tuple(each.step for each in baseline.steps)
    before, after = f"before: {baseline.static}", f"after: {baseline.own}"
    how = f"{len(steps)} of the run's batches, planned and simulated"
    return line_chart(
        Chart(
            title="Compute imbalance, before and after",
            note=f"(max − mean) / max over ranks; {how}",
            steps=steps,
            series={
                before: [each.before.compute for each in baseline.steps],
                after: [each.after.compute for each in baseline.steps],
            },
            format=percent,
            marks=marks,
            dots=True,
        )
    ) + line_chart(
        Chart(
            title="Simulated step, before and after",
            note=f"Seconds without the optimizer; static plans take {number(round(baseline.speedup, 2))} x as long",
            steps=steps,
            series={
                before: [each.before_s for each in baseline.steps],
                after: [each.after_s for each in baseline.steps],
            },
            format=seconds,
            marks=marks,
            dots=True,
        )
    )
