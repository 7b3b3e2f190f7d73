"""The queue of plans in flight ahead of the step. It and its planners grow as measured times ask
(`rayfcp.elastic.lookahead`)."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from rayfcp.cluster.actors.decoders import Decoders
from rayfcp.cluster.actors.planner import PlanRecord, plan_call
from rayfcp.cluster.actors.pool import ActorPool, Request
from rayfcp.cluster.facts.resources import other_cpus
from rayfcp.cluster.runtime import ActorSpec, Role, Runtime
from rayfcp.config import Config
from rayfcp.elastic.lookahead import Lookahead, PlanningFacts, decide
from rayfcp.plan import CostModel
from rayfcp.plan.first import COMPILES, compiles_first
from rayfcp.plan.moves import USUAL_LEVEL, moves_of, next_level
from rayfcp.values import ClusterSpec, GlobalBatch, ModelProfile, Span

SIMULATE_S = 60.0
"""Time to simulate one step of the trace, compilation included."""

MEASURED_STEPS = 16
"""Last steps whose times decide on planners and lookahead."""

PATIENCE = 20.0
"""Times the slowest of the last plans after which a planner without an answer hangs, but not before
`elastic.start_timeout_s`: its first plan compiles kernels."""


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


@dataclass(slots=True, kw_only=True, eq=False)
class _PlanInFlight:
    """The plan of a batch. `pixels`: decoded images of the programs that `decoded` references, once requested."""

    batch: GlobalBatch
    batch_ref: Any
    level: int
    request: Request
    decoded: Any = None
    pixels: tuple[Any, ...] = ()

    @property
    def programs(self) -> Any:
        return self.request.refs[0]


class Planners(ActorPool):
    """Planner actors of a run, the fewest of `plan.planner_actors` at first.

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
        self._config, self.options = config, config.plan
        batch_ref = runtime.put(first_batch)

        def start() -> tuple[Any, Any, Any]:
            actor = runtime.start(ActorSpec(role=Role.PLANNER), config, model, device=device)
            return actor, actor.ready.remote(), actor.warm_up.remote(batch_ref)

        super().__init__(
            start,
            runtime=runtime,
            count=config.plan.planner_bounds[0],
            setting="plan.planner_actors",
            timeout_s=config.elastic.start_timeout_s,
            log=log,
        )
        if compiles_first(config.plan.strategy):
            log(COMPILES)

    @property
    def bounds(self) -> tuple[int, int]:
        """Fewest and most planners."""
        least, most = self.options.planner_bounds
        return least, int(min(most, self.most))

    def room(self) -> int:
        """Return the number of planners that the cluster has CPUs for, beside all workers that the run may have."""
        return int(self.runtime.resources().get("CPU", 0.0)) - other_cpus(self._config)


class Batches(Protocol):
    """Batches by number, from 1: those of steps, or of evaluation sets."""

    def batch(self, step: int, /) -> GlobalBatch: ...


class PlanQueue:
    """Keeps plans in flight on the planner actors, in step order, as many as `lookahead` says, and decodes the images
    of the first ones with `decoders`. `bounds`: fewest and most plans in flight. `forward_only`: programs have no
    backward passes."""

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
        self._planners.forget(*(each.request for each in self._in_flight))
        self._in_flight.clear()
        self._measured.clear()
        self._room = self._planners.room()
        self._next, self._last = first_step, last_step
        self._cluster, self._cluster_ref = cluster, self._runtime.put(cluster)
        self._cost_ref = self._runtime.put(cost)
        self.refill()

    @property
    def depth(self) -> int:
        """Plans that are requested and not there yet."""
        return len(self._planners.unfinished([each.request for each in self._in_flight]))

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
        """Take the next step's plan, waiting for it if it is late.

        Raises:
            TaskFailedError, RunAbortedError, CapacityError: as `ActorPool.wait`.
        """
        flight = self._in_flight[0]
        start_s = self._runtime.now_s()
        slowest_s = max((prepare_s for prepare_s, _ in self._measured), default=0.0)
        patience_s = max(PATIENCE * slowest_s, self._planners.timeout_s)
        record = self._planners.wait(flight.request, patience_s=patience_s)
        self._planners.forget(flight.request)
        self._in_flight.popleft()
        return PlannedStep(
            batch=flight.batch,
            batch_ref=flight.batch_ref,
            record=record,
            level=flight.level,
            programs=flight.programs,
            pixels=flight.pixels if flight.decoded is flight.programs else (),
            wait_s=self._runtime.now_s() - start_s,
        )

    def simulate_step(self, programs: Any, *, cluster: ClusterSpec, cost: CostModel) -> tuple[Span, ...]:
        """Simulated spans of a step, of whose programs `programs` is a reference.

        Raises:
            CallError: the planner died, failed, or is not done in time.
        """
        (planner,) = self._planners.in_turn(1)
        call = planner.simulate_step.remote(programs, cluster=cluster, cost=cost)
        found: tuple[Span, ...] = self._runtime.get(call, timeout_s=SIMULATE_S)
        return found

    def refill(self) -> None:
        """Request plans until enough are in flight, each from the planner with the fewest unfinished ones."""
        self._planners.take_added()
        while self._next <= self._last and len(self._in_flight) < self.lookahead.steps:
            self._in_flight.append(self._request(self._sampler.batch(self._next)))
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

    def _decode_ahead(self) -> None:
        """Decode the images of the next steps and no more: pixels take much memory."""
        if self._decoders is None:
            return
        for flight in islice(self._in_flight, self._decoders.ahead):
            is_decoded = flight.pixels and flight.decoded is flight.programs
            if not is_decoded and self._cluster and any(sample.images for sample in flight.batch.samples):
                flight.decoded, num_ranks = flight.programs, self._cluster.num_ranks
                flight.pixels = self._decoders.request(flight.decoded, flight.batch_ref, num_ranks=num_ranks)

    def _request(self, batch: GlobalBatch) -> _PlanInFlight:
        assert self._cluster is not None, "the queue was started"
        batch_ref = self._runtime.put(batch)
        moves = moves_of(
            self._planners.options,
            num_ranks=self._cluster.num_ranks,
            num_sequences=len(batch.samples),
            level=self._level,
        )
        given = {"cost": self._cost_ref, "search_moves": moves, "forward_only": self._forward_only}
        plan = plan_call(batch_ref, self._cluster_ref, **given)
        return _PlanInFlight(batch=batch, batch_ref=batch_ref, level=self._level, request=self._planners.send(plan))
