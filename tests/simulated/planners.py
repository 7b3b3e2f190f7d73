"""Planners of simulated runs."""

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

from rayfcp.cluster.actors.planner import PlanRecord
from rayfcp.values import ClusterSpec, GlobalBatch, Imbalance
from tests.simulated.schedule import Schedule
from tests.simulated.world import Actor, Deferred

STEP_S = 0.2
"""Step time that plans predict for usual devices."""


class Program(NamedTuple):
    """Stands for a `RankProgram`: place `place` of `num_places` in one step of one generation; `work`: over the mean of
    all ranks."""

    step: int
    generation: int
    place: int
    num_places: int
    plan_hash: str
    work: float
    forward_only: bool = False


class SimulatedPlanner:
    """Makes up a plan in no time; the same for the same arguments."""

    CONCURRENT: frozenset[str] = frozenset()

    def __init__(self, actor: Actor, schedule: Schedule, *, on_plan: Callable[[], None]) -> None:
        self._actor, self._plan_s, self._spread, self._on_plan = actor, schedule.plan_s, schedule.plan_spread, on_plan

    def ready(self) -> None: ...

    def warm_up(self, batch: GlobalBatch) -> None: ...

    def plan(
        self, batch: GlobalBatch, cluster: ClusterSpec, *, cost: Any, search_moves: int, forward_only: bool = False
    ) -> Deferred:
        result = Deferred()
        self._on_plan()
        delay_s = self._plan_s * self._actor.world.random.uniform(1 - self._spread, 1 + self._spread)
        found = planned(batch, cluster, prepare_s=delay_s, forward_only=forward_only)
        self._actor.world.at(delay_s, lambda: result.settle(found), self._actor.process)
        return result

    def simulate_step(self, programs: Any, *, cluster: ClusterSpec, cost: Any) -> tuple[()]:
        return ()


def planned(
    batch: GlobalBatch, cluster: ClusterSpec, *, prepare_s: float, forward_only: bool = False
) -> tuple[Any, ...]:
    """Programs and their record: the slower a rank, the less it has to do."""
    speeds = cluster.speed_of_rank or (1.0,) * cluster.num_ranks
    mean = sum(speeds) / len(speeds)
    work = tuple(each / mean for each in speeds) * cluster.num_stages
    places = cluster.num_stages * cluster.num_ranks
    text = f"{batch.step} {batch.samples_hash} {cluster.generation} {places} {cluster.speed_of_rank} {forward_only}"
    plan_hash = f"{zlib.crc32(text.encode()):08x}"
    record = PlanRecord(
        step=batch.step,
        plan_hash=plan_hash,
        generation=cluster.generation,
        strategy="flex-ring",
        reason="simulated",
        predicted_s=STEP_S / mean,
        gap=1.0,
        degrees={1: cluster.num_ranks},
        num_microbatches=1,
        imbalance=Imbalance(compute=0.0, attention=0.0, memory=0.0, communication=0.0),
        plan_s=0.01,
        prepare_s=prepare_s,
        model_flops=1e9,
        attention_flops=1e8,
        groups=(),
        own_s=tuple(STEP_S * each for each in work),
    )
    programs = tuple(
        Program(
            step=batch.step,
            generation=cluster.generation,
            place=place,
            num_places=places,
            plan_hash=plan_hash,
            work=work[place],
            forward_only=forward_only,
        )
        for place in range(places)
    )
    return programs, record
