"""The planner actor: from a global batch to checked programs, on a spare CPU; and the same for previews and reports."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from rayfcp.cluster.facts.devices import kinds_of_stages, layers_of_stage, strategy_on
from rayfcp.cluster.facts.measured import BYTES, analytic_cost, without_shards
from rayfcp.cluster.facts.observing import TimedGroups, own_seconds, timed_groups
from rayfcp.config import Config
from rayfcp.config.models import PlanConfig
from rayfcp.cost.analytic import FORWARD_AND_BACKWARD, device_model
from rayfcp.cost.fit import measured_hardware
from rayfcp.plan import CostModel, attention_flops, hardware_profile, model_flops, plan_batch
from rayfcp.plan.batch import plan_candidates
from rayfcp.plan.imbalance import imbalance_of, rank_loads
from rayfcp.plan.layout import Placement, placements_of
from rayfcp.program import Programs, check_progress, lower
from rayfcp.simulate import Timeline, simulate
from rayfcp.simulate.simulate import choose
from rayfcp.values import (
    BatchPlan,
    ClusterSpec,
    GlobalBatch,
    HardwareProfile,
    Imbalance,
    InfeasiblePlanError,
    LayerKinds,
    ModelProfile,
    SequenceSpec,
    Span,
)
from rayfcp.values.devices import DEVICES


def step_passes(config: Config, model: ModelProfile) -> float:
    """Time of a step over that of its passes forward and backward: a loss of pairs has a pass forward before these."""
    return 1 + 1 / (1 + model.linear_backward) if config.loss.is_of_pairs else 1.0


class RunPlanner:
    """Plans, lowers and simulates batches as a run with this configuration, model and kind of device does."""

    def __init__(self, config: Config, model: ModelProfile, *, device: str) -> None:
        self._config, self._model, self._device = config, model, device
        self._hardware: tuple[ClusterSpec, CostModel, HardwareProfile] | None = None

    def plan(
        self,
        sequences: Sequence[SequenceSpec],
        *,
        cluster: ClusterSpec,
        cost: CostModel,
        strategy: str | None = None,
        search_moves: int | None = None,
        forward_only: bool = False,
    ) -> tuple[BatchPlan, Programs | None]:
        """Plan by the run's strategy on so many stages, or the named one; with the programs if candidates were lowered
        to take the fastest by simulation. `search_moves`: in place of the configured ones.
        `forward_only`: for passes without backward, whose seconds are predicted.

        Raises:
            InfeasiblePlanError: there is no plan; names the binding constraint.
        """
        name, options = strategy or strategy_on(self._config, cluster.num_stages), self._config.plan
        if search_moves is not None:
            options = options.model_copy(update={"search_moves": search_moves})
        given = {"cluster": cluster.forward_only(), "cost": cost.forward_only()} if forward_only else {}
        with_options: dict[str, Any] = {"cluster": cluster, "cost": cost, "options": options} | given
        choice = choose(
            plan_candidates(sequences, strategy=name, **with_options),
            strategy=name,
            lowered=lambda plan: self.lower(plan, sequences, cluster=cluster, forward_only=forward_only),
            seconds=lambda programs: self.simulate(programs, cluster=cluster, cost=cost).iteration_s,
        )
        return choice.plan, choice.programs

    def lower(
        self,
        plan: BatchPlan,
        sequences: Sequence[SequenceSpec],
        *,
        cluster: ClusterSpec,
        placements: Sequence[Placement] | None = None,
        forward_only: bool = False,
    ) -> Programs:
        """Lower a plan; `placements` are its own, if known."""
        return lower(
            plan,
            sequences,
            placements=placements,
            reduce_every=self._config.train.reduce_every,
            kinds_of_stage=kinds_of_stages(self._model, cluster),
            forward_only=forward_only,
        )

    def simulate(self, programs: Programs, *, cluster: ClusterSpec, cost: CostModel) -> Timeline:
        """Simulate a step on hardware that explains `cost`."""
        if self._hardware is None or self._hardware[:2] != (cluster, cost):
            self._hardware = cluster, cost, self._explaining(cost, cluster)
        return simulate(
            programs,
            model=device_model(self._model, cluster.tensor_parallel),
            hardware=self._hardware[2],
            node_of_rank=cluster.node_of_rank,
            speed_of_rank=cluster.speed_of_rank,
            layers_of_stage=cluster.layers_of_stage,
            gather_every=self._config.train.gather_every,
        )

    def _explaining(self, cost: CostModel, cluster: ClusterSpec) -> HardwareProfile:
        """Return hardware that explains `cost`; the device's named profile if nothing was measured."""
        base = hardware_profile(DEVICES[self._device].base_hardware)
        if cost.linear_s_per_token <= 0:
            return base
        own = device_model(self._model, cluster.tensor_parallel)
        hardware = measured_hardware(
            base,
            cost,
            model=own,
            name=self._config.run.name,
            peak_flops=base.peak_flops,
            memory_bytes=base.memory_bytes,
            bytes_per_element=BYTES[self._config.model.dtype],
            num_nodes=len(set(cluster.node_of_rank)) or 1,
        )
        return hardware if cluster.num_stages > 1 else without_shards(hardware, cost, cluster=cluster, model=own)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """Summary of a plan for the controller; the programs go from planner to workers directly.

    `plan_s`: from lengths to BatchPlan, simulation of the candidates of `auto` included. `prepare_s`: from lengths to
    checked programs that are serialized. `predicted_s`: with the forward pass before, where the loss is one of pairs.
    `model_flops`, `attention_flops`: forward and backward of the batch, without that pass. `groups`: groups for
    refitting the cost model; `own_s`: predicted busy seconds of each rank and stage (`own_seconds`).
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
    prepare_s: float
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBatch:
    """A batch that a `BatchPlanner` planned.

    `plan_s`: seconds from sequences to plan; `prepare_s`: to programs that are checked and serialized too, if they are
    asked for. `programs`: a reference of the `rayfcp.program.Programs` of all ranks, None without; they lie on the
    planner's node, and are lost with it. `wait_s`: seconds that the caller waited.
    """

    plan: BatchPlan
    plan_s: float
    prepare_s: float
    programs: Any = None
    wait_s: float = 0.0


class BatchPlanner:
    """Actor that plans batches by what comes with each."""

    def ready(self) -> None:
        """Answers once the actor runs."""

    def plan(
        self,
        sequences: Sequence[SequenceSpec],
        cluster: ClusterSpec,
        *,
        cost: CostModel,
        strategy: str,
        options: PlanConfig | None,
        lowering: Mapping[str, Any] | None,
    ) -> Iterator[PlannedBatch | Programs | None]:
        """Yield programs, None without `lowering`, the options of `lower`; then the plan.

        Raises:
            InfeasiblePlanError, ValueError: as `plan_batch`.
        """
        start_s = time.perf_counter()
        plan = plan_batch(sequences, cluster=cluster, cost=cost, strategy=strategy, options=options)
        plan_s = time.perf_counter() - start_s
        programs = None
        if lowering is not None:
            programs = lower(plan, sequences, **lowering)
            check_progress(programs)
        yield programs
        yield PlannedBatch(plan=plan, plan_s=plan_s, prepare_s=time.perf_counter() - start_s)


def plan_call(batch: Any, cluster: Any, **given: Any) -> Callable[[Any], list[Any]]:
    """Return a function that requests a plan from a planner of either kind, and returns the references of its programs
    and of the value that describes it."""
    return lambda planner: planner.plan.options(num_returns=2).remote(batch, cluster, **given)


class Planner:
    """Actor that turns global batches into plans and programs."""

    def __init__(self, config: Config, model: ModelProfile, *, device: str) -> None:
        self._config, self._model, self._device = config, model, device
        self._run = RunPlanner(config, model, device=device)

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
            for _ in self.plan(batch, cluster, cost=cost):
                pass

    def plan(
        self,
        batch: GlobalBatch,
        cluster: ClusterSpec,
        *,
        cost: CostModel,
        search_moves: int | None = None,
        forward_only: bool = False,
    ) -> Iterator[PlanRecord | Programs]:
        """Yield the programs of all stages and ranks, after the progress check, then the record. `search_moves`: in
        place of the configured ones. `forward_only`: programs without backward, and their seconds and FLOPs.

        Ray serializes and stores each value before it asks for the next one, so that `prepare_s` includes it.

        Raises:
            InfeasiblePlanError: the batch fits no plan; names the binding constraint.
        """
        sequences = sequences_of(batch, layer_kinds=self._model.layer_kinds)
        start_s = time.perf_counter()
        plan, programs = self._run.plan(
            sequences, cluster=cluster, cost=cost, search_moves=search_moves, forward_only=forward_only
        )
        plan_s = time.perf_counter() - start_s
        placements = placements_of(plan, sequences)
        programs = programs or self._run.lower(
            plan, sequences, cluster=cluster, placements=placements, forward_only=forward_only
        )
        check_progress(programs, forward_only=forward_only)
        record = self._record(plan, sequences, cluster=cluster, cost=cost, placements=placements)
        share = 1 / FORWARD_AND_BACKWARD if forward_only else 1.0
        passes = 1.0 if forward_only else step_passes(self._config, self._model)
        record = replace(
            record,
            step=batch.step,
            plan_hash=programs.plan_hash,
            plan_s=plan_s,
            predicted_s=passes * record.predicted_s,
            model_flops=share * record.model_flops,
            attention_flops=share * record.attention_flops,
        )
        yield programs
        yield replace(record, prepare_s=time.perf_counter() - start_s)

    def _record(
        self,
        plan: BatchPlan,
        sequences: Sequence[SequenceSpec],
        *,
        cluster: ClusterSpec,
        cost: CostModel,
        placements: Sequence[Placement],
    ) -> PlanRecord:
        """Summary of a plan, without step and times."""
        loads = rank_loads(plan, sequences, cost=cost, placements=placements)
        return PlanRecord(
            step=0,
            plan_hash=plan.plan_hash,
            generation=plan.generation,
            strategy=plan.strategy,
            reason=plan.reason,
            predicted_s=plan.predicted_s,
            gap=plan.gap,
            degrees=plan.degrees,
            num_microbatches=len(plan.microbatches),
            imbalance=imbalance_of(loads, speed_of_rank=cluster.speed_of_rank),
            plan_s=0.0,
            prepare_s=0.0,
            model_flops=model_flops(self._model, sequences),
            attention_flops=attention_flops(self._model, sequences),
            groups=timed_groups(plan, sequences, cluster=cluster),
            own_s=own_seconds(loads, cost=cost),
        )

    def simulate_step(self, programs: Programs, *, cluster: ClusterSpec, cost: CostModel) -> tuple[Span, ...]:
        """Simulated spans of a step, from 0."""
        return self._run.simulate(programs, cluster=cluster, cost=cost).spans
