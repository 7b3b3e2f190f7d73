"""The comparison: each strategy plans the same batches; its plans are checked and simulated."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from rayfcp.compare.arguments import Inputs, chosen, missing
from rayfcp.compare.layouts import Candidates, Case, LayoutCandidate, LayoutSearch, Log, ParallelLayout, fastest
from rayfcp.compare.lengths import batches_of, lengths_of
from rayfcp.compare.planning import options_of
from rayfcp.compare.results import Entry, Scene, best_baseline
from rayfcp.compare.settings import ranks_of, stages_of
from rayfcp.config import ConfigError
from rayfcp.config.constraints import UNCONSTRAINED, HostConstraints
from rayfcp.config.models import PlanConfig
from rayfcp.plan import hardware_profile, model_profile
from rayfcp.plan.strategies.registry import get
from rayfcp.values import ModelProfile

OnEntry = Callable[[Entry], None]
STATIC = "static-cp"


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
    case = case_of(inputs, options=options or options_of(inputs))
    log(f"{sum(lengths_of(case.batches)):,} tokens in {inputs.batches} x {inputs.global_batch} sequences")
    candidates = Candidates(inputs, case=case)
    for number in {inputs.stages, 1}:
        layout = ParallelLayout(num_stages=number, tensor_parallel=inputs.tensor_parallel)
        if why := candidates.misfit(layout):
            raise ConfigError(
                f"--stages is {inputs.stages} and --tensor-parallel is {inputs.tensor_parallel}: {why}; lower them"
            )
    entries, scenes = [], []
    for name in chosen(inputs.strategies):
        entry, scene = _evaluated(name, candidates=candidates, inputs=inputs, log=log, check=check)
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
        candidates = Candidates(inputs, case=replace(case, options=options))
        other, _ = _evaluated(entry.strategy, candidates=candidates, inputs=inputs, log=log, check=False)
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


def case_of(inputs: Inputs, *, options: PlanConfig) -> Case:
    """Return the input of all strategies on the whole cluster."""
    model = model_of(inputs)
    return Case(
        model=model,
        hardware=hardware_profile(inputs.hardware),
        num_ranks=inputs.devices // inputs.tensor_parallel,
        batches=batches_of(inputs, model=model),
        options=options,
    )


def given_layout(inputs: Inputs, *, options: PlanConfig) -> LayoutCandidate:
    """Return the layout that `inputs` give, with their batches."""
    layout = ParallelLayout(num_stages=inputs.stages, tensor_parallel=inputs.tensor_parallel)
    return LayoutCandidate(layout, inputs=inputs, case=case_of(inputs, options=options))


def _evaluated(
    name: str, *, candidates: Candidates, inputs: Inputs, log: Log, check: bool
) -> tuple[Entry, Scene | None]:
    """Return the entry of a strategy on the given numbers of devices, and the scene of its first batch if feasible."""
    numbers = stages_of(name, inputs)
    why = missing(name, num_stages=inputs.stages)
    if not why:
        layouts = [ParallelLayout(num_stages=each, tensor_parallel=inputs.tensor_parallel) for each in numbers]
        search = LayoutSearch(name, [candidates.of(name, each) for each in layouts], log=log, check=check)
        trials = search.run()
        best = fastest(trials)
        if best is not None and best.entry is not None:
            return best.entry, best.scene
        why = trials[-1].reason
    num_stages = numbers[-1]
    num_ranks = ranks_of(inputs, num_stages=num_stages)
    return Entry(strategy=name, feasible=False, reason=why, num_ranks=num_ranks, num_stages=num_stages), None
