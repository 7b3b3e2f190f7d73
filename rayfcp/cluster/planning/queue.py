"""Planner actors, which may die at any time, and the queue of plans in flight ahead of the step."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rayfcp.cluster.planning.decoders import Decoders
from rayfcp.cluster.planning.planner import PlanRecord
from rayfcp.cluster.runtime import ActorLostError, ActorSpec, CallError, NoAnswerError, Role, Runtime
from rayfcp.cluster.workers.facts import RunAbortedError
from rayfcp.cluster.workers.starting import CapacityError
from rayfcp.config import Config
from rayfcp.config.models import PlanConfig
from rayfcp.data import Sampler
from rayfcp.plan import CostModel
from rayfcp.plan.first import COMPILES, compiles_first
from rayfcp.plan.moves import USUAL_LEVEL, moves_of, next_level
from rayfcp.values import ClusterSpec, GlobalBatch, ModelProfile, Span

MAX_DEATHS = 3
"""Planners that may die in a row without a plan in between; one more ends the run."""

SIMULATE_S = 60.0
"""Time to simulate one step of the trace, compilation included."""


class Planners:
    """`plan.planner_actors` planner actors, which start in the background. One that dies is replaced.

    Each plans `first_batch` on a nominal cluster as soon as it runs, so that kernels are compiled while workers start.
    """

    def __init__(
        self,
        config: Config,
        model: ModelProfile,
        *,
        runtime: Runtime,
        device: str,
        first_batch: GlobalBatch,
        log: Callable[[str], None],
    ) -> None:
        self._config, self._model, self._device, self._log = config, model, device, log
        self.runtime, self._first_batch = runtime, runtime.put(first_batch)
        started = [self._start() for _ in range(config.plan.planner_actors)]
        self._actors = [actor for actor, _ in started]
        self._ready = [ready for _, ready in started]
        if compiles_first(config.plan.strategy):
            log(COMPILES)
        self._deaths = 0

    def await_ready(self) -> None:
        """Wait until all of them run, or have died, in which case the next plan replaces them.

        Raises:
            CapacityError: Ray has no CPU for them beside the workers.
        """
        for ready in self._ready:
            self._await(ready)

    @property
    def options(self) -> PlanConfig:
        """Configured options of planning."""
        return self._config.plan

    def __len__(self) -> int:
        return len(self._actors)

    def __getitem__(self, number: int) -> Any:
        return self._actors[number]

    def on_plan(self) -> None:
        """Note that a plan arrived."""
        self._deaths = 0

    def replace(self, number: int, *, cause: str) -> None:
        """Replace a dead planner, and wait until the new one runs.

        Raises:
            RunAbortedError: too many died in a row.
            CapacityError: Ray has no CPU for it.
        """
        self._deaths += 1
        if self._deaths > MAX_DEATHS:
            raise RunAbortedError(f"{self._deaths} planners died in a row, at most {MAX_DEATHS} may: {cause}")
        self._log(f"planner {number} died; a new one repeats its unfinished plans")
        self.runtime.end(self._actors[number])
        self._actors[number], self._ready[number] = self._start()
        self._await(self._ready[number])

    def end(self) -> None:
        """Kill them by handle."""
        for planner in self._actors:
            self.runtime.end(planner)

    def _start(self) -> tuple[Any, Any]:
        """A planner and a reference that is ready once it runs, before it warms up."""
        actor = self.runtime.start(ActorSpec(role=Role.PLANNER), self._config, self._model, device=self._device)
        ready = actor.ready.remote()
        actor.warm_up.remote(self._first_batch)
        return actor, ready

    def _await(self, ready: Any) -> None:
        timeout_s = self._config.elastic.start_timeout_s
        try:
            self.runtime.get(ready, timeout_s=timeout_s)
        except ActorLostError:
            pass  # the next request for a plan replaces it
        except NoAnswerError as error:
            raise CapacityError(
                f"{len(self)} planners (plan.planner_actors) did not all start within {timeout_s:.0f} s: each needs a "
                "CPU beside the workers' and the controller's; add CPUs or ask for fewer workers"
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A step ready to be dispatched.

    `programs[p x N + r]` references the program of stage p's rank r of N, `pixels` the decoded images of each program,
    empty if none are decoded ahead; `wait_s`: seconds waited for the plan. `level`: of its search
    (`rayfcp.plan.moves`).
    """

    batch: GlobalBatch
    batch_ref: Any
    record: PlanRecord
    level: int
    programs: tuple[Any, ...]
    wait_s: float
    pixels: tuple[Any, ...] = ()


@dataclass(slots=True, kw_only=True)
class _PlanInFlight:
    """A plan requested from planner `number`. `refs`: its record, then its programs; `pixels`: their images, once
    requested."""

    batch: GlobalBatch
    batch_ref: Any
    cost_ref: Any
    number: int
    level: int
    refs: list[Any] = field(default_factory=list)
    pixels: tuple[Any, ...] = ()


class PlanQueue:
    """Keeps `lookahead` plans in flight on the planner actors, in step order, and decodes the images of the first ones
    with `decoders`."""

    def __init__(
        self, planners: Planners, sampler: Sampler, *, lookahead: int, decoders: Decoders | None = None
    ) -> None:
        self._planners, self._sampler, self._lookahead, self._decoders = planners, sampler, lookahead, decoders
        self._runtime = planners.runtime
        self._in_flight: deque[_PlanInFlight] = deque()
        self._next = self._last = self._num_programs = self._num_ranks = 0
        self._cluster: ClusterSpec | None = None
        self._cluster_ref: Any = None
        self._cost_ref: Any = None
        self._level = USUAL_LEVEL

    def start(self, first_step: int, last_step: int, *, cluster: ClusterSpec, cost: CostModel) -> None:
        """Plan steps `[first_step, last_step]` for these ranks, in place of plans in flight for others."""
        self._in_flight.clear()
        self._next, self._last = first_step, last_step
        self._num_programs, self._num_ranks = cluster.num_stages * cluster.num_ranks, cluster.num_ranks
        self._cluster, self._cluster_ref = cluster, self._runtime.put(cluster)
        self._cost_ref = self._runtime.put(cost)
        self.refill()

    def use(self, cost: CostModel, *, cluster: ClusterSpec) -> None:
        """Plan with this cost model, and these speeds of the same ranks, from now on; plans in flight stay valid."""
        self._cost_ref = self._runtime.put(cost)
        if cluster != self._cluster:
            self._cluster, self._cluster_ref = cluster, self._runtime.put(cluster)

    def spend_slack(self, planned: PlannedStep, *, step_s: float) -> None:
        """Search from now on as long as planners have time, given what this plan took, and its step."""
        slack_s = len(self._planners) * step_s
        self._level = next_level(planned.level, plan_s=planned.record.plan_s, slack_s=slack_s)

    def take(self) -> PlannedStep:
        """Take the next step's plan, waiting for it if it is late. A planner that died is replaced, and repeats its
        unfinished plans with the same costs.

        Raises:
            TaskFailedError: the planner failed; its cause is the planner's own error.
            RunAbortedError, CapacityError: too many planners die, or none can be started.
        """
        flight = self._in_flight[0]
        start_s = self._runtime.now_s()
        while True:
            try:
                record = self._runtime.get(flight.refs[0])
                break
            except ActorLostError as error:
                self._planners.replace(flight.number, cause=str(error))
                self._request_again(flight.number)
        self._planners.on_plan()
        self._in_flight.popleft()
        return PlannedStep(
            batch=flight.batch,
            batch_ref=flight.batch_ref,
            record=record,
            level=flight.level,
            programs=tuple(flight.refs[1:]),
            pixels=flight.pixels,
            wait_s=self._runtime.now_s() - start_s,
        )

    def simulate_step(self, programs: Sequence[Any], *, cluster: ClusterSpec, cost: CostModel) -> tuple[Span, ...]:
        """Simulated spans of a step, of whose programs `programs` are references.

        Raises:
            CallError: the planner died, failed, or is not done in time.
        """
        call = self._planners[0].simulate_step.remote(*programs, cluster=cluster, cost=cost)
        found: tuple[Span, ...] = self._runtime.get(call, timeout_s=SIMULATE_S)
        return found

    def refill(self) -> None:
        """Request plans until enough are in flight."""
        while self._next <= self._last and len(self._in_flight) < self._lookahead:
            batch = self._sampler.batch(self._next)
            number = self._next % len(self._planners)
            flight = _PlanInFlight(
                batch=batch,
                batch_ref=self._runtime.put(batch),
                cost_ref=self._cost_ref,
                number=number,
                level=self._level,
            )
            self._request(flight)
            self._in_flight.append(flight)
            self._next += 1
        self._decode_ahead()

    def _decode_ahead(self) -> None:
        """Decode the images of the next steps and no more: pixels take much memory."""
        if self._decoders is None:
            return
        for flight in list(self._in_flight)[: self._decoders.ahead]:
            if not flight.pixels and any(sample.images for sample in flight.batch.samples):
                flight.pixels = self._decoders.request(flight.refs[1:], flight.batch_ref)

    def _request(self, flight: _PlanInFlight) -> None:
        call = self._planners[flight.number].plan.options(num_returns=1 + self._num_programs)
        moves = moves_of(
            self._planners.options,
            num_ranks=self._num_ranks,
            num_sequences=len(flight.batch.samples),
            level=flight.level,
        )
        flight.refs = call.remote(flight.batch_ref, self._cluster_ref, cost=flight.cost_ref, search_moves=moves)
        flight.pixels = ()

    def _request_again(self, number: int) -> None:
        """Repeat the unfinished requests of a planner that died, in order."""
        for flight in self._in_flight:
            if flight.number == number and not self._has_arrived(flight.refs[0]):
                self._request(flight)

    def _has_arrived(self, ref: Any) -> bool:
        """True if a dead planner's plan, or its own error, arrived before its death."""
        try:
            self._runtime.get(ref, timeout_s=0)
        except (ActorLostError, NoAnswerError):
            return False
        except CallError:
            return True
        return True
