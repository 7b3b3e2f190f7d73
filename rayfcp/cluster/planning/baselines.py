"""`rayfcp report`: a run's batches planned statically, with the costs that the run measured."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from rayfcp.cluster.dataset import open_dataset
from rayfcp.cluster.planning.measured import read_cost
from rayfcp.cluster.planning.planner import plan_as_run, run_hardware, sequences_of, simulate_step
from rayfcp.cluster.trainer import prepared_data
from rayfcp.cluster.workers.facts import strategy_on
from rayfcp.config import Config, load_config
from rayfcp.plan import CostModel
from rayfcp.program import lower
from rayfcp.simulate import Timeline
from rayfcp.telemetry.baseline import Baseline, Both
from rayfcp.telemetry.events import Event, read_events
from rayfcp.telemetry.steps import read_steps
from rayfcp.values import ClusterSpec, HardwareProfile, ModelProfile, SequenceSpec, StepReport

STATIC = "static-cp"


class NoBaselineError(ValueError):
    """The run directory lacks what a baseline needs; one clear line."""


def baseline_of(run_dir: str | Path, *, num_steps: int, log: Callable[[str], None]) -> Baseline | None:
    """Plan and simulate up to `num_steps` of the run's batches, evenly spread, by `static-cp` and by the run's own
    strategy, on the ranks of that step. None if `num_steps` is 0.

    Both use the final cost model of the run, on devices of equal speed. Batches are drawn again and verified by hash.

    Raises:
        NoBaselineError: a file is missing, or the data is no longer that of the run.
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
    replanner = _Replanner(config, data.model, run_dir=folder)
    found: list[Both] = []
    for report in _spread(reports, num_steps):
        log(f"planning step {report.step} again, statically and by {config.plan.strategy}")
        batch = data.sampler.batch(report.step)
        if batch.samples_hash != report.samples_hash:
            raise NoBaselineError(
                f"step {report.step} of {folder} was trained on other samples than data.paths holds now; keep the data"
            )
        sequences = sequences_of(batch, layer_kinds=data.model.layer_kinds)
        found.append(replanner.both(sequences, step=report.step, cluster=_cluster_at(report.step, events)))
    return Baseline(static=STATIC, own=config.plan.strategy, steps=tuple(found))


class _Replanner:
    """Plans and simulates batches as the run does."""

    def __init__(self, config: Config, model: ModelProfile, *, run_dir: Path) -> None:
        profile = json.loads((run_dir / "profile.json").read_text())
        self._config, self._model, self._device = config, model, str(profile["about"]["device"])
        try:
            self._cost = read_cost(run_dir / "profile.json")
        except ValueError as error:
            raise NoBaselineError(f"{run_dir}/profile.json is of another version: {error}") from error
        self._hardware: dict[ClusterSpec, HardwareProfile] = {}

    def both(self, sequences: Sequence[SequenceSpec], *, step: int, cluster: ClusterSpec) -> Both:
        """One batch by both strategies."""
        own = strategy_on(self._config, cluster.num_stages)
        (before, degree), (after, _) = (self._simulate(each, sequences, cluster=cluster) for each in (STATIC, own))
        return Both(
            step=step,
            before=before.imbalance,
            after=after.imbalance,
            before_s=before.iteration_s,
            after_s=after.iteration_s,
            before_degree=degree,
        )

    def _simulate(
        self, strategy: str, sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec
    ) -> tuple[Timeline, int]:
        """Simulated timeline and the largest CP degree."""
        plan = plan_as_run(
            sequences,
            config=self._config,
            model=self._model,
            device=self._device,
            cluster=cluster,
            cost=self._cost,
            strategy=strategy,
        )
        programs = lower(plan, sequences, reduce_every=self._config.train.reduce_every)
        hardware = self._hardware_of(cluster, self._cost)
        timeline = simulate_step(programs, config=self._config, model=self._model, hardware=hardware, cluster=cluster)
        return timeline, max(plan.degrees, default=1)

    def _hardware_of(self, cluster: ClusterSpec, cost: CostModel) -> HardwareProfile:
        if cluster not in self._hardware:
            self._hardware[cluster] = run_hardware(
                self._config, self._model, device=self._device, cluster=cluster, cost=cost
            )
        return self._hardware[cluster]


def _spread(reports: Sequence[StepReport], num_steps: int) -> list[StepReport]:
    """The first, the last, and others evenly between them."""
    last = len(reports) - 1
    count = min(num_steps, len(reports))
    return [reports[round(at * last / max(count - 1, 1))] for at in range(count)] if count > 1 else [reports[last]]


def _cluster_at(step: int, events: Sequence[Event]) -> ClusterSpec:
    """Ranks that finally ran a step: those of the last event before it, since a step that ran again has a later one."""
    clusters = [event.cluster for event in events if event.cluster is not None and event.step < step]
    if not clusters:
        raise NoBaselineError(f"events.jsonl tells no ranks of step {step}")
    return clusters[-1]
