"""Planning on spare CPUs: planner actors, and the queue that keeps plans in flight ahead of the step."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from rayfcp.cluster.layout import strategy_on
from rayfcp.cluster.observing import PlannedGroups, planned_groups
from rayfcp.config import Config
from rayfcp.data import Sampler
from rayfcp.plan import CostModel, attention_flops, imbalance, model_flops, plan_batch
from rayfcp.program import RankProgram, check_progress, lower
from rayfcp.values import ClusterSpec, GlobalBatch, Imbalance, ModelProfile, SequenceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """What the controller needs to know of a plan; the programs go from planner to workers directly.

    `plan_s`: lengths to BatchPlan. `model_flops`, `attention_flops`: forward and backward of the batch.
    `groups`: what the cost model can be refitted from once they were timed.
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


def sequences_of(batch: GlobalBatch) -> tuple[SequenceSpec, ...]:
    """Lengths only; sequence id = position in the batch."""
    return tuple(
        SequenceSpec(id=index, num_tokens=sample.num_tokens, num_targets=sample.num_targets)
        for index, sample in enumerate(batch.samples)
    )


class Planner:
    """Actor that turns global batches into plans and programs."""

    def __init__(self, config: Config, model: ModelProfile) -> None:
        self._config, self._model = config, model

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
        sequences = sequences_of(batch)
        start_s = time.perf_counter()
        plan = plan_batch(
            sequences,
            cluster=cluster,
            cost=cost,
            strategy=strategy_on(self._config, cluster.num_stages),
            options=self._config.plan,
        )
        plan_s = time.perf_counter() - start_s
        programs = lower(plan, sequences, reduce_every=self._config.train.reduce_every)
        check_progress(programs)
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
            imbalance=imbalance(plan, sequences, cost=cost),
            plan_s=plan_s,
            model_flops=model_flops(self._model, sequences),
            attention_flops=attention_flops(self._model, sequences),
            groups=planned_groups(plan, sequences, cluster=cluster),
        )
        return (record, *programs)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A step ready to be dispatched. `programs[p x N + r]` refers to the program of stage p's rank r of N; `wait_s` was
    spent waiting."""

    batch: GlobalBatch
    batch_ref: Any
    record: PlanRecord
    programs: tuple[Any, ...]
    wait_s: float


class PlanQueue:
    """Keeps `lookahead` plans in flight over the planner actors, in step order."""

    def __init__(self, planners: Sequence[Any], sampler: Sampler, *, lookahead: int) -> None:
        self._planners, self._sampler, self._lookahead = list(planners), sampler, lookahead
        self._flying: deque[tuple[GlobalBatch, Any, list[Any]]] = deque()

    def start(self, first_step: int, last_step: int, *, cluster: ClusterSpec, cost: CostModel) -> None:
        """Plan `[first_step, last_step]` for these ranks; what was in flight for others is dropped."""
        self._flying.clear()
        self._next, self._last = first_step, last_step
        self._num_programs = cluster.num_stages * cluster.num_ranks
        self._cluster_ref, self._cost_ref = ray.put(cluster), ray.put(cost)
        self.refill()

    def use(self, cost: CostModel) -> None:
        """Plan with this cost model from now on; plans in flight stay as they are, and valid."""
        self._cost_ref = ray.put(cost)

    def take(self) -> PlannedStep:
        """The next step's plan, waiting for it if it is late.

        Raises:
            RayTaskError: the planner failed; its cause is the planner's own error.
        """
        batch, batch_ref, (record_ref, *programs) = self._flying.popleft()
        start_s = time.perf_counter()
        record = ray.get(record_ref)
        wait_s = time.perf_counter() - start_s
        return PlannedStep(batch=batch, batch_ref=batch_ref, record=record, programs=tuple(programs), wait_s=wait_s)

    def refill(self) -> None:
        """Submit plans until enough are in flight; call it while workers are busy."""
        while self._next <= self._last and len(self._flying) < self._lookahead:
            batch = self._sampler.batch(self._next)
            batch_ref = ray.put(batch)
            planner = self._planners[self._next % len(self._planners)]
            call = planner.plan.options(num_returns=1 + self._num_programs)
            self._flying.append((batch, batch_ref, call.remote(batch_ref, self._cluster_ref, cost=self._cost_ref)))
            self._next += 1
