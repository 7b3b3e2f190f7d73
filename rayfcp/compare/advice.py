"""What an advice is asked for beside a comparison, and the systems that it is measured by.

The advice: the fastest strategy on its fastest layout, and what other systems take on theirs.

The advice in words: what is recommended, what it gains, and why.

All layouts that were looked at: a row each, a column for each strategy.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from rayfcp.compare.arguments import Inputs, chosen
from rayfcp.compare.comparison import Case, Comparison, Say, model_of
from rayfcp.compare.layouts import (
    Effort,
    Layout,
    LayoutSearch,
    Spot,
    Trial,
    layouts,
    misfit,
    planned_memory_gib,
    view_of,
)
from rayfcp.compare.lengths import batches_of, lengths_of
from rayfcp.compare.planning import options_of
from rayfcp.compare.results import Entry
from rayfcp.compare.table import degrees_text
from rayfcp.config import ConfigError
from rayfcp.plan import hardware_profile
from rayfcp.plan.strategies.registry import get
from rayfcp.telemetry.summary import number, seconds
from rayfcp.values import HardwareProfile, ModelProfile

STATIC, DAPPLE, ULYSSES = "static-cp", "dapple", "ulysses"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """`stages`, `tensor_parallel`: None where they are searched; `inputs` has 1 there. `data`: what the run reads, if
    that is known."""

    inputs: Inputs
    stages: int | None = None
    tensor_parallel: int | None = None
    data: str | None = None

    def __post_init__(self) -> None:
        if self.inputs.max_tokens_per_rank is not None:
            raise ConfigError(
                f"--max-tokens-per-rank is {self.inputs.max_tokens_per_rank}, must not be given where layouts are "
                "compared, for each holds other numbers of tokens; give --memory-gib"
            )

    @property
    def searched(self) -> str:
        """What was not given, in words."""
        parts = ["pipeline stages"] * (self.stages is None) + ["devices a layer"] * (self.tensor_parallel is None)
        return " and ".join(parts) + " searched" if parts else ""

    def as_json(self) -> dict[str, Any]:
        """The inputs by name, `auto` for what is searched."""
        asked = {"stages": self.stages, "tensor_parallel": self.tensor_parallel}
        return self.inputs.as_json() | {name: "auto" if value is None else value for name, value in asked.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A system whose best layout the advice is measured by. `staged`: it has pipeline stages."""

    name: str
    strategies: tuple[str, ...]
    staged: bool


RIVALS = (
    Rival(name="Megatron-LM", strategies=(STATIC, DAPPLE), staged=True),
    Rival(name="DeepSpeed", strategies=(ULYSSES,), staged=False),
)
"""One degree for all with 1F1B over stages; one degree over heads with parameters sharded over all ranks (ZeRO), which
DeepSpeed does not combine with stages. Both are taken to share out embedding and head."""


def suits(strategy: str, layout: Layout) -> bool:
    """Whether a strategy is looked at on a layout."""
    if layout.num_stages == 1:
        return not get(strategy).needs_stages
    info = get(strategy)  # the systems of other baselines have no pipeline stages
    return not info.is_baseline or info.needs_stages or strategy == STATIC


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """`comparison`: of each strategy asked for, its best layout. `trials`: all, strategy by strategy; `misfits`: why
    layouts were left out for all. `best`: what is recommended, if anything is feasible; `rivals`: their best, by
    name."""

    question: Question
    memory_gib: float
    comparison: Comparison
    layouts: tuple[Layout, ...]
    misfits: dict[Layout, str]
    trials: tuple[Trial, ...]
    best: Trial | None
    rivals: dict[str, Trial]

    def as_json(self) -> dict[str, Any]:
        """The JSON contract of a comparison, the layouts and the recommendation beside it."""
        given = self.comparison.as_json()
        inputs = {**given["inputs"], **self.question.as_json(), "memory_gib": self.memory_gib}
        layouts = [trial.as_json() for trial in self.trials]
        layouts += [
            {"num_stages": each.num_stages, "tensor_parallel": each.tensor_parallel, "status": "infeasible"}
            | {"strategy": None, "reason": why}
            for each, why in self.misfits.items()
        ]
        best = None
        if self.best is not None:
            gains = {name: trial.as_json() | {"gain": self.gain(name)} for name, trial in self.rivals.items()}
            best = self.best.as_json() | {"rivals": gains}
        return {"inputs": inputs, "results": given["results"], "layouts": layouts, "recommended": best}

    def gain(self, rival: str) -> float:
        """Times as fast as the best layout of a rival."""
        assert self.best is not None, "there is a recommendation"
        return self.rivals[rival].iteration_s / self.best.iteration_s


class Adviser:
    """One question, and the spots that several strategies share.

    Raises:
        ConfigError: inputs that cannot be used, in one line.
    """

    def __init__(self, question: Question, *, effort: Effort | None = None) -> None:
        self._question, self._effort = question, effort or Effort()
        self._say: Say = lambda _: None
        self.model: ModelProfile = model_of(question.inputs)
        self.hardware: HardwareProfile = hardware_profile(question.inputs.hardware)
        self._inputs = replace(
            question.inputs, memory_gib=planned_memory_gib(question.inputs, self.hardware), strategies=()
        )
        self._names = chosen(question.inputs.strategies)
        self.batches = batches_of(question.inputs, model=self.model)
        self.layouts = layouts(
            question.inputs.devices,
            hardware=self.hardware,
            stages=question.stages,
            tensor_parallel=question.tensor_parallel,
        )
        self._spots: dict[tuple[Layout, bool], Spot] = {}
        self._searched: dict[tuple[str, bool], tuple[Trial, ...]] = {}

    @property
    def num_pairs(self) -> int:
        """Strategies times layouts, about how often something is told."""
        return len(self._names) * len(self.layouts)

    def advise(self, *, say: Say = lambda _: None) -> Advice:
        """The search, strategy by strategy; `say` is told what comes next."""
        self._say = say
        self._say(f"{len(self._names)} strategies on {len(self.layouts)} layouts of {self._inputs.devices} devices")
        own = [trial for name in self._names for trial in self._trials(name, self.layouts, split=False)]
        rivals = {rival.name: best for rival in RIVALS if (best := self._best_of(rival)) is not None}
        assert self._inputs.memory_gib is not None
        misfits = {layout: self._misfit(layout) for layout in self.layouts}
        return Advice(
            question=self._question,
            memory_gib=self._inputs.memory_gib,
            comparison=self._comparison(own),
            layouts=self.layouts,
            misfits={layout: why for layout, why in misfits.items() if why},
            trials=tuple(trial for found in self._searched.values() for trial in found),
            best=fastest(own),
            rivals=rivals,
        )

    def spot(self, layout: Layout, *, split: bool) -> Spot:
        """Of a layout that fits; `split`: the vocabulary over tensor-parallel devices."""
        key = layout, split and layout.tensor_parallel > 1
        if key not in self._spots:
            view = view_of(
                layout, inputs=self._inputs, model=self.model, hardware=self.hardware, split_vocabulary=key[1]
            )
            self._spots[key] = Spot(
                view, model=self.model, batches=self.batches, options=options_of(self._question.inputs)
            )
        return self._spots[key]

    def _misfit(self, layout: Layout) -> str:
        return misfit(layout, inputs=self._inputs, model=self.model, hardware=self.hardware)

    def _trials(self, name: str, places: Sequence[Layout], *, split: bool) -> tuple[Trial, ...]:
        fitting = [layout for layout in places if suits(name, layout) and not self._misfit(layout)]
        spots = [self.spot(layout, split=split) for layout in fitting]
        key = name, any(spot.view.split_vocabulary for spot in spots)
        if key not in self._searched:
            self._searched[key] = LayoutSearch(name, spots, effort=self._effort, say=self._say).run()
        return self._searched[key]

    def _of_rival(self, name: str, rival: Rival) -> tuple[Trial, ...]:
        places = [layout for layout in self.layouts if rival.staged or layout.num_stages == 1]
        return self._trials(name, places, split=True)

    def _best_of(self, rival: Rival) -> Trial | None:
        return fastest([trial for name in rival.strategies for trial in self._of_rival(name, rival)])

    def _comparison(self, trials: Sequence[Trial]) -> Comparison:
        """Every strategy on its best layout."""
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
            options=options_of(self._question.inputs),
        )
        return Comparison(inputs=self._question.inputs, case=case, entries=tuple(entries), scenes=tuple(scenes))

    def _why_none(self, name: str, trials: Sequence[Trial]) -> str:
        if trials:
            return f"on none of {len(trials)} layouts; on {trials[0].layout}: {trials[0].reason}"
        places = [layout for layout in self.layouts if suits(name, layout)]
        if not places:
            needs = "needs pipeline stages" if get(name).needs_stages else "is looked at without pipeline stages"
            return f"{name} {needs}, --stages is {self._question.stages}; give auto"
        return self._misfit(places[0])


def fastest(trials: Sequence[Trial]) -> Trial | None:
    """Of those that were simulated; of equals the first."""
    done = [trial for trial in trials if trial.status == "simulated"]
    return min(done, key=lambda trial: trial.iteration_s, default=None)


OTHERS = {"simulated": "takes", "predicted": "is predicted to take", "bounded": "cannot take less than"}


def recommendation(advice: Advice) -> list[str]:
    """A few lines; the first says what."""
    best = advice.best
    if best is None or best.entry is None:
        return [
            f"No recommendation: no strategy has a plan on any of {len(advice.layouts)} layouts.",
            *_refusals(advice),
        ]
    lines = [
        f"Recommended: {named(best)}: {seconds(best.iteration_s)} an iteration expected "
        f"({number(round(_tokens_per_s(advice, best)))} tokens/s), {best.entry.peak_memory_gib:.1f} of "
        f"{advice.memory_gib:.1f} GiB a device."
    ]
    for name, rival in advice.rivals.items():
        lines.append(
            f"{advice.gain(name):.2f} times as fast as {name}'s best layout: {named(rival)}, "
            f"{seconds(rival.iteration_s)}{_advantage(rival) if advice.gain(name) < 1 else ''}."
        )
    return [*lines, f"Why: {_why(advice, best)}"]


def named(trial: Trial) -> str:
    """Strategy, layout, and what is set beside."""
    assert trial.entry is not None
    entry, layout = trial.entry, trial.layout
    on = f"{trial.strategy} on {entry.num_ranks} rank{'s' if entry.num_ranks > 1 else ''} of {layout}"
    if layout.num_stages > 1:
        return f"{on}, gradients reduced each {entry.reduce_every}, parameters gathered each {entry.gather_every}"
    return f"{on}, {entry.recomputed_layers} layers recomputed, gradients reduced each {entry.reduce_every}"


def _advantage(rival: Trial) -> str:
    return " (embedding and head shared by tensor-parallel devices, on which rayfcp has them whole)" * (
        rival.split_vocabulary
    )


def _tokens_per_s(advice: Advice, best: Trial) -> float:
    batches = advice.comparison.case.batches
    return sum(lengths_of(batches)) / len(batches) / best.iteration_s


def _why(advice: Advice, best: Trial) -> str:
    """What the strategy takes on other layouts, as far as that is known, and what its plans look like."""
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
    parts += [f"{unfit} layout{'s do' if unfit > 1 else ' does'} not fit"] if unfit else []
    degrees = degrees_text(best.entry.degrees or {})
    parts.append(f"its groups have degrees {degrees}, {100 * max((best.entry.gap or 1) - 1, 0):.1f} % above the bound")
    return "; ".join(parts) + "."


def known_s(trial: Trial) -> float:
    """Seconds that are simulated, predicted, or a lower bound, as the trial's status says."""
    known = {"predicted": trial.predicted_s, "bounded": trial.lower_bound_s}
    return trial.iteration_s if trial.status == "simulated" else known[trial.status] or 0.0


def _beside(count: int) -> str:
    return f", on {count} other{'s' if count > 1 else ''} more" if count else ""


def _refusals(advice: Advice) -> list[str]:
    return [f"{entry.strategy}: {entry.reason}" for entry in advice.comparison.entries]


MARKS = {"simulated": "", "predicted": "~", "bounded": "≥"}
KEY = (
    "seconds an iteration; ~ predicted for the first batch only; ≥ lower bound of what was left out; - no plan; "
    "strategies that were not asked for are those of other systems"
)


def format_layouts(advice: Advice) -> str:
    """The recommendation, the table, and below it why there are gaps; without a newline at the end."""
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
    return "\n".join([*recommendation(advice), "", *lines, KEY, *(["left out:", *gaps] if gaps else [])])


def layout_section(advice: Advice) -> str:
    """The same for a page."""
    first, *others = recommendation(advice)
    names = layout_columns(advice)
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in ("layout", "ranks", *names))
    rows = []
    for layout in advice.layouts:
        cells = "".join(_cell(advice, _trial(advice, name, layout)) for name in names)
        rows.append(f"<tr><td>{layout}</td><td>{_ranks(advice, layout)}</td>{cells}</tr>")
    gaps = "".join(f"<li><b>{layout}</b>: {escape(why)}</li>" for layout, why in _gaps(advice))
    told = "".join(f"<p>{escape(line)}</p>" for line in others)
    return (
        f'<h2>Layout</h2><p class="lead">{escape(first)}</p>{told}'
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
        f'<p class="note">{escape(KEY[:1].upper() + KEY[1:])}. Point at a figure for its reason.</p>'
        + (f'<ul class="refused">{gaps}</ul>' if gaps else "")
    )


def layout_columns(advice: Advice) -> list[str]:
    """Strategies in the order of the search; those that only rivals are searched for come last."""
    return list(dict.fromkeys(trial.strategy for trial in advice.trials))


def _ranks(advice: Advice, layout: Layout) -> int:
    return advice.question.inputs.devices // layout.devices_per_rank


def _trial(advice: Advice, name: str, layout: Layout) -> Trial | None:
    """As rayfcp runs it, else as the rival does."""
    found = [each for each in advice.trials if each.strategy == name and each.layout == layout]
    return min(found, key=lambda each: each.split_vocabulary, default=None)


def _texts(advice: Advice, layout: Layout) -> list[str]:
    return [_text(_trial(advice, name, layout)) for name in layout_columns(advice)]


def _text(trial: Trial | None) -> str:
    if trial is None or trial.status == "infeasible":
        return "-"
    return f"{MARKS[trial.status]}{seconds(known_s(trial))}"


def _cell(advice: Advice, trial: Trial | None) -> str:
    if trial is None:
        return "<td>-</td>"
    why = trial.reason or (trial.entry.reason if trial.entry else "")
    text = escape(_text(trial))
    strong = f"<b>{text}</b>" if trial is advice.best else text
    mark = ' class="ours"' if not get(trial.strategy).is_baseline else ""
    return f'<td{mark} title="{escape(why)}">{strong}</td>'


def _gaps(advice: Advice) -> Sequence[tuple[Layout, str]]:
    """Layouts on which nothing that was asked for has a plan, and why."""
    asked = {entry.strategy for entry in advice.comparison.entries}
    own = [each for each in advice.trials if each.strategy in asked and not each.split_vocabulary]
    found = list(advice.misfits.items())
    for layout in advice.layouts:
        trials = [each for each in own if each.layout == layout]
        if trials and all(each.status == "infeasible" for each in trials):
            found.append((layout, trials[0].reason))
    return sorted(found)
