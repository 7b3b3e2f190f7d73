"""Planner actors, which may die at any time, and the queue of plans in flight ahead of the step. Both grow as measured
times ask (`rayfcp.elastic.lookahead`)."""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from rayfcp.cluster.planning.decoders import Decoders
from rayfcp.cluster.planning.planner import PlanRecord
from rayfcp.cluster.runtime import ActorLostError, ActorSpec, CallError, NoAnswerError, Role, Runtime, TaskFailedError
from rayfcp.cluster.workers.facts import RunAbortedError
from rayfcp.cluster.workers.starting import CapacityError, other_cpus
from rayfcp.config import Config
from rayfcp.config.models import PlanConfig
from rayfcp.elastic.lookahead import Lookahead, PlanningFacts, decide
from rayfcp.plan import CostModel
from rayfcp.plan.first import COMPILES, compiles_first
from rayfcp.plan.moves import USUAL_LEVEL, moves_of, next_level
from rayfcp.values import ClusterSpec, GlobalBatch, ModelProfile, Span

MAX_DEATHS = 3
"""Planners that may die in a row without a plan in between; one more ends the run."""

SIMULATE_S = 60.0
"""Time to simulate one step of the trace, compilation included."""


MEASURED_STEPS = 16
"""Last steps whose times decide on planners and lookahead."""


class Planners:
    """Planner actors, the fewest of `plan.planner_actors` at first, which start in the background. One that dies is
    replaced.

    Each plans `first_batch` on a nominal cluster as soon as it runs, so that kernels are compiled while workers start.
    `bounds`: fewest and most.
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
        self.bounds = config.plan.planner_bounds
        started = [self._start() for _ in range(self.bounds[0])]
        self._actors = [actor for actor, _, _ in started]
        self._ready = [ready for _, ready, _ in started]
        self._added: list[tuple[Any, Any, float]] = []
        """Planners that start while steps run: the actor, a reference that is ready once it has warmed up, and since
        when it starts."""
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

    @property
    def num_starting(self) -> int:
        """Planners that were added and do not plan yet."""
        return len(self._added)

    def room(self) -> int:
        """Return the number of planners that the cluster has CPUs for, beside all workers that the run may have."""
        return int(self.runtime.resources().get("CPU", 0.0)) - other_cpus(self._config)

    def add(self, count: int) -> None:
        """Start so many more, without waiting for them."""
        for _ in range(count):
            actor, _, warm = self._start()
            self._added.append((actor, warm, self.runtime.now_s()))

    def take_added(self) -> None:
        """Use those that have warmed up; if one fails, or does not start in time, no more are added."""
        for each in list(self._added):
            actor, warm, since_s = each
            try:
                self.runtime.get(warm, timeout_s=0)
            except NoAnswerError:
                if self.runtime.now_s() - since_s < self._config.elastic.start_timeout_s:
                    continue
                self._give_up(each, "does not start in elastic.start_timeout_s")
            except CallError as error:
                self._give_up(each, f"does not start: {error}")
            else:
                self._added.remove(each)
                self._actors.append(actor)
                self._ready.append(warm)

    def _give_up(self, added: tuple[Any, Any, float], why: str) -> None:
        self._log(f"one more planner {why}; going on with {len(self)}")
        self._added.remove(added)
        self.runtime.end(added[0])
        self.bounds = (self.bounds[0], len(self) + self.num_starting)

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
        self._actors[number], self._ready[number], _ = self._start()
        self._await(self._ready[number])

    def end(self) -> None:
        """Kill them by handle."""
        for planner in [*self._actors, *(actor for actor, _, _ in self._added)]:
            self.runtime.end(planner)

    def _start(self) -> tuple[Any, Any, Any]:
        """A planner, a reference that is ready once it runs, and one that is ready once it has warmed up."""
        actor = self.runtime.start(ActorSpec(role=Role.PLANNER), self._config, self._model, device=self._device)
        return actor, actor.ready.remote(), actor.warm_up.remote(self._first_batch)

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

    `programs` references those of all stages and ranks, `pixels` the decoded images of each rank, empty if none are
    decoded ahead; `wait_s`: seconds waited for the plan. `level`: of its search (`rayfcp.plan.moves`).
    """

    batch: GlobalBatch
    batch_ref: Any
    record: PlanRecord
    level: int
    programs: Any
    wait_s: float
    pixels: tuple[Any, ...] = ()


@dataclass(slots=True, kw_only=True)
class _PlanInFlight:
    """A plan requested from planner `number`. `refs`: its programs, then its record, which is ready last; `pixels`:
    images of the programs, once requested."""

    batch: GlobalBatch
    batch_ref: Any
    cost_ref: Any
    number: int
    level: int
    refs: list[Any] = field(default_factory=list)
    actor: Any = None
    pixels: tuple[Any, ...] = ()


class Batches(Protocol):
    """Batches by number, from 1: those of steps, or of evaluation sets."""

    def batch(self, step: int, /) -> GlobalBatch: ...


class PlanQueue:
    """Keeps plans in flight on the planner actors, in step order, as many as `lookahead` says, and decodes the images
    of the first ones with `decoders`. `bounds`: fewest and most plans in flight. `forward_only`: of programs without
    backward."""

    def __init__(
        self,
        planners: Planners,
        sampler: Batches,
        *,
        bounds: tuple[int, int],
        decoders: Decoders | None = None,
        forward_only: bool = False,
    ) -> None:
        self._planners, self._sampler, self._bounds, self._decoders = planners, sampler, bounds, decoders
        self._forward_only = forward_only
        self._runtime = planners.runtime
        self.lookahead = Lookahead(planners=len(planners), steps=bounds[0])
        """The last decision on planners and steps ahead."""
        self._measured: deque[tuple[float, float]] = deque(maxlen=MEASURED_STEPS)
        """Seconds to prepare the last steps of these ranks, and of the steps themselves."""
        self._room = 0
        self._in_flight: deque[_PlanInFlight] = deque()
        self._next = self._last = 0
        self._cluster: ClusterSpec | None = None
        self._cluster_ref: Any = None
        self._cost_ref: Any = None
        self._level = USUAL_LEVEL

    def start(self, first_step: int, last_step: int, *, cluster: ClusterSpec, cost: CostModel) -> None:
        """Plan steps `[first_step, last_step]` for these ranks, in place of plans in flight for others."""
        self._in_flight.clear()
        self._measured.clear()
        self._room = self._planners.room()
        self._next, self._last = first_step, last_step
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
        record = planned.record
        slack_s = len(self._planners) * step_s - (record.prepare_s - record.plan_s)
        self._level = next_level(planned.level, plan_s=record.plan_s, slack_s=slack_s)

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
                record = self._runtime.get(flight.refs[-1])
                break
            except TaskFailedError:
                raise
            except CallError as error:  # the planner is lost, or the record with its node
                if self._planners[flight.number] is flight.actor:  # another queue may have replaced it
                    self._planners.replace(flight.number, cause=str(error))
                self._request_again(flight.number)
        self._planners.on_plan()
        self._in_flight.popleft()
        return PlannedStep(
            batch=flight.batch,
            batch_ref=flight.batch_ref,
            record=record,
            level=flight.level,
            programs=flight.refs[0],
            pixels=flight.pixels,
            wait_s=self._runtime.now_s() - start_s,
        )

    def simulate_step(self, programs: Any, *, cluster: ClusterSpec, cost: CostModel) -> tuple[Span, ...]:
        """Simulated spans of a step, of whose programs `programs` is a reference.

        Raises:
            CallError: the planner died, failed, or is not done in time.
        """
        call = self._planners[0].simulate_step.remote(programs, cluster=cluster, cost=cost)
        found: tuple[Span, ...] = self._runtime.get(call, timeout_s=SIMULATE_S)
        return found

    def refill(self) -> None:
        """Request plans until enough are in flight, each from the planner with the fewest unfinished ones."""
        self._planners.take_added()
        while self._next <= self._last and len(self._in_flight) < self.lookahead.steps:
            batch = self._sampler.batch(self._next)
            number = self._least_busy()
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

    def adapt(self, *, prepare_s: float, step_s: float) -> bool:
        """Decide anew on planners and lookahead after a step that was prepared in `prepare_s` and took `step_s`; True
        if that changes them, or whether they keep up."""
        self._measured.append((prepare_s, step_s))
        before = self.lookahead
        facts = PlanningFacts(
            prepare_s=tuple(each for each, _ in self._measured),
            step_s=tuple(each for _, each in self._measured),
            running=len(self._planners),
            starting=self._planners.num_starting,
            lookahead_steps=before.steps,
            room=self._room,
            planner_bounds=self._planners.bounds,
            step_bounds=self._bounds,
            keeps_up=before.keeps_up,
        )
        now = self.lookahead = decide(facts)
        self._planners.add(now.planners - facts.running - facts.starting)
        self.refill()
        return (now.planners, now.steps, now.keeps_up) != (before.planners, before.steps, before.keeps_up)

    def _least_busy(self) -> int:
        """Number of the planner with the fewest requests that are not answered yet."""
        flights = {flight.refs[-1]: flight.number for flight in self._in_flight}
        answered = set(self._runtime.wait_all(list(flights), timeout_s=0))
        waiting = Counter(number for ref, number in flights.items() if ref not in answered)
        return min(range(len(self._planners)), key=lambda number: waiting[number])

    def _decode_ahead(self) -> None:
        """Decode the images of the next steps and no more: pixels take much memory."""
        if self._decoders is None:
            return
        for flight in list(self._in_flight)[: self._decoders.ahead]:
            if not flight.pixels and self._cluster and any(sample.images for sample in flight.batch.samples):
                num_ranks = self._cluster.num_ranks
                flight.pixels = self._decoders.request(flight.refs[0], flight.batch_ref, num_ranks=num_ranks)

    def _request(self, flight: _PlanInFlight) -> None:
        call = self._planners[flight.number].plan.options(num_returns=2)
        moves = moves_of(
            self._planners.options,
            num_ranks=self._cluster.num_ranks if self._cluster else 1,
            num_sequences=len(flight.batch.samples),
            level=flight.level,
        )
        flight.refs = call.remote(
            flight.batch_ref,
            self._cluster_ref,
            cost=flight.cost_ref,
            search_moves=moves,
            forward_only=self._forward_only,
        )
        flight.actor, flight.pixels = self._planners[flight.number], ()

    def _request_again(self, number: int) -> None:
        """Repeat the unfinished requests of a planner that died, in order."""
        for flight in self._in_flight:
            if flight.number == number and not self._has_arrived(flight.refs[-1]):
                self._request(flight)

    def _has_arrived(self, ref: Any) -> bool:
        """True if a dead planner's plan, or its own error, arrived before its death and is not lost."""
        try:
            self._runtime.get(ref, timeout_s=0)
        except TaskFailedError:
            return True
        except CallError:
            return False
        return True
