"""Layouts that devices can have: pipeline stages and tensor-parallel devices, and what one device sees of each.

What a search of layouts finds out about a strategy on a layout.

A layout made ready for strategies: its settings, the lower bounds of its batches, the plans that are known of it.

The search of layouts: which are looked at, by what they are left out, and what is simulated.

Of each strategy, layouts are gone through from the lowest lower bound on. The first batch is planned on each, under
each setting; a layout whose bound is no less than the best prediction waits. The best by prediction are simulated on
all batches. Predictions prove nothing, so those that wait are planned too unless their bounds are no less than what was
simulated. So whatever is left out for its bound is proven to be no faster.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import Any, Literal

from rayfcp.baselines.static_cp import divisors
from rayfcp.compare.arguments import Inputs
from rayfcp.compare.comparison import Case, Say, contest
from rayfcp.compare.lengths import Batch, lengths_of
from rayfcp.compare.planning import best_prediction, bound_s, plan_timed
from rayfcp.compare.results import Entry, Scene
from rayfcp.compare.settings import GIB, Family, Setting, family_of
from rayfcp.config.models import PlanConfig
from rayfcp.cost.analytic import device_hardware, device_model
from rayfcp.cost.memory import ACCELERATOR_MEMORY_SHARE
from rayfcp.plan import model_flops
from rayfcp.plan.strategies.registry import AUTO, get
from rayfcp.telemetry.summary import seconds
from rayfcp.values import HardwareProfile, InfeasiblePlanError, ModelProfile, SequenceSpec

HOST = "cpu"
"""The device whose profile says what a worker may take; of others a run plans with a share."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Layout:
    """How the devices of a rank share the model's layers."""

    num_stages: int
    tensor_parallel: int

    @property
    def devices_per_rank(self) -> int:
        return self.num_stages * self.tensor_parallel

    def __str__(self) -> str:
        """
        >>> str(Layout(num_stages=2, tensor_parallel=1))
        '2 stages x 1 device'
        """
        stages, devices = self.num_stages, self.tensor_parallel
        return f"{stages} stage{'s' if stages > 1 else ''} x {devices} device{'s' if devices > 1 else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A layout as one of its devices sees it: a narrower model on a cluster whose ranks have one device a stage.
    `split_vocabulary`: embedding and head are shared out over tensor-parallel devices too, as Megatron-LM does; rayfcp
    holds them whole on each."""

    layout: Layout
    split_vocabulary: bool
    inputs: Inputs
    model: ModelProfile
    hardware: HardwareProfile

    @property
    def num_ranks(self) -> int:
        return self.inputs.devices // self.inputs.stages


def view_of(
    layout: Layout, *, inputs: Inputs, model: ModelProfile, hardware: HardwareProfile, split_vocabulary: bool = False
) -> View:
    """`inputs` say what there is beside the layout; their memory is that of a device."""
    size = layout.tensor_parallel
    own = device_model(model, size)
    if split_vocabulary:
        own = replace(own, vocab_size=-(-model.vocab_size // size))
    return View(
        layout=layout,
        split_vocabulary=split_vocabulary and size > 1,
        inputs=replace(inputs, devices=inputs.devices // size, stages=layout.num_stages, tensor_parallel=1),
        model=own,
        hardware=device_hardware(hardware, own, tensor_parallel=size),
    )


def planned_memory_gib(inputs: Inputs, hardware: HardwareProfile) -> float:
    """Of a device, as a run plans with it: as asked for, or the share of the hardware's that runs take."""
    if inputs.memory_gib is not None:
        return inputs.memory_gib
    share = 1.0 if hardware.name == HOST else ACCELERATOR_MEMORY_SHARE
    return int(share * hardware.memory_bytes) / GIB


def layouts(
    num_devices: int,
    *,
    hardware: HardwareProfile,
    stages: int | None = None,
    tensor_parallel: int | None = None,
) -> tuple[Layout, ...]:
    """All that leave none of the devices idle and keep a rank's tensor-parallel devices on one node; with the
    number of stages or of tensor-parallel devices that is given, or any that divides. At least one."""
    sizes = [tensor_parallel] if tensor_parallel else divisors(hardware.devices_per_node)
    found = [
        Layout(num_stages=number, tensor_parallel=size)
        for size in sizes
        if tensor_parallel or num_devices % size == 0
        for number in ([stages] if stages else divisors(max(num_devices // size, 1)))
    ]
    return tuple(sorted(found))


def misfit(layout: Layout, *, inputs: Inputs, model: ModelProfile, hardware: HardwareProfile) -> str:
    """Why a layout cannot be, whatever its memory; nothing if it can."""
    size, number = layout.tensor_parallel, layout.num_stages
    if layout.devices_per_rank > inputs.devices:
        return f"{number} stages x {size} devices are more than the {inputs.devices} devices that there are"
    if number > model.num_layers:
        return f"{number} stages are more than the model's {model.num_layers} layers"
    if layout.devices_per_rank > 1 and model.vision is not None:
        return f"{number} stages x {size} devices cannot share the model's vision encoder"
    if size > 1 and model.has_experts:
        return f"{size} tensor-parallel devices cannot share the model's experts"
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

    simulated: on all batches, `entry` has the figures. predicted: its plan of the first batch takes `predicted_s`, too
    long to be simulated. bounded: no plan takes less than `lower_bound_s`, the mean over batches, and another layout is
    as fast. infeasible. `reason` says why it was not simulated.
    """

    strategy: str
    layout: Layout
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
            ValueError: it was not simulated.
        """
        if self.entry is None or self.entry.iteration_s is None:
            raise ValueError(f"{self.strategy} on {self.layout} is {self.status}, must be simulated")
        return self.entry.iteration_s

    def as_json(self) -> dict[str, Any]:
        """A line of `layouts`."""
        entry = self.entry
        return {
            "strategy": self.strategy,
            "num_stages": self.layout.num_stages,
            "tensor_parallel": self.layout.tensor_parallel,
            "split_vocabulary": self.split_vocabulary,
            "status": self.status,
            "reason": self.reason or (entry.reason if entry else ""),
            "lower_bound_s": self.lower_bound_s,
            "predicted_s": self.predicted_s,
            "iteration_s": entry.iteration_s if entry else None,
            "peak_memory_gib": entry.peak_memory_gib if entry else None,
            "recomputed_layers": entry.recomputed_layers if entry else None,
            "reduce_every": entry.reduce_every if entry else None,
            "gather_every": entry.gather_every if entry else None,
            "layers_of_stage": list(entry.layers_of_stage) if entry else [],
        }


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
        freely = get(strategy).places_blocks
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
