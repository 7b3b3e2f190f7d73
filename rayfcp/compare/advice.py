"""The advice: the fastest strategy on its fastest layout, and what other systems take on theirs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rayfcp.compare.contest import Case, Comparison, Say, model_of
from rayfcp.compare.layouts import Layout, layouts, misfit, planned_memory_gib, view_of
from rayfcp.compare.lengths import batches_of
from rayfcp.compare.names import PIPELINES, chosen
from rayfcp.compare.planning import options_of
from rayfcp.compare.question import RIVALS, Question, Rival, suits
from rayfcp.compare.results import Entry
from rayfcp.compare.search import Effort, LayoutSearch
from rayfcp.compare.spots import Spot
from rayfcp.compare.trials import Trial
from rayfcp.plan import hardware_profile
from rayfcp.values import HardwareProfile, ModelProfile


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
            needs = "needs pipeline stages" if name in PIPELINES else "is looked at without pipeline stages"
            return f"{name} {needs}, --stages is {self._question.stages}; give auto"
        return self._misfit(places[0])


def fastest(trials: Sequence[Trial]) -> Trial | None:
    """Of those that were simulated; of equals the first."""
    done = [trial for trial in trials if trial.status == "simulated"]
    return min(done, key=lambda trial: trial.iteration_s, default=None)
