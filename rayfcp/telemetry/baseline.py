"""Batches of a run planned by a static baseline and by the run's own strategy."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rayfcp.telemetry.charts import Mark, over_steps
from rayfcp.telemetry.page import Chart
from rayfcp.telemetry.summary import number

Pair = tuple[float, float]
"""Values of one batch planned by the static strategy and by the run's own, on the same devices and costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """`static` and `own`: names of strategies; `steps`: some of the run's, in order, at least one, each with its
    imbalance of compute and its simulated seconds."""

    static: str
    own: str
    steps: tuple[int, ...]
    imbalances: tuple[Pair, ...]
    step_s: tuple[Pair, ...]

    @property
    def speedup(self) -> float:
        """Simulated seconds of all these batches, static over own."""
        static_s, own_s = (sum(times) for times in zip(*self.step_s, strict=True))
        return static_s / own_s if own_s > 0 else 1.0

    @property
    def static_imbalance(self) -> float:
        """Mean imbalance of compute with static plans."""
        return statistics.fmean(static for static, _ in self.imbalances)


def baseline_charts(baseline: Baseline, *, marks: Sequence[Mark]) -> list[Chart]:
    """Return imbalance and step time of some batches, planned statically and by the run's strategy."""
    names = (f"static baseline: {baseline.static}", f"this run: {baseline.own}")
    imbalance = {
        "title": "Compute imbalance and the static baseline",
        "note": f"(max − mean) / max over ranks; {len(baseline.steps)} of the run's batches, planned and simulated",
        "format": "percent",
    }
    time = {
        "title": "Simulated step and the static baseline",
        "note": f"Without the optimizer; static plans take {number(round(baseline.speedup, 2))} times as long",
        "format": "seconds",
    }
    return [
        {
            "kind": "lines",
            **about,
            **over_steps(baseline.steps, dict(zip(names, zip(*pairs, strict=True), strict=True))),
            "zero": True,
            "dots": True,
            "marks": marks,
        }
        for about, pairs in ((imbalance, baseline.imbalances), (time, baseline.step_s))
    ]
