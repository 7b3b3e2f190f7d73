"""A layout made ready for strategies: its settings, the lower bounds of its batches, the plans that are known of it."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from statistics import fmean
from typing import Any

from rayfcp.compare.contest import Case, Say, contest
from rayfcp.compare.families import Family, family_of
from rayfcp.compare.layouts import View
from rayfcp.compare.lengths import Batch, lengths_of
from rayfcp.compare.planning import best_prediction, bound_s, plan_timed
from rayfcp.compare.results import Entry
from rayfcp.compare.setting import Setting
from rayfcp.compare.trials import Trial
from rayfcp.config.plan import PlanConfig
from rayfcp.plan import model_flops
from rayfcp.plan.strategies import AUTO
from rayfcp.values import InfeasiblePlanError, ModelProfile, SequenceSpec

PLACING = frozenset({AUTO, "flex-block", "magi"})
"""Strategies whose blocks may lie anywhere, so that the bound of groups is none of theirs."""


class Spot:
    """One view and all that is found out about it; `model` is the whole one."""

    def __init__(self, view: View, *, model: ModelProfile, batches: Sequence[Batch], options: PlanConfig) -> None:
        self.view = view
        self._model = model
        self.case = Case(
            model=view.model, hardware=view.hardware, num_ranks=view.num_ranks, batches=tuple(batches), options=options
        )
        self._bounds: dict[bool, list[float]] = {}
        self._known: dict[tuple[str, Setting], float | InfeasiblePlanError] = {}

    @cached_property
    def family(self) -> Family:
        """The settings under which a run has the memory for the longest sequence, as the run itself counts."""
        found = family_of(
            AUTO,
            self.view.inputs,
            model=self.view.model,
            hardware=self.view.hardware,
            longest=max(lengths_of(self.case.batches)),
            num_stages=self.view.layout.num_stages,
        )
        settings = [as_run(each) for each in found.settings]
        kept = tuple(each for each in settings if each is not None)
        why = found.why_none or "its stages have no room for one token beside their states; add stages or memory"
        return replace(found, settings=kept, why_none="" if kept else why)

    def bounds_s(self, strategy: str) -> list[float]:
        """Of each batch: no plan of the strategy takes less, under any setting."""
        freely = strategy in PLACING
        if freely not in self._bounds:
            self._bounds[freely] = [
                bound_s(batch, settings=self.family.settings, placed_freely=freely) for batch in self.case.batches
            ]
        return self._bounds[freely]

    def predicted(self, strategy: str) -> tuple[float, Setting]:
        """Seconds of the first batch under the best setting.

        Raises:
            InfeasiblePlanError: no setting has a plan.
        """
        return best_prediction(strategy, settings=self.family.settings, predict=self._predict)

    def simulated(self, strategy: str, setting: Setting, *, say: Say) -> Trial:
        """On all batches.

        Raises:
            InfeasiblePlanError: a batch has no plan.
        """
        entry, scene = contest(strategy, setting, case=self.case, family=self.family, say=say)
        return Trial(
            **self.about(strategy),
            status="simulated",
            lower_bound_s=fmean(self.bounds_s(strategy)),
            setting=setting,
            entry=self._of_whole_model(entry, scene.sequences),
            scene=scene,
        )

    def about(self, strategy: str) -> dict[str, Any]:
        """The fields of a trial that say of what it is."""
        return {"strategy": strategy, "layout": self.view.layout, "split_vocabulary": self.view.split_vocabulary}

    def _predict(self, strategy: str, setting: Setting) -> float:
        key = strategy, setting
        if key not in self._known:
            try:
                plan, _ = plan_timed(
                    self.case.batches[0], strategy=strategy, setting=setting, options=self.case.options
                )
                self._known[key] = plan.predicted_s
            except InfeasiblePlanError as error:
                self._known[key] = error
        found = self._known[key]
        if isinstance(found, InfeasiblePlanError):
            raise found
        return found

    def _of_whole_model(self, entry: Entry, sequences: Sequence[SequenceSpec]) -> Entry:
        """What devices compute more than once, as a head that is whole on each, is no use: MFU counts it once."""
        size = self.view.layout.tensor_parallel
        useful = model_flops(self._model, sequences) / (size * model_flops(self.view.model, sequences))
        return replace(entry, mfu=entry.mfu * useful if entry.mfu is not None else None)


def as_run(setting: Setting) -> Setting | None:
    """The setting with as many tokens a rank as a run plans with; None if not one fits."""
    pipeline = setting.cost.pipeline
    if pipeline is None:
        return setting
    tokens = min(setting.cluster.max_tokens_per_rank, pipeline.tokens_recomputed)
    return replace(setting, cluster=replace(setting.cluster, max_tokens_per_rank=tokens)) if tokens >= 1 else None
