"""The search of layouts: which are looked at, by what they are left out, and what is simulated.

Of each strategy, layouts are gone through from the lowest lower bound on. The first batch is planned on each, under
each setting; a layout whose bound is no less than the best prediction waits. The best by prediction are simulated on
all batches. Predictions prove nothing, so those that wait are planned too unless their bounds are no less than what was
simulated. So whatever is left out for its bound is proven to be no faster.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from rayfcp.compare.contest import Say
from rayfcp.compare.setting import Setting
from rayfcp.compare.spots import Spot
from rayfcp.compare.trials import Trial
from rayfcp.telemetry.summary import seconds
from rayfcp.values import InfeasiblePlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Of each strategy, at most `finalists` layouts are simulated, none predicted to take more than 1 + `margin` times
    the best one."""

    finalists: int = 3
    margin: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Screened:
    """A spot with its plan of the first batch."""

    spot: Spot
    predicted_s: float
    setting: Setting


class LayoutSearch:
    """The trials of one strategy on several spots, in their order."""

    def __init__(self, strategy: str, spots: Sequence[Spot], *, effort: Effort, say: Say) -> None:
        self._strategy, self._spots, self._effort, self._say = strategy, spots, effort, say
        self._trials: dict[Spot, Trial] = {}
        self._screened: dict[Spot, Screened] = {}

    def run(self) -> tuple[Trial, ...]:
        """One trial a spot; the fastest keeps its scene."""
        waiting = self._by_prediction([spot for spot in self._spots if self._fits(spot)])
        self._simulate()
        for spot in waiting:
            if self._mean_bound_s(spot) < self._best_s:
                self._screen(spot)
        self._simulate()
        for spot in self._spots:
            if spot not in self._trials:
                self._trials[spot] = self._left_out(spot)
        best_s = self._best_s
        return tuple(
            each if each.status != "simulated" or each.iteration_s <= best_s else replace(each, scene=None)
            for each in (self._trials[spot] for spot in self._spots)
        )

    def _fits(self, spot: Spot) -> bool:
        """Whether it has a setting and bounds at all."""
        why = spot.family.why_none
        if not why:
            try:
                self._mean_bound_s(spot)
            except InfeasiblePlanError as error:
                why = str(error)
        if why:
            self._refuse(spot, why)
        return not why

    def _by_prediction(self, spots: Sequence[Spot]) -> list[Spot]:
        """Plans the first batch on each, from the lowest bound on; returns those that were not planned."""
        waiting = []
        for spot in sorted(spots, key=lambda each: each.bounds_s(self._strategy)[0]):
            if spot.bounds_s(self._strategy)[0] >= self._predicted_s:
                waiting.append(spot)
            else:
                self._screen(spot)
        return waiting

    def _screen(self, spot: Spot) -> None:
        self._say(f"{self._strategy} on {spot.view.layout}: planning")
        try:
            predicted_s, setting = spot.predicted(self._strategy)
        except InfeasiblePlanError as error:
            self._refuse(spot, str(error))
        else:
            self._screened[spot] = Screened(spot=spot, predicted_s=predicted_s, setting=setting)

    def _simulate(self) -> None:
        """The best by prediction that were not yet, as far as the effort goes."""
        for each in sorted(self._screened.values(), key=lambda one: one.predicted_s):
            spot, num_done = each.spot, sum(one.status == "simulated" for one in self._trials.values())
            late = each.predicted_s > (1 + self._effort.margin) * self._predicted_s
            if spot in self._trials or (num_done and (late or num_done >= self._effort.finalists)):
                continue
            if self._mean_bound_s(spot) >= self._best_s:
                continue
            try:
                done = spot.simulated(self._strategy, each.setting, say=self._telling(spot))
            except InfeasiblePlanError as error:
                self._refuse(spot, str(error))
            else:
                self._trials[spot] = replace(done, predicted_s=each.predicted_s)

    def _telling(self, spot: Spot) -> Say:
        return lambda text: self._say(f"{spot.view.layout}: {text}")

    def _refuse(self, spot: Spot, why: str) -> None:
        self._trials[spot] = Trial(**spot.about(self._strategy), status="infeasible", reason=why)
        self._screened.pop(spot, None)

    def _left_out(self, spot: Spot) -> Trial:
        bound_s, best_s, screened = self._mean_bound_s(spot), self._best_s, self._screened.get(spot)
        common = {**spot.about(self._strategy), "lower_bound_s": bound_s}
        if bound_s >= best_s:
            why = f"no plan takes less than {seconds(bound_s)}, another layout takes {seconds(best_s)}"
            return Trial(**common, status="bounded", reason=why)
        assert screened is not None, "what no bound excludes was planned"
        why = (
            f"predicted to take {seconds(screened.predicted_s)} for the first batch, other layouts "
            f"{seconds(self._predicted_s)} and more"
        )
        return Trial(
            **common,
            status="predicted",
            reason=why,
            predicted_s=screened.predicted_s,
            setting=screened.setting,
        )

    def _mean_bound_s(self, spot: Spot) -> float:
        return fmean(spot.bounds_s(self._strategy))

    @property
    def _predicted_s(self) -> float:
        """The best so far."""
        return min((each.predicted_s for each in self._screened.values()), default=math.inf)

    @property
    def _best_s(self) -> float:
        """The best simulated mean so far."""
        done = [each.iteration_s for each in self._trials.values() if each.status == "simulated"]
        return min(done, default=math.inf)
