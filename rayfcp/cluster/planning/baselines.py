"""`rayfcp report`: a run's batches planned statically, with the costs that the run measured."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from rayfcp.cluster.dataset import open_dataset
from rayfcp.cluster.planning.measured import read_cost
from rayfcp.cluster.planning.planner import RunPlanner, sequences_of
from rayfcp.cluster.trainer import prepared_data
from rayfcp.config import load_config
from rayfcp.plan import CostModel
from rayfcp.telemetry.baseline import Baseline, Pair
from rayfcp.telemetry.events import Event, read_events
from rayfcp.telemetry.steps import read_steps
from rayfcp.values import ClusterSpec, SequenceSpec, StepReport

STATIC = "static-cp"


class NoBaselineError(ValueError):
    """The run directory lacks what a baseline needs; one clear line."""


def baseline_of(run_dir: str | Path, *, num_steps: int, log: Callable[[str], None]) -> Baseline | None:
    """Plan and simulate up to `num_steps` of the run's batches, evenly spread, by `static-cp` and by the run's own
    strategy, on the ranks of that step. None if `num_steps` is 0.

    Both use the final cost model of the run, on devices of equal speed. Batches are drawn again and verified by hash.

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
    config = load_config(folder / "config.yaml")
    data = open_dataset(config, data_dir=prepared_data(config, log=lambda _: None))
    try:
        cost = read_cost(folder / "profile.json")
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
        cluster = _cluster_at(report.step, events)
        found.append(_both(planner, sequences, cluster=cluster, cost=cost))
    imbalances, step_s = zip(*found, strict=True)
    return Baseline(
        static=STATIC,
        own=config.plan.strategy,
        steps=tuple(report.step for report in steps),
        imbalances=imbalances,
        step_s=step_s,
    )


def _both(
    planner: RunPlanner, sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel
) -> tuple[Pair, Pair]:
    """Plan and simulate one batch by both strategies; return imbalances of compute and seconds."""
    timelines = []
    for strategy in (STATIC, None):
        plan, programs = planner.plan(sequences, cluster=cluster, cost=cost, strategy=strategy)
        programs = programs or planner.lower(plan, sequences, cluster=cluster)
        timelines.append(planner.simulate(programs, cluster=cluster, cost=cost))
    static, own = timelines
    return (static.imbalance.compute, own.imbalance.compute), (static.iteration_s, own.iteration_s)


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
