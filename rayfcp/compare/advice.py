"""Advice: the fastest strategy on its fastest parallel layout, compared with other systems on theirs."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rayfcp.compare.arguments import Inputs, chosen
from rayfcp.compare.comparison import Comparison, OnEntry, case_of
from rayfcp.compare.layouts import (
    BASELINE_SYSTEMS,
    BaselineSystem,
    Candidates,
    LayoutCandidate,
    LayoutSearch,
    Log,
    ParallelLayout,
    Trial,
    fastest,
    layouts,
    suits,
)
from rayfcp.compare.lengths import lengths_of
from rayfcp.compare.page import SIDEWAYS
from rayfcp.compare.planning import options_of
from rayfcp.compare.results import Entry
from rayfcp.compare.settings import planned_memory_gib
from rayfcp.compare.table import (
    MOST_DEGREES,
    SIMPLER_WITHIN,
    WHY_SIMPLE,
    aligned,
    device_memory_gib,
    gap_of,
    least_bound,
    memory_text,
    simplest,
)
from rayfcp.config import ConfigError
from rayfcp.plan.strategies.registry import AUTO, get
from rayfcp.telemetry.page import table
from rayfcp.telemetry.summary import number, percent, seconds
from rayfcp.values.counted import counted, degrees_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Result of a search of layouts.

    `comparison`: each requested strategy on its best layout. `trials`: strategy by strategy; `misfits`: layouts that no
    strategy can use, with reasons. `best`: the recommendation, if anything is feasible; `systems`: best trial of each
    baseline system.
    """

    inputs: Inputs
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
        inputs = {**given["inputs"], "memory_gib": self.memory_gib}
        layouts = [trial.as_json() for trial in self.trials]
        for layout, why in self.misfits.items():
            sizes = {"num_stages": layout.num_stages, "tensor_parallel": layout.tensor_parallel}
            layouts.append({**sizes, "status": "infeasible", "strategy": None, "reason": why})
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
    """Search of layouts for one comparison; strategies share the layout candidates.

    Raises:
        ConfigError: Inputs that cannot be used, in one line.
    """

    def __init__(self, inputs: Inputs) -> None:
        if inputs.max_tokens_per_rank is not None:
            raise ConfigError(
                f"--max-tokens-per-rank is {inputs.max_tokens_per_rank}, must not be given where layouts are "
                "compared, since each holds a different number of tokens; give --memory-gib"
            )
        self.inputs = inputs
        self._log: Log = lambda _: None
        self._case = case_of(inputs, options=options_of(inputs))
        self._names, self._candidates = chosen(inputs.strategies), Candidates(inputs, case=self._case)
        self.layouts = layouts(inputs, hardware=self._case.hardware)
        self._searched: dict[str, tuple[Trial, ...]] = {}

    @property
    def num_pairs(self) -> int:
        """Strategies times layouts, approximately the number of log lines."""
        return len(self._names) * len(self.layouts)

    def advise(self, *, log: Log = lambda _: None, on_entry: OnEntry = lambda _: None) -> Advice:
        """Search strategy by strategy; `log` receives the next piece of work, `on_entry` each strategy's best entry."""
        self._log = log
        self._log(f"{len(self._names)} strategies on {len(self.layouts)} layouts of {self.inputs.devices} devices")
        own: list[Trial] = []
        for name in self._names:
            trials = self._trials(name)
            if (best := fastest(trials)) is not None and best.entry is not None:
                on_entry(best.entry)
            own += trials
        systems = {system.name: best for system in BASELINE_SYSTEMS if (best := self._best_of(system)) is not None}
        misfits = {layout: self._candidates.misfit(layout) for layout in self.layouts}
        return Advice(
            inputs=self.inputs,
            memory_gib=planned_memory_gib(self.inputs, self._case.hardware),
            comparison=self._comparison(own, systems=systems),
            layouts=self.layouts,
            misfits={layout: why for layout, why in misfits.items() if why},
            trials=tuple(trial for found in self._searched.values() for trial in found),
            best=recommended_trial(own),
            systems=systems,
        )

    def candidate(self, strategy: str, layout: ParallelLayout) -> LayoutCandidate:
        """Return a layout as a strategy uses it."""
        return self._candidates.of(strategy, layout)

    def _trials(self, name: str) -> tuple[Trial, ...]:
        if name not in self._searched:
            fitting = [each for each in self.layouts if suits(name, each) and not self._candidates.misfit(each)]
            candidates = [self._candidates.of(name, layout) for layout in fitting]
            self._searched[name] = LayoutSearch(name, candidates, log=self._log).run()
        return self._searched[name]

    def _best_of(self, system: BaselineSystem) -> Trial | None:
        return fastest([trial for name in system.strategies for trial in self._trials(name)])

    def _comparison(self, trials: Sequence[Trial], *, systems: dict[str, Trial]) -> Comparison:
        """Return every strategy on its best layout."""
        entries, scenes, devices = [], [], self.inputs.devices
        for name in self._names:
            own = [trial for trial in trials if trial.strategy == name]
            best = fastest(own)
            if best is None or best.entry is None:
                why = self._why_none(name, own)
                entries.append(Entry(strategy=name, feasible=False, reason=why, num_ranks=devices))
            else:
                entries.append(best.entry)
                scenes += [best.scene] if best.scene else []
        system, trial = min(systems.items(), key=lambda each: each[1].iteration_s, default=("", None))
        return Comparison(
            inputs=self.inputs,
            case=self._case,
            entries=tuple(entries),
            scenes=tuple(scenes),
            system=(f"{system}'s best layout", trial.iteration_s) if trial is not None else None,
        )

    def _why_none(self, name: str, trials: Sequence[Trial]) -> str:
        if trials:
            return f"on none of {len(trials)} layouts; on {trials[0].layout}: {trials[0].reason}"
        suited = [layout for layout in self.layouts if suits(name, layout)]
        if suited:
            return self._candidates.misfit(suited[0])
        needs = "needs pipeline stages" if get(name).needs_stages else "is compared without pipeline stages"
        return f"{name} {needs}, --stages is {self.inputs.stages}; give auto"


def recommended_trial(trials: Sequence[Trial]) -> Trial | None:
    """Return the simplest trial that is about as fast as the fastest: few stages before many, then few tensor-parallel
    devices before many, then a strategy before `auto`, which plans with all of them for every batch. rayfcp runs none
    that splits the vocabulary."""
    done = [trial for trial in trials if trial.status == "simulated" and not trial.split_vocabulary]
    if not done:
        return None
    return simplest(
        done,
        iteration_s=lambda each: each.iteration_s,
        layout=lambda each: (each.layout.num_stages, each.layout.tensor_parallel, each.strategy == AUTO),
    )


def recommendation(advice: Advice) -> list[str]:
    """Return a few lines, the recommendation first."""
    best = advice.best
    if best is None or best.entry is None:
        reasons = [f"{entry.strategy}: {entry.reason}" for entry in advice.comparison.entries]
        return [f"No recommendation: no strategy has a plan on any of {len(advice.layouts)} layouts.", *reasons]
    batches, entry = advice.comparison.case.batches, best.entry
    tokens_per_s = sum(lengths_of(batches)) / len(batches) / best.iteration_s
    memory = memory_text(entry, device_memory_gib(advice.inputs))
    lines = [
        f"Recommended: {_named(best)}: {seconds(best.iteration_s)} per iteration expected "
        f"({number(round(tokens_per_s))} tokens/s), {memory} per device, planned for {advice.memory_gib:.1f}."
    ]
    lines += [_rival_line(advice, name) for name in sorted(advice.systems, key=advice.gain)]
    requested = {entry.strategy for entry in advice.comparison.entries}
    first = fastest([each for each in advice.trials if each.strategy in requested and not each.split_vocabulary])
    if first is not None and first.iteration_s < best.iteration_s:
        ahead = percent(best.iteration_s / first.iteration_s - 1)
        lines.append(f"{_named(first)} is faster by {ahead}; {WHY_SIMPLE}.")
    name, bound_s = least = least_bound(advice.comparison)
    above = percent(max(gap_of(entry, least) - 1, 0))
    degrees = degrees_text(entry.degrees or {}, most=MOST_DEGREES)
    return [
        *lines,
        f"Its groups have degrees {degrees}; it takes {above} more than {seconds(bound_s)}, "
        f"the least lower bound of the strategies listed (of {name}).",
    ]


def _rival_line(advice: Advice, name: str) -> str:
    """Compare the recommendation with a system's best layout."""
    system, gain = advice.systems[name], advice.gain(name)
    why = " (its tensor-parallel devices split embedding and head, which rayfcp replicates)"
    little = "; flexible groups gain little on these lengths" if 1 <= gain < SIMPLER_WITHIN else ""
    return (
        f"{gain:.2f} times as fast as {name}'s best layout: {_named(system)}, {seconds(system.iteration_s)}"
        f"{why if gain < 1 and system.split_vocabulary else ''}{little}."
    )


def _named(trial: Trial) -> str:
    """Name strategy, layout and setting of a trial."""
    assert trial.entry is not None
    entry, layout = trial.entry, trial.layout
    on = f"{trial.strategy} on {counted(entry.num_ranks, 'rank')} of {layout}"
    if layout.num_stages > 1:
        return f"{on}, gradients reduced per {entry.reduce_every}, parameters gathered per {entry.gather_every}"
    layers = counted(entry.recomputed_layers or 0, "layer")
    return f"{on}, {layers} recomputed, gradients reduced per {entry.reduce_every}"


KEY = (
    "seconds per iteration; ~ predicted, not simulated; ≥ lower bound, not simulated; - no plan; "
    "strategies that were not requested are those of other systems"
)


def format_layouts(advice: Advice) -> str:
    """Return recommendation, table and reasons of omissions as text, without a newline at the end."""
    omissions = [f"  {layout}: {why}" for layout, why in _omissions(advice)]
    lines = [*recommendation(advice), "", *aligned(_layout_rows(advice)), KEY]
    return "\n".join([*lines, *(["infeasible:", *omissions] if omissions else [])])


def layout_section(advice: Advice) -> str:
    """Return the same as a section of the page."""
    first, *others = recommendation(advice)
    heads, *rows = _layout_rows(advice)
    omissions = "".join(f"<li><b>{layout}</b>: {escape(why)}</li>" for layout, why in _omissions(advice))
    return (
        f'<h2>Layout</h2><p class="lead">{escape(first)}</p>{"".join(f"<p>{escape(line)}</p>" for line in others)}'
        f'{SIDEWAYS}<div class="wide">{table(heads, rows)}</div>'
        f'<p class="note">{escape(KEY[:1].upper() + KEY[1:])}.</p>'
        + (f'<ul class="refused">{omissions}</ul>' if omissions else "")
    )


def _layout_rows(advice: Advice) -> list[list[str]]:
    """Heads, and a row per layout; strategies in the order of the search, those of baseline systems last."""
    names = list(dict.fromkeys(trial.strategy for trial in advice.trials))
    rows = [["stages", "tensor", "ranks", *names]]
    for layout in advice.layouts:
        sizes = [layout.num_stages, layout.tensor_parallel, advice.inputs.devices // layout.devices_per_rank]
        rows.append([*map(str, sizes), *(_time_text(advice, name, layout) for name in names)])
    return rows


def _time_text(advice: Advice, name: str, layout: ParallelLayout) -> str:
    """Time of a strategy on a layout as rayfcp runs it, else as the baseline system does."""
    found = [each for each in advice.trials if each.strategy == name and each.layout == layout]
    trial = min(found, key=lambda each: each.split_vocabulary, default=None)
    if trial is None or trial.status == "infeasible":
        return "-"
    if trial.status == "simulated":
        return seconds(trial.iteration_s)
    return (
        f"~{seconds(trial.predicted_s or 0)}"
        if trial.status == "predicted"
        else f"≥{seconds(trial.lower_bound_s or 0)}"
    )


def _omissions(advice: Advice) -> Sequence[tuple[ParallelLayout, str]]:
    """Return layouts on which no requested strategy has a plan, with reasons."""
    requested = {entry.strategy for entry in advice.comparison.entries}
    own = [each for each in advice.trials if each.strategy in requested and not each.split_vocabulary]
    found = list(advice.misfits.items())
    for layout in advice.layouts:
        trials = [each for each in own if each.layout == layout]
        if trials and all(each.status == "infeasible" for each in trials):
            found.append((layout, trials[0].reason))
    return sorted(found)
