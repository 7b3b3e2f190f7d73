"""Advice: the fastest strategy on its fastest parallel layout, compared with other systems on theirs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from rayfcp.compare.arguments import Inputs, chosen
from rayfcp.compare.comparison import Case, Comparison, Log, model_of
from rayfcp.compare.layouts import (
    Effort,
    LayoutCandidate,
    LayoutSearch,
    ParallelLayout,
    Trial,
    layouts,
    misfit,
    planned_memory_gib,
    view_of,
)
from rayfcp.compare.lengths import batches_of, lengths_of
from rayfcp.compare.page import SIDEWAYS
from rayfcp.compare.planning import options_of
from rayfcp.compare.results import Entry
from rayfcp.compare.table import degrees_text
from rayfcp.config import ConfigError
from rayfcp.plan import hardware_profile
from rayfcp.plan.strategies.registry import get
from rayfcp.telemetry.summary import counted, number, seconds
from rayfcp.values import HardwareProfile, ModelProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceRequest:
    """A comparison and what is searched beside it.

    `stages`, `tensor_parallel`: None where they are searched; `inputs` has 1 there. `data`: the run's data, if known.
    """

    inputs: Inputs
    stages: int | None = None
    tensor_parallel: int | None = None
    data: str | None = None

    def __post_init__(self) -> None:
        if self.inputs.max_tokens_per_rank is not None:
            raise ConfigError(
                f"--max-tokens-per-rank is {self.inputs.max_tokens_per_rank}, must not be given where layouts are "
                "compared, since each holds a different number of tokens; give --memory-gib"
            )

    @property
    def searched(self) -> str:
        """Name the searched sizes."""
        parts = ["pipeline stages"] * (self.stages is None)
        parts += ["tensor-parallel devices"] * (self.tensor_parallel is None)
        return " and ".join(parts) + " searched" if parts else ""

    def as_json(self) -> dict[str, Any]:
        """Return the inputs by name, `auto` for what is searched."""
        sizes = {"stages": self.stages, "tensor_parallel": self.tensor_parallel}
        return self.inputs.as_json() | {name: "auto" if value is None else value for name, value in sizes.items()}


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
ranks (ZeRO), which it does not combine with stages. Both are assumed to split embedding and head over tensor-parallel
ranks."""


def suits(strategy: str, layout: ParallelLayout) -> bool:
    """Whether a strategy is tried on a layout: baselines on stages only if their system has them."""
    info = get(strategy)
    if layout.num_stages == 1:
        return not info.needs_stages
    staged = any(strategy in system.strategies for system in BASELINE_SYSTEMS if system.staged)
    return not info.is_baseline or info.needs_stages or staged


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Result of a search of layouts.

    `comparison`: each requested strategy on its best layout. `trials`: strategy by strategy; `misfits`: layouts that no
    strategy can use, with reasons. `best`: the recommendation, if anything is feasible; `systems`: best trial of each
    baseline system.
    """

    request: AdviceRequest
    memory_gib: float
    comparison: Comparison
    layouts: tuple[ParallelLayout, ...]
    misfits: dict[ParallelLayout, str]
    trials: tuple[Trial, ...]
    best: Trial | None
    systems: dict[str, Trial]

    def as_json(self) -> dict[str, Any]:
        """Return the JSON contract of a comparison, with the layouts and the recommendation."""
        given = self.comparison.as_json()
        inputs = {**given["inputs"], **self.request.as_json(), "memory_gib": self.memory_gib}
        layouts = [trial.as_json() for trial in self.trials]
        layouts += [
            {"num_stages": each.num_stages, "tensor_parallel": each.tensor_parallel, "status": "infeasible"}
            | {"strategy": None, "reason": why}
            for each, why in self.misfits.items()
        ]
        best = None
        if self.best is not None:
            gains = {name: trial.as_json() | {"gain": self.gain(name)} for name, trial in self.systems.items()}
            best = self.best.as_json() | {"rivals": gains}
        return {"inputs": inputs, "results": given["results"], "layouts": layouts, "recommended": best}

    def gain(self, system: str) -> float:
        """Return how many times as fast the recommendation is as a system's best layout."""
        assert self.best is not None, "there is a recommendation"
        return self.systems[system].iteration_s / self.best.iteration_s


class Advisor:
    """Search of layouts for one request; strategies share the layout candidates.

    Raises:
        ConfigError: Inputs that cannot be used, in one line.
    """

    def __init__(self, request: AdviceRequest, *, effort: Effort | None = None) -> None:
        self._request, self._effort = request, effort or Effort()
        self._log: Log = lambda _: None
        self.model: ModelProfile = model_of(request.inputs)
        self.hardware: HardwareProfile = hardware_profile(request.inputs.hardware)
        self._inputs = replace(
            request.inputs, memory_gib=planned_memory_gib(request.inputs, self.hardware), strategies=()
        )
        self._names = chosen(request.inputs.strategies)
        self.batches = batches_of(request.inputs, model=self.model)
        self.layouts = layouts(
            request.inputs.devices,
            hardware=self.hardware,
            stages=request.stages,
            tensor_parallel=request.tensor_parallel,
        )
        self._candidates: dict[tuple[ParallelLayout, bool], LayoutCandidate] = {}
        self._searched: dict[tuple[str, bool], tuple[Trial, ...]] = {}

    @property
    def num_pairs(self) -> int:
        """Strategies times layouts: approximately the number of log lines."""
        return len(self._names) * len(self.layouts)

    def advise(self, *, log: Log = lambda _: None) -> Advice:
        """Search strategy by strategy; `log` receives the next piece of work."""
        self._log = log
        self._log(f"{len(self._names)} strategies on {len(self.layouts)} layouts of {self._inputs.devices} devices")
        own = [trial for name in self._names for trial in self._trials(name, self.layouts, split=False)]
        systems = {system.name: best for system in BASELINE_SYSTEMS if (best := self._best_of(system)) is not None}
        assert self._inputs.memory_gib is not None
        misfits = {layout: self._misfit(layout) for layout in self.layouts}
        return Advice(
            request=self._request,
            memory_gib=self._inputs.memory_gib,
            comparison=self._comparison(own, systems=systems),
            layouts=self.layouts,
            misfits={layout: why for layout, why in misfits.items() if why},
            trials=tuple(trial for found in self._searched.values() for trial in found),
            best=fastest(own),
            systems=systems,
        )

    def candidate(self, layout: ParallelLayout, *, split: bool) -> LayoutCandidate:
        """Return the candidate of a layout; `split`: the vocabulary is split over tensor-parallel devices."""
        key = layout, split and layout.tensor_parallel > 1
        if key not in self._candidates:
            view = view_of(
                layout, inputs=self._inputs, model=self.model, hardware=self.hardware, split_vocabulary=key[1]
            )
            self._candidates[key] = LayoutCandidate(
                view, model=self.model, batches=self.batches, options=options_of(self._request.inputs)
            )
        return self._candidates[key]

    def _misfit(self, layout: ParallelLayout) -> str:
        return misfit(layout, inputs=self._inputs, model=self.model, hardware=self.hardware)

    def _trials(self, name: str, places: Sequence[ParallelLayout], *, split: bool) -> tuple[Trial, ...]:
        fitting = [layout for layout in places if suits(name, layout) and not self._misfit(layout)]
        candidates = [self.candidate(layout, split=split) for layout in fitting]
        key = name, any(candidate.view.split_vocabulary for candidate in candidates)
        if key not in self._searched:
            self._searched[key] = LayoutSearch(name, candidates, effort=self._effort, log=self._log).run()
        return self._searched[key]

    def _of_system(self, name: str, system: BaselineSystem) -> tuple[Trial, ...]:
        places = [layout for layout in self.layouts if system.staged or layout.num_stages == 1]
        return self._trials(name, places, split=True)

    def _best_of(self, system: BaselineSystem) -> Trial | None:
        return fastest([trial for name in system.strategies for trial in self._of_system(name, system)])

    def _comparison(self, trials: Sequence[Trial], *, systems: dict[str, Trial]) -> Comparison:
        """Return every strategy on its best layout."""
        entries, scenes, devices = [], [], self._inputs.devices
        for name in self._names:
            mine = [trial for trial in trials if trial.strategy == name]
            best = fastest(mine)
            if best is None or best.entry is None:
                entries.append(
                    Entry(strategy=name, feasible=False, reason=self._why_none(name, mine), num_ranks=devices)
                )
                continue
            entries.append(best.entry)
            scenes += [best.scene] if best.scene else []
        case = Case(
            model=self.model,
            hardware=self.hardware,
            num_ranks=devices,
            batches=self.batches,
            options=options_of(self._request.inputs),
        )
        system, trial = min(systems.items(), key=lambda each: each[1].iteration_s, default=("", None))
        return Comparison(
            inputs=self._request.inputs,
            case=case,
            entries=tuple(entries),
            scenes=tuple(scenes),
            system=(f"{system}'s best layout", trial.iteration_s) if trial is not None else None,
        )

    def _why_none(self, name: str, trials: Sequence[Trial]) -> str:
        if trials:
            return f"on none of {len(trials)} layouts; on {trials[0].layout}: {trials[0].reason}"
        places = [layout for layout in self.layouts if suits(name, layout)]
        if not places:
            needs = "needs pipeline stages" if get(name).needs_stages else "is compared without pipeline stages"
            return f"{name} {needs}, --stages is {self._request.stages}; give auto"
        return self._misfit(places[0])


def fastest(trials: Sequence[Trial]) -> Trial | None:
    """Return the fastest simulated trial, the first of equals."""
    done = [trial for trial in trials if trial.status == "simulated"]
    return min(done, key=lambda trial: trial.iteration_s, default=None)


OTHERS = {"simulated": "takes", "predicted": "is predicted to take", "bounded": "cannot take less than"}


def recommendation(advice: Advice) -> list[str]:
    """Return a few lines, the recommendation first."""
    best = advice.best
    if best is None or best.entry is None:
        return [
            f"No recommendation: no strategy has a plan on any of {len(advice.layouts)} layouts.",
            *_refusals(advice),
        ]
    lines = [
        f"Recommended: {named(best)}: {seconds(best.iteration_s)} per iteration expected "
        f"({number(round(_tokens_per_s(advice, best)))} tokens/s), {best.entry.peak_memory_gib:.1f} of "
        f"{advice.memory_gib:.1f} GiB per device."
    ]
    for name, system in advice.systems.items():
        lines.append(
            f"{advice.gain(name):.2f} times as fast as {name}'s best layout: {named(system)}, "
            f"{seconds(system.iteration_s)}{_advantage(system) if advice.gain(name) < 1 else ''}."
        )
    return [*lines, f"Why: {_why(advice, best)}"]


def named(trial: Trial) -> str:
    """Name strategy, layout and setting of a trial."""
    assert trial.entry is not None
    entry, layout = trial.entry, trial.layout
    on = f"{trial.strategy} on {counted(entry.num_ranks, 'rank')} of {layout}"
    if layout.num_stages > 1:
        return f"{on}, gradients reduced per {entry.reduce_every}, parameters gathered per {entry.gather_every}"
    layers = counted(entry.recomputed_layers or 0, "layer")
    return f"{on}, {layers} recomputed, gradients reduced per {entry.reduce_every}"


def _advantage(system: Trial) -> str:
    return " (its tensor-parallel devices split embedding and head, which rayfcp replicates)" * (
        system.split_vocabulary
    )


def _tokens_per_s(advice: Advice, best: Trial) -> float:
    batches = advice.comparison.case.batches
    return sum(lengths_of(batches)) / len(batches) / best.iteration_s


def _why(advice: Advice, best: Trial) -> str:
    """Say what the strategy takes on other layouts, as far as is known, and how its plans look."""
    assert best.entry is not None
    own = [each for each in advice.trials if each.strategy == best.strategy and not each.split_vocabulary]
    others = [each for each in own if each is not best]
    parts = []
    for status, says in OTHERS.items():
        found = [each for each in others if each.status == status]
        if found:
            nearest = min(found, key=known_s)
            parts.append(f"on {nearest.layout} it {says} {seconds(known_s(nearest))}{_beside(len(found) - 1)}")
    unfit = sum(each.status == "infeasible" for each in others) + len(advice.misfits)
    parts += [f"{counted(unfit, 'layout')} {'do' if unfit > 1 else 'does'} not fit"] if unfit else []
    degrees = degrees_text(best.entry.degrees or {})
    parts.append(f"its groups have degrees {degrees}, {100 * max((best.entry.gap or 1) - 1, 0):.1f} % above the bound")
    return "; ".join(parts) + "."


def known_s(trial: Trial) -> float:
    """Return simulated or predicted seconds or a lower bound, by the trial's status."""
    known = {"predicted": trial.predicted_s, "bounded": trial.lower_bound_s}
    return trial.iteration_s if trial.status == "simulated" else known[trial.status] or 0.0


def _beside(count: int) -> str:
    return f", on {counted(count, 'other')} more" if count else ""


def _refusals(advice: Advice) -> list[str]:
    return [f"{entry.strategy}: {entry.reason}" for entry in advice.comparison.entries]


MARKS = {"simulated": "", "predicted": "~", "bounded": "≥"}
KEY = (
    "seconds per iteration; ~ predicted for the first batch only; ≥ lower bound, not simulated; - no plan; "
    "strategies that were not requested are those of other systems"
)


def format_layouts(advice: Advice) -> str:
    """Return recommendation, table and reasons of omissions as text, without a newline at the end."""
    heads = ["stages", "tensor", "ranks", *layout_columns(advice)]
    rows = [
        [str(each.num_stages), str(each.tensor_parallel), str(_ranks(advice, each)), *_texts(advice, each)]
        for each in advice.layouts
    ]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = [
        "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in (heads, *rows)
    ]
    gaps = [f"  {layout}: {why}" for layout, why in _gaps(advice)]
    return "\n".join([*recommendation(advice), "", *lines, KEY, *(["infeasible:", *gaps] if gaps else [])])


def layout_section(advice: Advice) -> str:
    """Return the same as a section of the page."""
    first, *others = recommendation(advice)
    names = layout_columns(advice)
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in ("layout", "ranks", *names))
    rows = []
    for layout in advice.layouts:
        pairs = "".join(_pair(advice, _trial(advice, name, layout)) for name in names)
        rows.append(f"<tr><td>{layout}</td><td>{_ranks(advice, layout)}</td>{pairs}</tr>")
    gaps = "".join(f"<li><b>{layout}</b>: {escape(why)}</li>" for layout, why in _gaps(advice))
    lines = "".join(f"<p>{escape(line)}</p>" for line in others)
    return (
        f'<h2>Layout</h2><p class="lead">{escape(first)}</p>{lines}{SIDEWAYS}'
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
        f'<p class="note">{escape(KEY[:1].upper() + KEY[1:])}. Point at a figure for its reason.</p>'
        + (f'<ul class="refused">{gaps}</ul>' if gaps else "")
    )


def layout_columns(advice: Advice) -> list[str]:
    """Return strategies in the order of the search, those of baseline systems last."""
    return list(dict.fromkeys(trial.strategy for trial in advice.trials))


def _ranks(advice: Advice, layout: ParallelLayout) -> int:
    return advice.request.inputs.devices // layout.devices_per_rank


def _trial(advice: Advice, name: str, layout: ParallelLayout) -> Trial | None:
    """Return the trial as rayfcp runs it, else as the baseline system does."""
    found = [each for each in advice.trials if each.strategy == name and each.layout == layout]
    return min(found, key=lambda each: each.split_vocabulary, default=None)


def _texts(advice: Advice, layout: ParallelLayout) -> list[str]:
    return [_text(_trial(advice, name, layout)) for name in layout_columns(advice)]


def _text(trial: Trial | None) -> str:
    if trial is None or trial.status == "infeasible":
        return "-"
    return f"{MARKS[trial.status]}{seconds(known_s(trial))}"


def _pair(advice: Advice, trial: Trial | None) -> str:
    if trial is None:
        return "<td>-</td>"
    why = trial.reason or (trial.entry.reason if trial.entry else "")
    text = escape(_text(trial))
    strong = f"<b>{text}</b>" if trial is advice.best else text
    mark = ' class="ours"' if not get(trial.strategy).is_baseline else ""
    return f'<td{mark} title="{escape(why)}">{strong}</td>'


def _gaps(advice: Advice) -> Sequence[tuple[ParallelLayout, str]]:
    """Return layouts on which no requested strategy has a plan, with reasons."""
    requested = {entry.strategy for entry in advice.comparison.entries}
    own = [each for each in advice.trials if each.strategy in requested and not each.split_vocabulary]
    found = list(advice.misfits.items())
    for layout in advice.layouts:
        trials = [each for each in own if each.layout == layout]
        if trials and all(each.status == "infeasible" for each in trials):
            found.append((layout, trials[0].reason))
    return sorted(found)
