"""Parallel layouts, numbers of pipeline stages and of tensor-parallel devices: a given one, or the best of several.

For each strategy, layouts are visited in the order of their lower bounds. All batches are planned on each, under each
setting; a layout whose bound is no less than the best prediction is deferred. The best by prediction are simulated.
Predictions prove nothing, so deferred layouts are planned too unless their bounds are no less than what was simulated:
whatever is excluded by its bound is proven to be no faster. On the fastest layout the next settings by prediction are
simulated too. Bounds, predictions and simulated times are means over batches, so their order decides nothing.
"""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import Any, Literal

from rayfcp.baselines.static_cp import divisors
from rayfcp.compare.arguments import Inputs
from rayfcp.compare.lengths import Batch, lengths_of
from rayfcp.compare.planning import bound_s, by_prediction, mean_prediction, plan_timed, warm_up
from rayfcp.compare.results import BatchFigures, Entry, Scene, averaged, can_simulate, check_size, measure, timeline_of
from rayfcp.compare.settings import Setting, by_heads, settings_of
from rayfcp.config.models import PlanConfig
from rayfcp.cost.analytic import device_hardware, device_model
from rayfcp.plan import model_flops
from rayfcp.plan.batch import plan_candidates
from rayfcp.plan.first import COMPILES, compiles_first
from rayfcp.plan.strategies.registry import AUTO, get
from rayfcp.program import Programs, lower
from rayfcp.simulate.simulate import choose
from rayfcp.telemetry.summary import seconds
from rayfcp.values import BatchPlan, HardwareProfile, InfeasiblePlanError, ModelProfile
from rayfcp.values.counted import counted
from rayfcp.verify import check_plan

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Input of all strategies: the model and the hardware of a device, or of one tensor-parallel device of a rank;
    `num_ranks`: without stages."""

    model: ModelProfile
    hardware: HardwareProfile
    num_ranks: int
    batches: tuple[Batch, ...]
    options: PlanConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineSystem:
    """A system with whose best layout the recommendation is compared. `staged`: it supports pipeline stages."""

    name: str
    strategies: tuple[str, ...]
    staged: bool


BASELINE_SYSTEMS = (
    BaselineSystem(name="Megatron-LM", strategies=("static-cp", "dapple"), staged=True),
    BaselineSystem(name="DeepSpeed", strategies=("ulysses",), staged=False),
)
"""Megatron-LM: one degree for all, 1F1B over stages. DeepSpeed: one degree over heads, parameters sharded over all
ranks (ZeRO), which it does not combine with stages. Both split embedding and head over tensor-parallel ranks."""


def suits(strategy: str, layout: "ParallelLayout") -> bool:
    """Return whether a strategy is tried on a layout: baselines on stages only if their system has them."""
    info = get(strategy)
    if layout.num_stages == 1:
        return not info.needs_stages
    staged = any(strategy in system.strategies for system in BASELINE_SYSTEMS if system.staged)
    return not info.is_baseline or info.needs_stages or staged


def splits_vocabulary(strategy: str) -> bool:
    """Return whether tensor-parallel devices share out embedding and head, as those of baseline systems do; those of
    rayfcp each have them whole."""
    return any(strategy in system.strategies for system in BASELINE_SYSTEMS)


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

    Status: simulated (figures in `entry`); predicted (its plans take `predicted_s`, too long to be simulated); bounded
    (no plans take less than `lower_bound_s`, and another layout is as fast); infeasible. `reason`: why it was not
    simulated. Seconds are means over batches.
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

    `inputs`, `case`: of the whole cluster. `split_vocabulary`: tensor-parallel devices split embedding and head too.
    """

    def __init__(self, layout: ParallelLayout, *, inputs: Inputs, case: Case, split_vocabulary: bool = False) -> None:
        size, model = layout.tensor_parallel, case.model
        own = device_model(model, size)
        if split_vocabulary:
            own = replace(own, vocab_size=-(-model.vocab_size // size))
        self.layout, self.split_vocabulary = layout, split_vocabulary and size > 1
        self.inputs = replace(inputs, devices=inputs.devices // size, stages=layout.num_stages, tensor_parallel=1)
        self.case = replace(
            case,
            model=own,
            hardware=device_hardware(case.hardware, own, tensor_parallel=size),
            num_ranks=self.inputs.devices // layout.num_stages,
        )
        self._model = model
        self._bounds: dict[tuple[bool, bool], dict[int, list[float]]] = {}
        self._known: dict[tuple[str, Setting], float] = {}

    @cached_property
    def settings(self) -> tuple[Setting, ...]:
        """Settings under which a run, by its own count, has the memory for the longest sequence.

        Raises:
            InfeasiblePlanError: There is none.
        """
        return settings_of(
            self.inputs,
            model=self.case.model,
            hardware=self.case.hardware,
            longest=max(lengths_of(self.case.batches)),
            num_stages=self.layout.num_stages,
        )

    def settings_for(self, strategy: str) -> tuple[Setting, ...]:
        """The settings, of a strategy that exchanges tokens for heads around recurrent layers as its original does."""
        return tuple(map(by_heads, self.settings)) if get(strategy).shares_recurrent_heads else self.settings

    def bounds_s(self, strategy: str, *, freely: bool | None = None) -> tuple[float, ...]:
        """Lower bounds of each batch, over all settings; `freely`: blocks lie anywhere, as the strategy's if None.

        Raises:
            InfeasiblePlanError: Under no setting a permitted group holds the longest sequence.
        """
        return tuple(map(min, zip(*self._bounds_of(strategy, freely=freely).values(), strict=True)))

    def _bounds_of(self, strategy: str, *, freely: bool | None = None) -> dict[int, list[float]]:
        """Lower bounds of each batch, keyed by the number of the setting."""
        info, constraints = get(strategy), self.case.options.constraints
        placed_freely = info.places_blocks if freely is None else freely
        key = placed_freely, info.shares_recurrent_heads
        if key not in self._bounds:
            found, why = {}, InfeasiblePlanError("no setting was tried")
            for at, setting in enumerate(self.settings_for(strategy)):
                given: dict[str, Any] = {"setting": setting, "placed_freely": placed_freely, "constraints": constraints}
                try:
                    found[at] = [bound_s(batch, **given) for batch in self.case.batches]
                except InfeasiblePlanError as error:
                    why = error
            if not found:
                raise why
            self._bounds[key] = found
        return self._bounds[key]

    def predictions(self, strategy: str, *, limit_s: float) -> list[tuple[float, Setting]]:
        """Return mean seconds and settings, the least first; settings that are no finalists, also among layouts whose
        best is predicted to take `limit_s`, may be left out or be predicted too low (`by_prediction`).

        Raises:
            InfeasiblePlanError: Under each setting, some batch has no plan.
        """
        bounds, settings = self._bounds_of(strategy), self.settings_for(strategy)
        margin = 0.0 if get(strategy).settings_from else MARGIN

        def predict(name: str, at: int, most_s: float) -> float:
            return self._predict(name, settings[at], bounds_s=bounds[at], limit_s=most_s)

        means = {at: fmean(each) for at, each in bounds.items()}
        found = by_prediction(strategy, bounds_s=means, predict=predict, margin=margin, limit_s=(1 + MARGIN) * limit_s)
        return [(seconds, settings[at]) for seconds, at in found]

    def simulated(self, strategy: str, setting: Setting, *, log: Log, check: bool) -> Trial:
        """Simulate all batches.

        Raises:
            InfeasiblePlanError: A batch has no plan, or simulating it takes too much memory.
            RuntimeError: The plan of the first batch is wrong: an internal error, not the user's.
        """
        figures: list[BatchFigures] = []
        scenes: list[Scene] = []
        if get(strategy).settings_from:
            warm_up(strategy, self.case.batches[0], setting=setting, options=self.case.options)
        for number, batch in enumerate(self.case.batches):
            log(f"{strategy}: batch {number + 1} of {len(self.case.batches)}")
            plan, programs, plan_s = self._planned(strategy, batch, setting=setting)
            check_size(plan)
            if check and number == 0:
                _check(plan, batch, setting=setting)
            placed_freely = any(microbatch.layout is not None for microbatch in plan.microbatches)
            least_s = self.bounds_s(strategy, freely=placed_freely)[number]
            measured, scene = measure(plan, batch, setting=setting, bound_s=least_s, plan_s=plan_s, programs=programs)
            figures.append(measured)
            scenes = scenes or [replace(scene, strategy=strategy)]
        return Trial(
            **self.about(strategy),
            status="simulated",
            lower_bound_s=fmean(self.bounds_s(strategy)),
            setting=setting,
            entry=self._entry(strategy, setting, figures, reason=scenes[0].plan.reason),
            scene=scenes[0],
        )

    def about(self, strategy: str) -> dict[str, Any]:
        """Identifying fields of a trial."""
        return {"strategy": strategy, "layout": self.layout, "split_vocabulary": self.split_vocabulary}

    def _predict(self, strategy: str, setting: Setting, *, bounds_s: Sequence[float], limit_s: float) -> float:
        key = strategy, setting
        if key not in self._known:
            self._known[key] = mean_prediction(
                strategy,
                setting,
                batches=self.case.batches,
                options=self.case.options,
                bounds_s=bounds_s,
                limit_s=limit_s,
            )
        return self._known[key]

    def _planned(self, strategy: str, batch: Batch, *, setting: Setting) -> tuple[BatchPlan, Programs | None, float]:
        """Return a plan, its programs if they were simulated, and the CPU seconds that it took."""
        options = self.case.options
        if strategy == AUTO or get(strategy).contains:
            return plan_chosen_timed(batch, strategy=strategy, setting=setting, options=options)
        plan, plan_s = plan_timed(batch, strategy=strategy, setting=setting, options=options)
        return plan, None, plan_s

    def _entry(self, strategy: str, setting: Setting, figures: Sequence[BatchFigures], *, reason: str) -> Entry:
        """Return the figures of all batches. Work that tensor-parallel devices replicate, such as a replicated head,
        counts once in the MFU."""
        cluster, given = setting.cluster, averaged(figures)
        sequences = list(itertools.chain.from_iterable(self.case.batches))
        done = self.layout.tensor_parallel * model_flops(self.case.model, sequences)
        return Entry(
            strategy=strategy,
            feasible=True,
            reason=reason,
            num_ranks=cluster.num_ranks,
            num_stages=cluster.num_stages,
            recomputed_layers=setting.recomputed_layers if cluster.num_stages == 1 else None,
            keeps_attention=setting.cost.keeps_attention,
            reduce_every=setting.reduce_every,
            gather_every=setting.gather_every,
            layers_of_stage=cluster.layers_of_stage,
            max_tokens_per_rank=cluster.max_tokens_per_rank,
            **given | {"mfu": given["mfu"] * model_flops(self._model, sequences) / done},
        )


def plan_chosen_timed(
    sequences: Batch, *, strategy: str, setting: Setting, options: PlanConfig
) -> tuple[BatchPlan, Programs | None, float]:
    """Return the plan that a strategy chooses by simulation on the compared hardware, its programs if they were
    simulated, and the CPU seconds it took.

    Plans that take too much memory to simulate are left out (`can_simulate`). If the plan with the least prediction is
    one of them, it is returned without simulating any.

    Raises:
        InfeasiblePlanError: No strategy has a plan for this batch.
    """
    start_s = time.process_time()
    given: dict[str, Any] = {"cluster": setting.cluster, "cost": setting.cost, "options": options}
    plans = plan_candidates(sequences, strategy=strategy, **given)
    best = min(plans, key=lambda plan: plan.predicted_s)
    choice = choose(
        [plan for plan in plans if can_simulate(plan)] if can_simulate(best) else [best],
        strategy=strategy,
        lowered=lambda plan: lower(plan, sequences, reduce_every=setting.reduce_every),
        seconds=lambda programs: timeline_of(programs, setting=setting).iteration_s,
    )
    return choice.plan, choice.programs, time.process_time() - start_s


def _check(plan: BatchPlan, batch: Batch, *, setting: Setting) -> None:
    try:
        check_plan(plan, batch, cluster=setting.cluster, cost=setting.cost)
    except ValueError as error:
        raise RuntimeError(f"the validator refutes the plan of {plan.strategy}: {error}") from error


class Candidates:
    """The layouts of one comparison, which strategies share."""

    def __init__(self, inputs: Inputs, *, case: Case) -> None:
        self._inputs, self.case = inputs, case
        self._known: dict[tuple[ParallelLayout, bool], LayoutCandidate] = {}

    def of(self, strategy: str, layout: ParallelLayout) -> LayoutCandidate:
        """Return a layout as a strategy uses it."""
        key = layout, splits_vocabulary(strategy) and layout.tensor_parallel > 1
        if key not in self._known:
            self._known[key] = LayoutCandidate(layout, inputs=self._inputs, case=self.case, split_vocabulary=key[1])
        return self._known[key]

    def misfit(self, layout: ParallelLayout) -> str:
        """Return why a layout is impossible whatever its memory; empty if it is possible."""
        return misfit(layout, inputs=self._inputs, model=self.case.model, hardware=self.case.hardware)


def fastest(trials: Sequence[Trial]) -> Trial | None:
    """Return the fastest simulated trial, the first of equals."""
    done = [trial for trial in trials if trial.status == "simulated"]
    return min(done, key=lambda trial: trial.iteration_s, default=None)


FINALISTS, MARGIN = 3, 0.15
"""Per strategy at most `FINALISTS` layouts are simulated, and on the fastest as many settings, none predicted to take
more than 1 + `MARGIN` times the best. More costs simulations, fewer risk that a prediction error hides the best:
predictions are a few per cent off where messages share links with shards (docs/cost_model.md, agreement)."""


def finalists(strategy: str, predictions: Sequence[tuple[float, Setting]]) -> Sequence[tuple[float, Setting]]:
    """Return the settings of a layout that are worth a simulation, the least prediction first. A strategy that takes
    the settings of others has one: it is slow to plan with, and `auto` simulates plans itself."""
    count = 1 if get(strategy).settings_from else FINALISTS
    return [each for each in predictions[:count] if each[0] <= (1 + MARGIN) * predictions[0][0]]


def best_setting(strategy: str, candidate: LayoutCandidate) -> Setting:
    """Return the setting that a comparison chooses on a layout: the fastest finalist in the mean of the simulated
    batches. A single finalist is not simulated; the least prediction counts where simulating it takes too much memory.

    Raises:
        InfeasiblePlanError: Under each setting, some batch has no plan.
    """
    predictions = candidate.predictions(strategy, limit_s=math.inf)
    if len(finalists(strategy, predictions)) > 1:
        (trial,) = LayoutSearch(strategy, [candidate], log=lambda _: None, check=False).run()
        if trial.setting is not None:
            return trial.setting
    return predictions[0][1]


class LayoutSearch:
    """Trials of one strategy on several candidates, in their order; `check`: plans of first batches are validated."""

    def __init__(self, strategy: str, candidates: Sequence[LayoutCandidate], *, log: Log, check: bool = True) -> None:
        self._strategy, self._candidates, self._log, self._checks = strategy, candidates, log, check
        self._trials: dict[LayoutCandidate, Trial] = {}
        self._predicted: dict[LayoutCandidate, list[tuple[float, Setting]]] = {}

    def run(self) -> tuple[Trial, ...]:
        """Return one trial per candidate; only the fastest keeps its scene."""
        if compiles_first(self._strategy):
            self._log(f"{self._strategy}: {COMPILES}")
        deferred = []
        fitting = [candidate for candidate in self._candidates if self._fits(candidate)]
        for candidate in sorted(fitting, key=self._mean_bound_s):
            if self._mean_bound_s(candidate) >= self._best_predicted_s:
                deferred.append(candidate)
            else:
                self._predict(candidate)
        self._simulate()
        for candidate in deferred:
            if self._mean_bound_s(candidate) < self._best_s:
                self._predict(candidate)
        self._simulate()
        self._refine()
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
        """Plan all batches."""
        where = f" on {candidate.layout}" if len(self._candidates) > 1 else ""
        self._log(f"{self._strategy}{where}: planning")
        try:
            self._predicted[candidate] = candidate.predictions(self._strategy, limit_s=self._best_predicted_s)
        except InfeasiblePlanError as error:
            self._refuse(candidate, str(error))

    def _simulate(self) -> None:
        """Simulate the best by prediction within the effort."""
        for candidate, found in sorted(self._predicted.items(), key=lambda each: each[1][0][0]):
            (predicted_s, setting), *_ = found
            num_done = sum(each.status == "simulated" for each in self._trials.values())
            late = predicted_s > (1 + MARGIN) * self._best_predicted_s
            if candidate in self._trials or (num_done and (late or num_done >= FINALISTS)):
                continue
            if self._mean_bound_s(candidate) >= self._best_s:
                continue
            try:
                done = self._simulated(candidate, setting)
            except InfeasiblePlanError as error:
                self._refuse(candidate, str(error))
            else:
                self._trials[candidate] = replace(done, predicted_s=predicted_s)

    def _refine(self) -> None:
        """Simulate the other finalists of the fastest layout."""
        done = [(each.iteration_s, at) for at, each in self._trials.items() if each.status == "simulated"]
        if not done:
            return
        best_s, candidate = min(done, key=lambda each: each[0])
        for predicted_s, setting in finalists(self._strategy, self._predicted[candidate])[1:]:
            try:
                trial = self._simulated(candidate, setting)
            except InfeasiblePlanError:
                continue
            if trial.iteration_s < best_s:
                best_s, self._trials[candidate] = trial.iteration_s, replace(trial, predicted_s=predicted_s)

    def _simulated(self, candidate: LayoutCandidate, setting: Setting) -> Trial:
        return candidate.simulated(
            self._strategy,
            setting,
            log=lambda text: self._log(f"{candidate.layout}: {text}" if len(self._candidates) > 1 else text),
            check=self._checks,
        )

    def _refuse(self, candidate: LayoutCandidate, why: str) -> None:
        self._trials[candidate] = Trial(**candidate.about(self._strategy), status="infeasible", reason=why)
        self._predicted.pop(candidate, None)

    def _not_simulated(self, candidate: LayoutCandidate) -> Trial:
        bound_s, best_s = self._mean_bound_s(candidate), self._best_s
        common = {**candidate.about(self._strategy), "lower_bound_s": bound_s}
        if bound_s >= best_s:
            why = f"no plan takes less than {seconds(bound_s)}, another layout takes {seconds(best_s)}"
            return Trial(**common, status="bounded", reason=why)
        predicted_s, setting = self._predicted[candidate][0]  # planned, as no bound excludes it
        why = f"predicted to take {seconds(predicted_s)}, the best layout {seconds(self._best_predicted_s)}"
        return Trial(**common, status="predicted", reason=why, predicted_s=predicted_s, setting=setting)

    def _mean_bound_s(self, candidate: LayoutCandidate) -> float:
        return fmean(candidate.bounds_s(self._strategy))

    @property
    def _best_predicted_s(self) -> float:
        return min((found[0][0] for found in self._predicted.values()), default=math.inf)

    @property
    def _best_s(self) -> float:
        """Best simulated mean so far."""
        done = [each.iteration_s for each in self._trials.values() if each.status == "simulated"]
        return min(done, default=math.inf)
