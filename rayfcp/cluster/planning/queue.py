"""Planner actors, which may die at any time, and the queue that keeps plans in flight ahead of the step."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rayfcp.cluster.planning.decoders import Decoders
from rayfcp.cluster.planning.planner import PlanRecord
from rayfcp.cluster.runtime import ActorLostError, ActorSpec, CallError, NoAnswerError, Role, Runtime
from rayfcp.cluster.workers.facts import CannotGoOnError
from rayfcp.cluster.workers.placement import CapacityError
from rayfcp.config import Config
from rayfcp.data import Sampler
from rayfcp.plan import CostModel
from rayfcp.plan.first import COMPILES, compiles_first
from rayfcp.values import ClusterSpec, GlobalBatch, ModelProfile, Span

MAX_DEATHS = 3
"""Planners that may die one after the other without a plan in between; one more ends the run."""

FORETELL_S = 60.0
"""For the simulation of one step of the trace, compiling included."""


class Planners:
    """`plan.planner_actors` planner actors, which start beside whatever else does. One that dies is replaced."""

    def __init__(
        self, config: Config, model: ModelProfile, *, runtime: Runtime, device: str, say: Callable[[str], None]
    ) -> None:
        self._config, self._model, self._device, self._say = config, model, device, say
        self.runtime = runtime
        self._actors = [self._new() for _ in range(config.plan.planner_actors)]
        if compiles_first(config.plan.strategy):
            say(COMPILES)
        self._deaths = 0

    def await_ready(self) -> None:
        """Until all of them run, or have died and are replaced when they are asked for a plan.

        Raises:
            CapacityError: Ray has no CPU for them beside the workers.
        """
        for ready in [planner.ready.remote() for planner in self._actors]:
            self._await(ready)

    def __len__(self) -> int:
        return len(self._actors)

    def __getitem__(self, number: int) -> Any:
        return self._actors[number]

    def worked(self) -> None:
        """A plan came."""
        self._deaths = 0

    def replace(self, number: int, *, cause: str) -> None:
        """Put a new planner in the place of a dead one, and wait until it runs.

        Raises:
            CannotGoOnError: they die again and again.
            CapacityError: Ray has no CPU for it.
        """
        self._deaths += 1
        if self._deaths > MAX_DEATHS:
            raise CannotGoOnError(
                f"{self._deaths} planners died one after the other, at most {MAX_DEATHS} may: {cause}"
            )
        self._say(f"planner {number} died; a new one plans again what it had in hand")
        self.runtime.end(self._actors[number])
        self._actors[number] = self._new()
        self._await(self._actors[number].ready.remote())

    def end(self) -> None:
        """Kill them by handle."""
        for planner in self._actors:
            self.runtime.end(planner)

    def _new(self) -> Any:
        return self.runtime.start(ActorSpec(role=Role.PLANNER), self._config, self._model, device=self._device)

    def _await(self, ready: Any) -> None:
        timeout_s = self._config.elastic.start_timeout_s
        try:
            self.runtime.get(ready, timeout_s=timeout_s)
        except ActorLostError:
            pass  # whoever asks it for a plan has it replaced
        except NoAnswerError as error:
            raise CapacityError(
                f"{len(self)} planners (plan.planner_actors) did not all start within {timeout_s:.0f} s: each needs a "
                "CPU beside the workers' and the controller's; add CPUs or ask for fewer workers"
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A step ready to be dispatched. `programs[p x N + r]` refers to the program of stage p's rank r of N, `pixels` to
    the pictures that they encode, in the same order, none if nobody decodes them ahead; `wait_s` was spent waiting."""

    batch: GlobalBatch
    batch_ref: Any
    record: PlanRecord
    programs: tuple[Any, ...]
    wait_s: float
    pixels: tuple[Any, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Flight:
    """A plan that was asked for, of planner `number`; `refs`: of its record, then of its programs. `pixels`: of their
    pictures, once these were asked for."""

    batch: GlobalBatch
    batch_ref: Any
    cost_ref: Any
    number: int
    refs: list[Any] = field(default_factory=list)
    pixels: tuple[Any, ...] = ()


class PlanQueue:
    """Keeps `lookahead` plans in flight over the planner actors, in step order, and with `decoders` the pictures of the
    first of them."""

    def __init__(
        self, planners: Planners, sampler: Sampler, *, lookahead: int, decoders: Decoders | None = None
    ) -> None:
        self._planners, self._sampler, self._lookahead, self._decoders = planners, sampler, lookahead, decoders
        self._runtime = planners.runtime
        self._flying: deque[_Flight] = deque()

    def start(self, first_step: int, last_step: int, *, cluster: ClusterSpec, cost: CostModel) -> None:
        """Plan `[first_step, last_step]` for these ranks; what was in flight for others is dropped."""
        self._flying.clear()
        self._next, self._last = first_step, last_step
        self._num_programs = cluster.num_stages * cluster.num_ranks
        self._cluster, self._cluster_ref = cluster, self._runtime.put(cluster)
        self._cost_ref = self._runtime.put(cost)
        self.refill()

    def use(self, cost: CostModel, *, cluster: ClusterSpec) -> None:
        """Plan with this cost model and these speeds of the same ranks from now on; plans in flight stay as they are,
        and valid."""
        self._cost_ref = self._runtime.put(cost)
        if cluster != self._cluster:
            self._cluster, self._cluster_ref = cluster, self._runtime.put(cluster)

    def take(self) -> PlannedStep:
        """The next step's plan, waiting for it if it is late. A planner that died is replaced, and plans again with
        the same costs what it had not finished.

        Raises:
            TaskFailedError: the planner failed; its cause is the planner's own error.
            CannotGoOnError, CapacityError: planners die, and none can be started in their place.
        """
        flight = self._flying[0]
        start_s = self._runtime.now_s()
        while True:
            try:
                record = self._runtime.get(flight.refs[0])
                break
            except ActorLostError as error:
                self._planners.replace(flight.number, cause=str(error))
                self._ask_again(flight.number)
        self._planners.worked()
        self._flying.popleft()
        return PlannedStep(
            batch=flight.batch,
            batch_ref=flight.batch_ref,
            record=record,
            programs=tuple(flight.refs[1:]),
            pixels=flight.pixels,
            wait_s=self._runtime.now_s() - start_s,
        )

    def foretell(self, programs: Sequence[Any], *, cluster: ClusterSpec, cost: CostModel) -> tuple[Span, ...]:
        """What a step that was taken, of which `programs` are references, should have been like.

        Raises:
            CallError: it died, failed, or is not done in time.
        """
        call = self._planners[0].foretell.remote(*programs, cluster=cluster, cost=cost)
        found: tuple[Span, ...] = self._runtime.get(call, timeout_s=FORETELL_S)
        return found

    def refill(self) -> None:
        """Submit plans until enough are in flight; call it while workers are busy."""
        while self._next <= self._last and len(self._flying) < self._lookahead:
            batch = self._sampler.batch(self._next)
            number = self._next % len(self._planners)
            flight = _Flight(batch=batch, batch_ref=self._runtime.put(batch), cost_ref=self._cost_ref, number=number)
            self._ask(flight)
            self._flying.append(flight)
            self._next += 1
        self._decode_ahead()

    def _decode_ahead(self) -> None:
        """Decoders have in hand, or made ready, what the next steps encode, and no more: pixels are many bytes."""
        if self._decoders is None:
            return
        for flight in list(self._flying)[: self._decoders.ahead]:
            if not flight.pixels and any(sample.pictures for sample in flight.batch.samples):
                flight.pixels = self._decoders.ask(flight.refs[1:], flight.batch_ref)

    def _ask(self, flight: _Flight) -> None:
        call = self._planners[flight.number].plan.options(num_returns=1 + self._num_programs)
        flight.refs = call.remote(flight.batch_ref, self._cluster_ref, cost=flight.cost_ref)
        flight.pixels = ()

    def _ask_again(self, number: int) -> None:
        """What the planner that died had not finished, in order."""
        for flight in self._flying:
            if flight.number == number and not self._is_there(flight.refs[0]):
                self._ask(flight)

    def _is_there(self, ref: Any) -> bool:
        """Whether a plan of a dead planner, or the planner's own error, arrived before its death."""
        try:
            self._runtime.get(ref, timeout_s=0)
        except (ActorLostError, NoAnswerError):
            return False
        except CallError:
            return True
        return True
