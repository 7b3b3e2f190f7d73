"""Search of parallel layouts: numbers of pipeline stages and of tensor-parallel devices.

For each strategy, layouts are visited in the order of their lower bounds. The first batch is planned on each, under
each setting; a layout whose bound is no less than the best prediction is deferred. The best by prediction are simulated
on all batches. Predictions prove nothing, so deferred layouts are planned too unless their bounds are no less than what
was simulated: whatever is excluded by its bound is proven to be no faster.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import Any, Literal

from rayfcp.baselines.static_cp import divisors
from rayfcp.compare.arguments import Inputs
from rayfcp.compare.comparison import Case, Log, evaluate
from rayfcp.compare.lengths import Batch, lengths_of
from rayfcp.compare.planning import OPTIONS, best_prediction, bound_s, plan_timed
from rayfcp.compare.results import Entry, Scene
from rayfcp.compare.settings import GIB, Setting, settings_of
from rayfcp.config.models import PlanConfig
from rayfcp.cost.analytic import device_hardware, device_model
from rayfcp.cost.memory import ACCELERATOR_MEMORY_SHARE
from rayfcp.plan import model_flops
from rayfcp.plan.strategies.registry import get
from rayfcp.telemetry.summary import seconds
from rayfcp.values import HardwareProfile, InfeasiblePlanError, ModelProfile, SequenceSpec
from rayfcp.values.counted import counted
from rayfcp.values.devices import CPU


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ParallelLayout:
    """How the devices of a rank share the model's layers."""

    num_stages: int
    tensor_parallel: int

    @property
    def devices_per_rank(self) -> int:
        return self.num_stages * self.tensor_parallel

    def __str__(self) -> str:
        """
        >>> str(ParallelLayout(num_stages=2, tensor_parallel=1))
        '2 stages x 1 device'
        """
        return f"{counted(self.num_stages, 'stage')} x {counted(self.tensor_parallel, 'device')}"


def planned_memory_gib(inputs: Inputs, hardware: HardwareProfile) -> float:
    """Memory of a device that a run plans with: as requested, else the share of the hardware's that runs use."""
    if inputs.memory_gib is not None:
        return inputs.memory_gib
    share = 1.0 if hardware.name in CPU.hardware else ACCELERATOR_MEMORY_SHARE  # CPUs: a worker's own already
    return int(share * hardware.memory_bytes) / GIB


def layouts(inputs: Inputs, *, hardware: HardwareProfile) -> tuple[ParallelLayout, ...]:
    """Return all layouts, at least one, that use all devices and keep tensor-parallel devices on one node, with the
    sizes that are not `searched` as given."""
    any_size, any_number = ("tensor_parallel" in inputs.searched, "stages" in inputs.searched)
    sizes = divisors(hardware.devices_per_node) if any_size else [inputs.tensor_parallel]
    found = [
        ParallelLayout(num_stages=number, tensor_parallel=size)
        for size in sizes
        if not any_size or inputs.devices % size == 0
        for number in (divisors(max(inputs.devices // size, 1)) if any_number else [inputs.stages])
    ]
    return tuple(sorted(found))


def misfit(layout: ParallelLayout, *, inputs: Inputs, model: ModelProfile, hardware: HardwareProfile) -> str:
    """Return why a layout is impossible whatever its memory; empty if it is possible."""
    size, number = layout.tensor_parallel, layout.num_stages
    if layout.devices_per_rank > inputs.devices:
        return f"{number} stages x {size} devices need more than the {inputs.devices} available devices"
    if number > model.num_layers:
        return f"{number} stages are more than the model's {model.num_layers} layers"
    if layout.devices_per_rank > 1 and model.vision is not None:
        return f"{number} stages x {size} devices cannot share the model's vision encoder"
    recurrent = any(kind.recurrence for kind, _ in model.layer_kinds)
    if size > 1 and (model.has_experts or recurrent):
        what = "experts" if model.has_experts else "recurrent layers"
        return f"{size} tensor-parallel devices cannot share the model's {what}"
    for what, bound in (
        ("heads of the model", model.num_heads),
        ("key/value heads of the model", model.num_kv_heads),
        ("numbers of the model's MLP", model.ffn_size),
        ("devices of a node", hardware.devices_per_node),
    ):
        if bound % size:
            return f"{size} tensor-parallel devices do not divide the {bound} {what}"
    return ""


Status = Literal["simulated", "predicted", "bounded", "infeasible"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A strategy on a layout.

    Status: simulated (on all batches, figures in `entry`); predicted (its plan of the first batch takes `predicted_s`,
    too long to be simulated); bounded (no plan takes less than `lower_bound_s`, the mean over batches, and another
    layout is as fast); infeasible. `reason`: why it was not simulated.
    """

    strategy: str
    layout: ParallelLayout
    split_vocabulary: bool
    status: Status
    reason: str = ""
    lower_bound_s: float | None = None
    predicted_s: float | None = None
    setting: Setting | None = None
    entry: Entry | None = field(default=None, repr=False)
    scene: Scene | None = field(default=None, repr=False)

    @property
    def iteration_s(self) -> float:
        """Simulated seconds.

        Raises:
            ValueError: The trial was not simulated.
        """
        if self.entry is None or self.entry.iteration_s is None:
            raise ValueError(f"{self.strategy} on {self.layout} is {self.status}, must be simulated")
        return self.entry.iteration_s

    def as_json(self) -> dict[str, Any]:
        """Return an entry of `layouts`."""
        figures = ("iteration_s", "peak_memory_gib", "recomputed_layers", "reduce_every", "gather_every")
        return {
            "strategy": self.strategy,
            "num_stages": self.layout.num_stages,
            "tensor_parallel": self.layout.tensor_parallel,
            "split_vocabulary": self.split_vocabulary,
            "status": self.status,
            "reason": self.reason or (self.entry.reason if self.entry else ""),
            "lower_bound_s": self.lower_bound_s,
            "predicted_s": self.predicted_s,
            **{name: getattr(self.entry, name, None) for name in figures},
            "layers_of_stage": list(self.entry.layers_of_stage) if self.entry else [],
        }


class LayoutCandidate:
    """A layout from the view of one device: a narrower model on a cluster whose ranks have one device per stage; with
    its settings, lower bounds and predictions.

    `inputs`, `model`, `hardware`: of the whole cluster, with the memory of a device. `split_vocabulary`: embedding and
    head are split over tensor-parallel devices too, as in Megatron-LM; rayfcp replicates them.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        *,
        inputs: Inputs,
        model: ModelProfile,
        hardware: HardwareProfile,
        batches: Sequence[Batch],
        options: PlanConfig = OPTIONS,
        split_vocabulary: bool = False,
    ) -> None:
        size = layout.tensor_parallel
        own = device_model(model, size)
        if split_vocabulary:
            own = replace(own, vocab_size=-(-model.vocab_size // size))
        self.layout, self.split_vocabulary = layout, split_vocabulary and size > 1
        self.inputs = replace(inputs, devices=inputs.devices // size, stages=layout.num_stages, tensor_parallel=1)
        self.case = Case(
            model=own,
            hardware=device_hardware(hardware, own, tensor_parallel=size),
            num_ranks=self.inputs.devices // layout.num_stages,
            batches=tuple(batches),
            options=options,
        )
        self._model = model
        self._bounds: dict[bool, list[float]] = {}
        self._known: dict[tuple[str, Setting], float] = {}

    @cached_property
    def settings(self) -> tuple[Setting, ...]:
        """Settings under which a run, by its own count, has the memory for the longest sequence.

        Raises:
            InfeasiblePlanError: There is none.
        """
        found = settings_of(
            self.inputs,
            model=self.case.model,
            hardware=self.case.hardware,
            longest=max(lengths_of(self.case.batches)),
            num_stages=self.layout.num_stages,
        )
        kept = tuple(setting for each in found if (setting := _as_run(each)) is not None)
        if not kept:
            raise InfeasiblePlanError(
                "its stages have no memory for one token beside their states; add stages or memory"
            )
        return kept

    def bounds_s(self, strategy: str) -> list[float]:
        """Lower bounds of each batch, over all settings."""
        freely = get(strategy).places_blocks
        if freely not in self._bounds:
            self._bounds[freely] = [
                bound_s(batch, settings=self.settings, placed_freely=freely) for batch in self.case.batches
            ]
        return self._bounds[freely]

    def predicted(self, strategy: str) -> tuple[float, Setting]:
        """Return seconds of the first batch, and the best setting.

        Raises:
            InfeasiblePlanError: No setting has a plan.
        """
        return best_prediction(strategy, settings=self.settings, predict=self._predict)

    def simulated(self, strategy: str, setting: Setting, *, log: Log) -> Trial:
        """Simulate all batches.

        Raises:
            InfeasiblePlanError: A batch has no plan.
        """
        entry, scene = evaluate(
            strategy,
            setting,
            settings=self.settings,
            case=self.case,
            log=lambda text: log(f"{self.layout}: {text}"),
        )
        return Trial(
            **self.about(strategy),
            status="simulated",
            lower_bound_s=fmean(self.bounds_s(strategy)),
            setting=setting,
            entry=self._of_whole_model(entry, scene.sequences),
            scene=scene,
        )

    def about(self, strategy: str) -> dict[str, Any]:
        """Identifying fields of a trial."""
        return {"strategy": strategy, "layout": self.layout, "split_vocabulary": self.split_vocabulary}

    def _predict(self, strategy: str, setting: Setting) -> float:
        key = strategy, setting
        if key not in self._known:
            batch, options = self.case.batches[0], self.case.options
            plan, _ = plan_timed(batch, strategy=strategy, setting=setting, options=options)
            self._known[key] = plan.predicted_s
        return self._known[key]

    def _of_whole_model(self, entry: Entry, sequences: Sequence[SequenceSpec]) -> Entry:
        """Count work that devices replicate, such as a replicated head, once in the MFU."""
        size = self.layout.tensor_parallel
        useful = model_flops(self._model, sequences) / (size * model_flops(self.case.model, sequences))
        return replace(entry, mfu=entry.mfu * useful if entry.mfu is not None else None)


def _as_run(setting: Setting) -> Setting | None:
    """Return the setting with the token budget of a run; None if not one token fits."""
    pipeline = setting.cost.pipeline
    if pipeline is None:
        return setting
    tokens = min(setting.cluster.max_tokens_per_rank, pipeline.tokens_recomputed)
    return replace(setting, cluster=replace(setting.cluster, max_tokens_per_rank=tokens)) if tokens >= 1 else None


FINALISTS, MARGIN = 3, 0.1
"""Per strategy at most `FINALISTS` layouts are simulated, none predicted to take more than 1 + `MARGIN` times the best.
More costs simulations, fewer risk that a prediction error hides the best."""


class LayoutSearch:
    """Trials of one strategy on several candidates, in their order."""

    def __init__(self, strategy: str, candidates: Sequence[LayoutCandidate], *, log: Log) -> None:
        self._strategy, self._candidates, self._log = strategy, candidates, log
        self._trials: dict[LayoutCandidate, Trial] = {}
        self._predicted: dict[LayoutCandidate, tuple[float, Setting]] = {}

    def run(self) -> tuple[Trial, ...]:
        """Return one trial per candidate; only the fastest keeps its scene."""
        deferred = []
        fitting = [candidate for candidate in self._candidates if self._fits(candidate)]
        for candidate in sorted(fitting, key=lambda each: each.bounds_s(self._strategy)[0]):
            if candidate.bounds_s(self._strategy)[0] >= self._best_predicted_s:
                deferred.append(candidate)
            else:
                self._predict(candidate)
        self._simulate()
        for candidate in deferred:
            if self._mean_bound_s(candidate) < self._best_s:
                self._predict(candidate)
        self._simulate()
        best_s = self._best_s
        trials = [self._trials.get(candidate) or self._not_simulated(candidate) for candidate in self._candidates]
        return tuple(
            each if each.status != "simulated" or each.iteration_s <= best_s else replace(each, scene=None)
            for each in trials
        )

    def _fits(self, candidate: LayoutCandidate) -> bool:
        """Return whether the candidate has a setting and bounds."""
        try:
            self._mean_bound_s(candidate)
        except InfeasiblePlanError as error:
            self._refuse(candidate, str(error))
            return False
        return True

    def _predict(self, candidate: LayoutCandidate) -> None:
        """Plan the first batch."""
        self._log(f"{self._strategy} on {candidate.layout}: planning")
        try:
            self._predicted[candidate] = candidate.predicted(self._strategy)
        except InfeasiblePlanError as error:
            self._refuse(candidate, str(error))

    def _simulate(self) -> None:
        """Simulate the best by prediction within the effort."""
        for candidate, (predicted_s, setting) in sorted(self._predicted.items(), key=lambda each: each[1][0]):
            num_done = sum(each.status == "simulated" for each in self._trials.values())
            late = predicted_s > (1 + MARGIN) * self._best_predicted_s
            if candidate in self._trials or (num_done and (late or num_done >= FINALISTS)):
                continue
            if self._mean_bound_s(candidate) >= self._best_s:
                continue
            try:
                done = candidate.simulated(self._strategy, setting, log=self._log)
            except InfeasiblePlanError as error:
                self._refuse(candidate, str(error))
            else:
                self._trials[candidate] = replace(done, predicted_s=predicted_s)

    def _refuse(self, candidate: LayoutCandidate, why: str) -> None:
        self._trials[candidate] = Trial(**candidate.about(self._strategy), status="infeasible", reason=why)
        self._predicted.pop(candidate, None)

    def _not_simulated(self, candidate: LayoutCandidate) -> Trial:
        bound_s, best_s = self._mean_bound_s(candidate), self._best_s
        common = {**candidate.about(self._strategy), "lower_bound_s": bound_s}
        if bound_s >= best_s:
            why = f"no plan takes less than {seconds(bound_s)}, another layout takes {seconds(best_s)}"
            return Trial(**common, status="bounded", reason=why)
        predicted_s, setting = self._predicted[candidate]  # planned, as no bound excludes it
        why = (
            f"predicted to take {seconds(predicted_s)} for the first batch, the best layout "
            f"{seconds(self._best_predicted_s)}"
        )
        return Trial(**common, status="predicted", reason=why, predicted_s=predicted_s, setting=setting)

    def _mean_bound_s(self, candidate: LayoutCandidate) -> float:
        return fmean(candidate.bounds_s(self._strategy))

    @property
    def _best_predicted_s(self) -> float:
        return min((predicted_s for predicted_s, _ in self._predicted.values()), default=math.inf)

    @property
    def _best_s(self) -> float:
        """Best simulated mean so far."""
        done = [each.iteration_s for each in self._trials.values() if each.status == "simulated"]
        return min(done, default=math.inf)
