"""What the simulator says of a run's steps, with the costs that the run measured.

`auto` in a run: candidates simulated on what the run measured of its devices.

Planning on a spare CPU: the planner actor, from a global batch to checked programs.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rayfcp.cluster.controller.observing import PlannedGroups, own_seconds, planned_groups
from rayfcp.cluster.planning.measured import BASE_HARDWARE, BYTES, without_shards
from rayfcp.cluster.workers.facts import strategy_on, windows_of_stages
from rayfcp.config import Config
from rayfcp.cost.analytic import device_model
from rayfcp.cost.device import measured_hardware
from rayfcp.plan import CostModel, attention_flops, hardware_profile, model_flops, plan_batch
from rayfcp.plan.batch import plan_candidates
from rayfcp.plan.imbalance import imbalance_of, rank_loads
from rayfcp.plan.strategies.registry import AUTO
from rayfcp.program import RankProgram, check_progress, lower
from rayfcp.simulate import Timeline, simulate
from rayfcp.simulate.simulate import Choice, choose
from rayfcp.values import (
    BatchPlan,
    ClusterSpec,
    GlobalBatch,
    HardwareProfile,
    Imbalance,
    ModelProfile,
    SequenceSpec,
    Span,
    Windows,
)


def run_hardware(
    config: Config, model: ModelProfile, *, device: str, cluster: ClusterSpec, cost: CostModel
) -> HardwareProfile:
    """A profile of the run's devices that explains `cost`; the device's named one where costs explain nothing."""
    base, own = hardware_profile(BASE_HARDWARE[device]), device_model(model, cluster.tensor_parallel)
    if cost.linear_s_per_token <= 0:
        return base
    hardware = measured_hardware(
        base,
        cost,
        model=own,
        name=config.run.name,
        peak_flops=base.peak_flops,
        memory_bytes=base.memory_bytes,
        bytes_per_element=BYTES[config.model.dtype],
        num_nodes=len(set(cluster.node_of_rank)) or 1,
    )
    if cluster.num_stages > 1:
        return hardware
    return without_shards(hardware, cost, cluster=cluster, model=own)


def foretell(
    programs: Sequence[RankProgram],
    *,
    config: Config,
    model: ModelProfile,
    hardware: HardwareProfile,
    cluster: ClusterSpec,
) -> Timeline:
    """A step's programs on `run_hardware`."""
    return simulate(
        programs,
        model=device_model(model, cluster.tensor_parallel),
        hardware=hardware,
        node_of_rank=cluster.node_of_rank,
        speed_of_rank=cluster.speed_of_rank,
        layers_of_stage=cluster.layers_of_stage,
        gather_every=config.train.gather_every,
    )


class Chooser:
    """Chooses a plan for one batch after the other. The profile of the devices is kept while costs and ranks stay."""

    def __init__(self, config: Config, model: ModelProfile, *, device: str) -> None:
        self._config, self._model, self._device = config, model, device
        self._hardware: tuple[ClusterSpec, CostModel, HardwareProfile] | None = None

    def choose(self, sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel) -> Choice:
        """The plan to run, by simulation of the best.

        Raises:
            InfeasiblePlanError: no strategy has a plan; names the binding constraint.
        """

        def lowered(plan: BatchPlan) -> tuple[RankProgram, ...]:
            return lower(
                plan,
                sequences,
                reduce_every=self._config.train.reduce_every,
                windows_of_stage=windows_of_stages(self._model, cluster),
            )

        def seconds(programs: Sequence[RankProgram]) -> float:
            hardware = self._hardware_of(cluster, cost)
            timeline = foretell(programs, config=self._config, model=self._model, hardware=hardware, cluster=cluster)
            return timeline.iteration_s

        plans = plan_candidates(sequences, cluster=cluster, cost=cost, options=self._config.plan)
        return choose(plans, lowered=lowered, seconds=seconds)

    def _hardware_of(self, cluster: ClusterSpec, cost: CostModel) -> HardwareProfile:
        if self._hardware is None or self._hardware[:2] != (cluster, cost):
            found = run_hardware(self._config, self._model, device=self._device, cluster=cluster, cost=cost)
            self._hardware = cluster, cost, found
        return self._hardware[2]


def plan_as_run(
    sequences: Sequence[SequenceSpec],
    *,
    config: Config,
    model: ModelProfile,
    device: str,
    cluster: ClusterSpec,
    cost: CostModel,
    strategy: str | None = None,
) -> BatchPlan:
    """The plan that a planner of the run makes, by the configured strategy unless another is named.

    Raises:
        InfeasiblePlanError: there is none; names the binding constraint.
    """
    name = strategy or config.plan.strategy
    if name == AUTO:
        return Chooser(config, model, device=device).choose(sequences, cluster=cluster, cost=cost).plan
    return plan_batch(sequences, cluster=cluster, cost=cost, strategy=name, options=config.plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """What the controller needs to know of a plan; the programs go from planner to workers directly.

    `plan_s`: lengths to BatchPlan, simulation of what `auto` chooses from included. `model_flops`, `attention_flops`:
    forward and backward of the batch.
    `groups`: what the cost model can be refitted from once they were timed; `own_s`: what each rank on each stage
    should take without waiting (`own_seconds`), for `rank_seconds`.
    """

    step: int
    plan_hash: str
    generation: int
    strategy: str
    reason: str
    predicted_s: float
    gap: float
    degrees: dict[int, int]
    num_microbatches: int
    imbalance: Imbalance
    plan_s: float
    model_flops: float
    attention_flops: float
    groups: PlannedGroups
    own_s: tuple[float, ...] = ()


def sequences_of(batch: GlobalBatch, *, windows: Windows = ()) -> tuple[SequenceSpec, ...]:
    """Lengths and pictures, for a model with these kinds of layers; sequence id = position in the batch."""
    return tuple(
        SequenceSpec(
            id=index,
            num_tokens=sample.num_tokens,
            num_targets=sample.num_targets,
            windows=windows,
            pictures=sample.pictures,
        )
        for index, sample in enumerate(batch.samples)
    )


class Planner:
    """Actor that turns global batches into plans and programs."""

    def __init__(self, config: Config, model: ModelProfile, *, device: str) -> None:

        self._config, self._model, self._device = config, model, device
        self._chooser = Chooser(config, model, device=device)

    def ready(self) -> None:
        """Answers once the actor runs."""

    def plan(
        self, batch: GlobalBatch, cluster: ClusterSpec, *, cost: CostModel
    ) -> tuple[PlanRecord | RankProgram, ...]:
        """The record, then one program per rank of each stage, as `lower` orders them; none leaves before the static
        check passed.

        Raises:
            InfeasiblePlanError: the batch fits no plan; names the binding constraint.
        """
        sequences = sequences_of(batch, windows=self._model.windows)
        plan, programs, plan_s = self._planned(sequences, cluster=cluster, cost=cost)
        check_progress(programs)
        loads = rank_loads(plan, sequences, cost=cost)
        record = PlanRecord(
            step=batch.step,
            plan_hash=programs[0].plan_hash,
            generation=plan.generation,
            strategy=plan.strategy,
            reason=plan.reason,
            predicted_s=plan.predicted_s,
            gap=plan.gap,
            degrees=plan.degrees,
            num_microbatches=len(plan.microbatches),
            imbalance=imbalance_of(loads, speed_of_rank=cluster.speed_of_rank),
            plan_s=plan_s,
            model_flops=model_flops(self._model, sequences),
            attention_flops=attention_flops(self._model, sequences),
            groups=planned_groups(plan, sequences, cluster=cluster),
            own_s=own_seconds(loads, cost=cost),
        )
        return (record, *programs)

    def _planned(
        self, sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel
    ) -> tuple[BatchPlan, tuple[RankProgram, ...], float]:
        """The plan, its programs, and the seconds that planning took."""
        start_s = time.perf_counter()
        strategy = strategy_on(self._config, cluster.num_stages)
        if strategy == AUTO:
            choice = self._chooser.choose(sequences, cluster=cluster, cost=cost)
            return choice.plan, choice.programs, time.perf_counter() - start_s
        plan = plan_batch(sequences, cluster=cluster, cost=cost, strategy=strategy, options=self._config.plan)
        plan_s = time.perf_counter() - start_s
        programs = lower(
            plan,
            sequences,
            reduce_every=self._config.train.reduce_every,
            windows_of_stage=windows_of_stages(self._model, cluster),
        )
        return plan, programs, plan_s

    def foretell(self, *programs: RankProgram, cluster: ClusterSpec, cost: CostModel) -> tuple[Span, ...]:
        """What the simulator says each rank does in a step, from 0."""

        hardware = run_hardware(self._config, self._model, device=self._device, cluster=cluster, cost=cost)
        return foretell(programs, config=self._config, model=self._model, hardware=hardware, cluster=cluster).spans
