"""The comparison: each strategy plans the same batches; its plans are checked and simulated."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rayfcp.compare.arguments import Inputs, chosen, missing
from rayfcp.compare.lengths import Batch, batches_of, lengths_of
from rayfcp.compare.planning import best_setting, bound_s, options_of, plan_timed
from rayfcp.compare.results import (
    BatchFigures,
    Entry,
    Scene,
    averaged,
    best_baseline,
    check_size,
    measure,
    timeline_of,
)
from rayfcp.compare.settings import Setting, by_heads, rank_profile, ranks_of, settings_of, stages_of
from rayfcp.config import ConfigError
from rayfcp.config.constraints import UNCONSTRAINED, HostConstraints
from rayfcp.config.models import PlanConfig
from rayfcp.plan import hardware_profile, model_profile
from rayfcp.plan.batch import plan_candidates
from rayfcp.plan.first import COMPILES, compiles_first
from rayfcp.plan.strategies.registry import AUTO, get
from rayfcp.program import Programs, lower
from rayfcp.simulate.simulate import choose
from rayfcp.values import BatchPlan, HardwareProfile, InfeasiblePlanError, ModelProfile
from rayfcp.verify import check_plan

Log = Callable[[str], None]
OnEntry = Callable[[Entry], None]
STATIC = "static-cp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Input of all strategies. `hardware`: that of a rank (on a stage), `tensor_parallel` devices together;
    `num_ranks`: without stages."""

    model: ModelProfile
    hardware: HardwareProfile
    num_ranks: int
    batches: tuple[Batch, ...]
    options: PlanConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What constraints cost a strategy: `ratios` of its iteration times to `unconstrained_s`, that of its plans of the
    same batches without constraints: of `all` constraints and, where these are several, of each alone. None where no
    plan was found, or simulating it takes too much memory."""

    strategy: str
    unconstrained_s: float | None
    ratios: dict[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All entries in the order of the strategies, and the simulated first batch of each feasible one.

    `prices`: what constraints cost each strategy of ours that keeps them; none without constraints. `system`: name and
    iteration time of the fastest system that was searched too.
    """

    inputs: Inputs
    case: Case
    entries: tuple[Entry, ...]
    scenes: tuple[Scene, ...]
    prices: tuple[Price, ...] = ()
    system: tuple[str, float] | None = None

    @property
    def reference(self) -> tuple[str, float] | None:
        """Name and iteration time of the fastest baseline, to which speedups refer; None without one."""
        best = best_baseline(self.entries)
        found = [] if best is None else [(f"{best.strategy}, the fastest baseline", best.iteration_s or 0.0)]
        return min([*found, *([self.system] if self.system else [])], key=lambda each: each[1], default=None)

    @property
    def static_s(self) -> float | None:
        """Iteration time of static CP, what most trainers offer; None if it was not compared or has no plan."""
        return next((each.iteration_s for each in self.entries if each.strategy == STATIC), None)

    def tokens_per_s_per_device(self, entry: Entry) -> float:
        """Tokens per second over the devices of the cluster, of which a rank may have several."""
        return (entry.tokens_per_s_per_rank or 0.0) * entry.num_ranks / self.inputs.devices

    def as_json(self) -> dict[str, Any]:
        """Return the JSON contract: inputs and one entry per strategy."""
        best_s = self.reference[1] if self.reference else None
        return {
            "inputs": {**self.inputs.as_json(), "num_ranks": self.case.num_ranks},
            "results": [
                entry.as_json(best_baseline_s=best_s) | {"speedup_over_static_cp": entry.speedup(self.static_s)}
                for entry in self.entries
            ],
            **({"price": [asdict(price) for price in self.prices]} if self.prices else {}),
        }


def compare(
    inputs: Inputs,
    *,
    log: Log = lambda _: None,
    on_entry: OnEntry = lambda _: None,
    options: PlanConfig | None = None,
    check: bool = True,
) -> Comparison:
    """Plan, check and simulate every strategy on the same batches.

    `log` receives the next piece of work, `on_entry` the entry of each strategy when it is ready. `options` replace
    those of `inputs`; without `check` the validator, which takes as long again, is skipped. The same inputs give the
    same plans and figures except `plan_s` and `prepare_s`.

    Raises:
        ConfigError: Inputs that cannot be used, in one line.
    """
    names = chosen(inputs.strategies)
    case = _case(inputs, log=log, options=options or options_of(inputs))
    entries, scenes = [], []
    for name in names:
        found = [
            _evaluated(name, case=case, inputs=inputs, num_stages=each, log=log, check=check)
            for each in stages_of(name, inputs)
        ]
        entry, scene = min(found, key=lambda each: each[0].iteration_s or math.inf)
        entries.append(entry)
        on_entry(entry)
        scenes += [scene] if scene else []
    prices = [_price(entry, case=case, inputs=inputs, log=log) for entry in entries if _has_price(entry, case=case)]
    return Comparison(inputs=inputs, case=case, entries=tuple(entries), scenes=tuple(scenes), prices=tuple(prices))


def _has_price(entry: Entry, *, case: Case) -> bool:
    return case.options.constraints.bind and entry.feasible and not get(entry.strategy).is_baseline


def _price(entry: Entry, *, case: Case, inputs: Inputs, log: Log) -> Price:
    """Plan the same batches without constraints, and with each of several alone."""

    def seconds(constraints: HostConstraints) -> float | None:
        options = case.options.model_copy(update={"constraints": constraints})
        other, _ = _evaluated(
            entry.strategy,
            case=replace(case, options=options),
            inputs=inputs,
            num_stages=entry.num_stages,
            log=log,
            check=False,
        )
        return other.iteration_s

    log(f"{entry.strategy}: without constraints")
    free_s, found = seconds(UNCONSTRAINED), {"all": entry.iteration_s}
    each = case.options.constraints.each()
    for label, constraints in each.items() if len(each) > 1 else ():
        log(f"{entry.strategy}: with {label} alone")
        found[label] = seconds(constraints)
    ratios = {label: each_s / free_s if each_s and free_s else None for label, each_s in found.items()}
    return Price(strategy=entry.strategy, unconstrained_s=free_s, ratios=ratios)


def model_of(inputs: Inputs) -> ModelProfile:
    """Return the model, with a frozen vision encoder if requested.

    Raises:
        ConfigError: An unknown model, or one without an encoder to freeze.
    """
    model = inputs.profile or model_profile(inputs.model)
    if not inputs.frozen_vision:
        return model
    if model.vision is None:
        raise ConfigError(f"--freeze-vision: model {model.name} has no vision encoder; drop it")
    return replace(model, vision=replace(model.vision, frozen=True))


def _case(inputs: Inputs, *, log: Log, options: PlanConfig) -> Case:
    model = model_of(inputs)
    hardware = rank_profile(hardware_profile(inputs.hardware), model, tensor_parallel=inputs.tensor_parallel)
    if inputs.devices < inputs.stages * inputs.tensor_parallel:
        raise ConfigError(
            f"--devices is {inputs.devices}, must be at least --stages x --tensor-parallel "
            f"({inputs.stages} x {inputs.tensor_parallel} = {inputs.stages * inputs.tensor_parallel}); add devices"
        )
    if inputs.stages > model.num_layers:
        raise ConfigError(
            f"--stages is {inputs.stages}, must be at most the model's {model.num_layers} layers; lower it"
        )
    batches = batches_of(inputs, model=model)
    log(f"{sum(lengths_of(batches)):,} tokens in {inputs.batches} x {inputs.global_batch} sequences")
    return Case(
        model=model,
        hardware=hardware,
        num_ranks=inputs.devices // inputs.tensor_parallel,
        batches=batches,
        options=options,
    )


def _evaluated(
    name: str, *, case: Case, inputs: Inputs, num_stages: int, log: Log, check: bool
) -> tuple[Entry, Scene | None]:
    """Return the entry of a strategy on a number of stages, and the scene of its first batch if feasible."""
    try:
        if why := missing(name, num_stages=inputs.stages):
            raise InfeasiblePlanError(why)
        settings = settings_of(
            inputs,
            model=case.model,
            hardware=case.hardware,
            longest=max(lengths_of(case.batches)),
            num_stages=num_stages,
        )
        if get(name).shares_recurrent_heads:
            settings = tuple(map(by_heads, settings))
        if compiles_first(name):
            log(f"{name}: {COMPILES}")
        log(f"{name}: choosing a setting")
        setting = best_setting(name, case.batches[0], settings=settings, options=case.options)
        return evaluate(name, setting, settings=settings, case=case, log=log, check=check)
    except InfeasiblePlanError as error:
        num_ranks = ranks_of(inputs, num_stages=num_stages)
        return Entry(strategy=name, feasible=False, reason=str(error), num_ranks=num_ranks, num_stages=num_stages), None


def evaluate(
    name: str, setting: Setting, *, settings: Sequence[Setting], case: Case, log: Log, check: bool = True
) -> tuple[Entry, Scene]:
    """Return the entry of a strategy under one of its settings, and the scene of its first batch.

    Raises:
        InfeasiblePlanError: A batch has no plan.
        RuntimeError: The plan of the first batch is wrong: an internal error, not the user's.
    """
    figures: list[BatchFigures] = []
    scenes: list[Scene] = []
    for number, batch in enumerate(case.batches, start=1):
        log(f"{name}: batch {number} of {len(case.batches)}")
        programs: Programs | None = None
        if name == AUTO:
            plan, programs, plan_s = plan_auto_timed(batch, setting=setting, options=case.options)
        else:
            plan, plan_s = plan_timed(batch, strategy=name, setting=setting, options=case.options)
        check_size(plan)
        if check and number == 1:
            try:
                check_plan(plan, batch, cluster=setting.cluster, cost=setting.cost)
            except ValueError as error:
                raise RuntimeError(f"the validator refutes the plan of {plan.strategy}: {error}") from error
        placed_freely = any(microbatch.layout is not None for microbatch in plan.microbatches)
        least_s = bound_s(batch, settings=settings, placed_freely=placed_freely, constraints=case.options.constraints)
        measured, scene = measure(plan, batch, setting=setting, bound_s=least_s, plan_s=plan_s, programs=programs)
        figures.append(measured)
        scenes = scenes or [replace(scene, strategy=name)]
    cluster = setting.cluster
    entry = Entry(
        strategy=name,
        feasible=True,
        reason=scenes[0].plan.reason,
        num_ranks=cluster.num_ranks,
        num_stages=cluster.num_stages,
        recomputed_layers=setting.recomputed_layers if cluster.num_stages == 1 else None,
        keeps_attention=setting.cost.keeps_attention,
        reduce_every=setting.reduce_every,
        gather_every=setting.gather_every,
        layers_of_stage=cluster.layers_of_stage,
        max_tokens_per_rank=cluster.max_tokens_per_rank,
        **averaged(figures),
    )
    return entry, scenes[0]


def plan_auto_timed(sequences: Batch, *, setting: Setting, options: PlanConfig) -> tuple[BatchPlan, Programs, float]:
    """Return the plan that `auto` chooses by simulation on the compared hardware, its programs if they were simulated,
    and the CPU seconds it took.

    Raises:
        InfeasiblePlanError: No strategy has a plan for this batch.
    """
    start_s = time.process_time()
    choice = choose(
        plan_candidates(sequences, cluster=setting.cluster, cost=setting.cost, options=options),
        lowered=lambda plan: lower(plan, sequences, reduce_every=setting.reduce_every),
        seconds=lambda programs: timeline_of(programs, setting=setting).iteration_s,
    )
    return choice.plan, choice.programs, time.process_time() - start_s
