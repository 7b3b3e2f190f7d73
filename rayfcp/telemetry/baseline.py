"""Batches of a run planned by a static baseline and by the run's own strategy, before and after its cost model was
refitted."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rayfcp.telemetry.charts import Mark, over_steps
from rayfcp.telemetry.page import Chart
from rayfcp.telemetry.summary import number, percent
from rayfcp.values.counted import counted

Pair = tuple[float, float]
"""Values of one batch planned by the static strategy and by the run's own, on the same devices and costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unrefitted:
    """Batches planned by the run's own strategy with the cost model from before its steps refitted it. `regrouped`:
    share of all tokens whose sequences lie on another number of ranks then; `step_s`: simulated seconds of each batch,
    on the hardware that the refitted model describes."""

    regrouped: float
    step_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """`static` and `own`: names of strategies; `steps`: some of the run's, in order, at least one, each with its
    imbalance of compute and its simulated seconds. `unrefitted`: None if the cost model was not refitted."""

    static: str
    own: str
    steps: tuple[int, ...]
    imbalances: tuple[Pair, ...]
    step_s: tuple[Pair, ...]
    unrefitted: Unrefitted | None = None

    @property
    def speedup(self) -> float:
        """Simulated seconds of all these batches, static over own."""
        static_s, own_s = (sum(times) for times in zip(*self.step_s, strict=True))
        return static_s / own_s if own_s > 0 else 1.0

    @property
    def static_imbalance(self) -> float:
        """Mean imbalance of compute with static plans."""
        return statistics.fmean(static for static, _ in self.imbalances)


def refit_text(baseline: Baseline) -> str:
    """Return a sentence on how much plans changed by refitting the cost model; empty if it was not."""
    before = baseline.unrefitted
    if before is None:
        return ""
    ratio = sum(before.step_s) / max(sum(own for _, own in baseline.step_s), 1e-300)
    return (
        f"Refitting the cost model to measured steps moved sequences with {percent(before.regrouped)} of the tokens of "
        f"{counted(len(baseline.steps), 'batch', plural='batches')} to another CP degree; planned without it, they "
        f"take {ratio:.3f} times as long (simulated with the refitted model)."
    )


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
