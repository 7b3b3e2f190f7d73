"""The planner actor: from a global batch to checked programs, on a spare CPU; and simulation of a run's steps."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from rayfcp.cluster.controller.observing import TimedGroups, own_seconds, timed_groups
from rayfcp.cluster.planning.measured import BYTES, analytic_cost, without_shards
from rayfcp.cluster.workers.facts import kinds_of_stages, layers_of_stage, strategy_on
from rayfcp.config import Config
from rayfcp.cost.analytic import device_model
from rayfcp.cost.device import measured_hardware
from rayfcp.plan import CostModel, attention_flops, hardware_profile, model_flops, plan_batch
from rayfcp.plan.batch import plan_candidates
from rayfcp.plan.imbalance import imbalance_of, rank_loads
from rayfcp.plan.layout import layouts_of
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
    InfeasiblePlanError,
    LayerKinds,
    Layout,
    ModelProfile,
    SequenceSpec,
    Span,
)
from rayfcp.values.devices import DEVICES


def run_hardware(
    config: Config, model: ModelProfile, *, device: str, cluster: ClusterSpec, cost: CostModel
) -> HardwareProfile:
    """Hardware profile that explains the run's `cost`; the device's named profile if nothing was measured."""
    base, own = hardware_profile(DEVICES[device].base_hardware), device_model(model, cluster.tensor_parallel)
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


def simulate_step(
    programs: Sequence[RankProgram],
    *,
    config: Config,
    model: ModelProfile,
    hardware: HardwareProfile,
    cluster: ClusterSpec,
) -> Timeline:
    """Simulate a step's programs on `run_hardware`."""
    return simulate(
        programs,
        model=device_model(model, cluster.tensor_parallel),
        hardware=hardware,
        node_of_rank=cluster.node_of_rank,
        speed_of_rank=cluster.speed_of_rank,
        layers_of_stage=cluster.layers_of_stage,
        gather_every=config.train.gather_every,
    )


class AutoPlanner:
    """Plans batches by strategy `auto`. The hardware profile is cached while costs and ranks stay the same."""

    def __init__(self, config: Config, model: ModelProfile, *, device: str) -> None:
        self._config, self._model, self._device = config, model, device
        self._hardware: tuple[ClusterSpec, CostModel, HardwareProfile] | None = None

    def choose(self, sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel) -> Choice:
        """Choose the fastest candidate plan by simulation.

        Raises:
            InfeasiblePlanError: no strategy has a plan; names the binding constraint.
        """

        def lowered(plan: BatchPlan) -> tuple[RankProgram, ...]:
            return lower(
                plan,
                sequences,
                reduce_every=self._config.train.reduce_every,
                kinds_of_stage=kinds_of_stages(self._model, cluster),
            )

        def seconds(programs: Sequence[RankProgram]) -> float:
            hardware = self._hardware_of(cluster, cost)
            timeline = simulate_step(
                programs, config=self._config, model=self._model, hardware=hardware, cluster=cluster
            )
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
    """Plan as a planner of the run does, by the configured strategy unless another is named.

    Raises:
        InfeasiblePlanError: there is none; names the binding constraint.
    """
    name = strategy or config.plan.strategy
    if name == AUTO:
        return AutoPlanner(config, model, device=device).choose(sequences, cluster=cluster, cost=cost).plan
    return plan_batch(sequences, cluster=cluster, cost=cost, strategy=name, options=config.plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """Summary of a plan for the controller; the programs go from planner to workers directly.

    `plan_s`: from lengths to BatchPlan, simulation of the candidates of `auto` included. `model_flops`,
    `attention_flops`: forward and backward of the batch. `groups`: groups for refitting the cost model; `own_s`:
    predicted busy seconds of each rank and stage (`own_seconds`).
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
    groups: TimedGroups
    own_s: tuple[float, ...] = ()


def sequences_of(batch: GlobalBatch, *, layer_kinds: LayerKinds = ()) -> tuple[SequenceSpec, ...]:
    """Lengths and images of a batch, for a model with these kinds of layers; sequence id = position in the batch."""
    return tuple(
        SequenceSpec(
            id=index,
            num_tokens=sample.num_tokens,
            num_targets=sample.num_targets,
            layer_kinds=layer_kinds,
            images=sample.images,
        )
        for index, sample in enumerate(batch.samples)
    )


class Planner:
    """Actor that turns global batches into plans and programs."""

    def __init__(self, config: Config, model: ModelProfile, *, device: str) -> None:
        self._config, self._model, self._device = config, model, device
        self._chooser = AutoPlanner(config, model, device=device)

    def ready(self) -> None:
        """Answers once the actor runs."""

    def warm_up(self, batch: GlobalBatch) -> None:
        """Compile the kernels by planning a batch on the ranks that the run may have, with unmeasured costs."""
        layout = self._config.cluster
        num_ranks = max(1, layout.max_workers // (layout.pipeline_stages * layout.tensor_parallel))
        tokens = sum(sample.num_tokens for sample in batch.samples)
        cluster = ClusterSpec(
            num_ranks=num_ranks,
            max_tokens_per_rank=max(1, -(-tokens // num_ranks)),
            num_stages=layout.pipeline_stages,
            tensor_parallel=layout.tensor_parallel,
            layers_of_stage=layers_of_stage(self._config, self._model),
        )
        memory_bytes = hardware_profile(DEVICES[self._device].base_hardware).memory_bytes
        cost = analytic_cost(self._config, self._model, device=self._device, cluster=cluster, memory_bytes=memory_bytes)
        with suppress(InfeasiblePlanError):
            self.plan(batch, cluster, cost=cost)

    def plan(
        self, batch: GlobalBatch, cluster: ClusterSpec, *, cost: CostModel
    ) -> tuple[PlanRecord | RankProgram, ...]:
        """Return the record, then one program per rank of each stage in the order of `lower`, after the progress
        check.

        Raises:
            InfeasiblePlanError: the batch fits no plan; names the binding constraint.
        """
        sequences = sequences_of(batch, layer_kinds=self._model.layer_kinds)
        plan, layouts, programs, plan_s = self._planned(sequences, cluster=cluster, cost=cost)
        check_progress(programs)
        loads = rank_loads(plan, sequences, cost=cost, layouts=layouts)
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
            groups=timed_groups(plan, sequences, cluster=cluster),
            own_s=own_seconds(loads, cost=cost),
        )
        return (record, *programs)

    def _planned(
        self, sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel
    ) -> tuple[BatchPlan, tuple[Layout, ...], tuple[RankProgram, ...], float]:
        """Plan, layouts, programs, and the seconds that planning took."""
        start_s = time.perf_counter()
        strategy = strategy_on(self._config, cluster.num_stages)
        if strategy == AUTO:
            choice = self._chooser.choose(sequences, cluster=cluster, cost=cost)
            plan_s = time.perf_counter() - start_s
            return choice.plan, layouts_of(choice.plan, sequences), choice.programs, plan_s
        plan = plan_batch(sequences, cluster=cluster, cost=cost, strategy=strategy, options=self._config.plan)
        plan_s = time.perf_counter() - start_s
        layouts = layouts_of(plan, sequences)
        programs = lower(
            plan,
            sequences,
            layouts=layouts,
            reduce_every=self._config.train.reduce_every,
            kinds_of_stage=kinds_of_stages(self._model, cluster),
        )
        return plan, layouts, programs, plan_s

    def simulate_step(self, *programs: RankProgram, cluster: ClusterSpec, cost: CostModel) -> tuple[Span, ...]:
        """Simulated spans of a step, from 0."""
        hardware = run_hardware(self._config, self._model, device=self._device, cluster=cluster, cost=cost)
        return simulate_step(programs, config=self._config, model=self._model, hardware=hardware, cluster=cluster).spans
