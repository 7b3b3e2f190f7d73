"""`rayfcp report`: a run's batches planned again with the costs that the run measured: statically, and as they were
before steps refitted the cost model."""

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rayfcp.cluster.actors.planner import RunPlanner, sequences_of
from rayfcp.cluster.dataset import open_dataset
from rayfcp.cluster.driver.preparing import prepared_data
from rayfcp.cluster.facts.measured import read_cost, read_measured_cost
from rayfcp.config import load_config
from rayfcp.config.loading import read_recorded
from rayfcp.plan import CostModel
from rayfcp.plan.layout import Blocks, placements_of
from rayfcp.telemetry.baseline import Baseline, Unrefitted
from rayfcp.telemetry.events import Event, read_events
from rayfcp.telemetry.steps import read_steps
from rayfcp.values import ClusterSpec, SequenceSpec, StepReport
from rayfcp.values.arrays import Ints

STATIC = "static-cp"


class NoBaselineError(ValueError):
    """The run directory lacks what a baseline needs; one clear line."""


def baseline_of(run_dir: str | Path, *, num_steps: int, log: Callable[[str], None]) -> Baseline | None:
    """Plan and simulate up to `num_steps` of the run's batches, evenly spread, by `static-cp` and by the run's own
    strategy, on the ranks of that step. None if `num_steps` is 0.

    Both use the final cost model of the run, on devices of equal speed; the run's own strategy plans with the one from
    before refitting, too. Batches are drawn again and verified by hash.

    Raises:
        NoBaselineError: a file is missing or outdated, or the data is no longer that of the run.
        ConfigError: the data is no longer there.
    """
    folder = Path(run_dir)
    reports, events = read_steps(folder / "steps.jsonl"), read_events(folder / "events.jsonl")
    if not reports or not num_steps:
        return None
    for name in ("config.yaml", "profile.json", "events.jsonl"):
        if not (folder / name).exists():
            raise NoBaselineError(f"{folder} holds no {name}, which a static baseline is made from")
    config = load_config(read_recorded(folder))
    data = open_dataset(config, data_dir=prepared_data(config, log=lambda _: None))
    try:
        cost, measured = read_cost(folder / "profile.json"), read_measured_cost(folder / "profile.json")
    except ValueError as error:
        raise NoBaselineError(f"{folder}/profile.json is of another version: {error}") from error
    device = str(json.loads((folder / "profile.json").read_text())["about"]["device"])
    planner = RunPlanner(config, data.model, device=device)
    steps, found = _spread(reports, num_steps), []
    for report in steps:
        log(f"planning step {report.step} again, statically and by {config.plan.strategy}")
        batch = data.sampler.batch(report.step)
        if batch.samples_hash != report.samples_hash:
            raise NoBaselineError(
                f"step {report.step} of {folder} was trained on other samples than data.paths holds now; keep the data"
            )
        sequences = sequences_of(batch, layer_kinds=data.model.layer_kinds)
        planned = functools.partial(
            _planned, planner, sequences, cluster=_cluster_at(report.step, events), simulated_by=cost
        )
        found.append((planned(cost=cost, strategy=STATIC), planned(cost=cost), planned(cost=measured or cost)))
    return Baseline(
        static=STATIC,
        own=config.plan.strategy,
        steps=tuple(report.step for report in steps),
        imbalances=tuple((static.imbalance, own.imbalance) for static, own, _ in found),
        step_s=tuple((static.step_s, own.step_s) for static, own, _ in found),
        unrefitted=_unrefitted([(before, own) for _, own, before in found]) if measured is not None else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """A batch planned and simulated: imbalance of compute, seconds, and of each sequence its tokens and the number of
    ranks that hold them."""

    imbalance: float
    step_s: float
    tokens: Ints
    degrees: Ints


def _planned(
    planner: RunPlanner,
    sequences: Sequence[SequenceSpec],
    *,
    cluster: ClusterSpec,
    cost: CostModel,
    simulated_by: CostModel,
    strategy: str | None = None,
) -> _Planned:
    plan, programs = planner.plan(sequences, cluster=cluster, cost=cost, strategy=strategy)
    placements = placements_of(plan, sequences)
    programs = programs or planner.lower(plan, sequences, cluster=cluster, placements=placements)
    timeline = planner.simulate(programs, cluster=cluster, cost=simulated_by)
    blocks = Blocks.joined([each.own for each in placements])
    held = np.unique(np.stack([blocks.sequence, blocks.rank]), axis=1)[0]
    return _Planned(
        imbalance=timeline.imbalance.compute,
        step_s=timeline.iteration_s,
        tokens=np.array([each.num_tokens for each in sequences]),
        degrees=np.bincount(held, minlength=len(sequences)),
    )


def _unrefitted(pairs: Sequence[tuple[_Planned, _Planned]]) -> Unrefitted:
    """Return how batches planned with the measured cost model differ from those planned with the refitted one."""
    moved = sum(int(before.tokens[before.degrees != own.degrees].sum()) for before, own in pairs)
    return Unrefitted(
        regrouped=moved / sum(int(before.tokens.sum()) for before, _ in pairs),
        step_s=tuple(before.step_s for before, _ in pairs),
    )


def _spread(reports: Sequence[StepReport], num_steps: int) -> list[StepReport]:
    """The first, the last, and others evenly between them; of one the last."""
    count = min(num_steps, len(reports))
    return (
        [reports[round(at * (len(reports) - 1) / (count - 1))] for at in range(count)] if count > 1 else [reports[-1]]
    )


def _cluster_at(step: int, events: Sequence[Event]) -> ClusterSpec:
    """Ranks that finally ran a step: those of the last event before it, since a step that ran again has a later one."""
    clusters = [event.cluster for event in events if event.cluster is not None and event.step < step]
    if not clusters:
        raise NoBaselineError(f"events.jsonl tells no ranks of step {step}")
    return clusters[-1]
