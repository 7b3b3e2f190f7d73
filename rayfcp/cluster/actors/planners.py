"""Planner actors, which may die at any time: one that dies is replaced, and what was requested from it is repeated."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rayfcp.cluster.errors import CapacityError, RunAbortedError
from rayfcp.cluster.facts.resources import other_cpus
from rayfcp.cluster.runtime import ActorLostError, ActorSpec, CallError, NoAnswerError, Role, Runtime, TaskFailedError
from rayfcp.config import Config
from rayfcp.config.models import PlanConfig
from rayfcp.plan.first import COMPILES, compiles_first
from rayfcp.values import GlobalBatch, ModelProfile

MAX_DEATHS = 3
"""Planners that may die in a row without a plan in between; one more ends the run."""


class PlannerActors:
    """A number of planner actors, which start in the background. One that dies is replaced.

    `start` returns a new actor and a reference that is ready once it runs; `setting` names what asks for so many.
    """

    def __init__(
        self,
        start: Callable[[], tuple[Any, Any]],
        *,
        count: int,
        runtime: Runtime,
        start_timeout_s: float,
        setting: str,
        log: Callable[[str], None],
    ) -> None:
        self.runtime = runtime
        self._start_one, self._start_timeout_s, self._setting, self._log = start, start_timeout_s, setting, log
        started = [start() for _ in range(count)]
        self._actors = [actor for actor, _ in started]
        self._ready = [ready for _, ready in started]
        self._deaths = 0

    def await_ready(self) -> None:
        """Wait until all of them run, or have died, in which case the next plan replaces them.

        Raises:
            CapacityError: Ray has no CPU for them.
        """
        for ready in self._ready:
            self._await(ready)

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
        self._actors[number], self._ready[number] = self._start_one()
        self._await(self._ready[number])

    def end(self) -> None:
        """Kill them by handle."""
        for planner in self._actors:
            self.runtime.end(planner)

    def _await(self, ready: Any) -> None:
        try:
            self.runtime.get(ready, timeout_s=self._start_timeout_s)
        except ActorLostError:
            pass  # the next request for a plan replaces it
        except NoAnswerError as error:
            raise CapacityError(
                f"{len(self)} planners ({self._setting}) did not all start within {self._start_timeout_s:.0f} s: each "
                "needs a CPU beside all else that runs; add CPUs, or ask for fewer workers or planners"
            ) from error


class Planners(PlannerActors):
    """Planner actors of a run, the fewest of `plan.planner_actors` at first.

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
        self._config, self._model, self._device = config, model, device
        self.runtime, self._first_batch = runtime, runtime.put(first_batch)
        self.bounds = config.plan.planner_bounds
        self._added: list[tuple[Any, Any, float]] = []
        """Planners that start while steps run: the actor, a reference that is ready once it has warmed up, and since
        when it starts."""
        super().__init__(
            lambda: self._start()[:2],
            count=self.bounds[0],
            runtime=runtime,
            start_timeout_s=config.elastic.start_timeout_s,
            setting="plan.planner_actors",
            log=log,
        )
        if compiles_first(config.plan.strategy):
            log(COMPILES)

    @property
    def options(self) -> PlanConfig:
        """Configured options of planning."""
        return self._config.plan

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

    def end(self) -> None:
        """Kill them by handle."""
        super().end()
        for planner, _, _ in self._added:
            self.runtime.end(planner)

    def _start(self) -> tuple[Any, Any, Any]:
        """A planner, a reference that is ready once it runs, and one that is ready once it has warmed up."""
        actor = self.runtime.start(ActorSpec(role=Role.PLANNER), self._config, self._model, device=self._device)
        return actor, actor.ready.remote(), actor.warm_up.remote(self._first_batch)


@dataclass(slots=True, kw_only=True, eq=False)
class PlanRequest(ABC):
    """A plan requested from planner `number`, the `actor`. `refs`: of the programs, then of the record that describes
    them, which is ready last."""

    number: int = 0
    actor: Any = None
    refs: list[Any] = field(default_factory=list)

    @abstractmethod
    def call(self, planner: Any) -> list[Any]:
        """Request it from a planner and return its references; any number of times, with the same outcome."""


R = TypeVar("R", bound=PlanRequest)


class PlanRequests(Generic[R]):
    """Requests in flight on planner actors, in order; each goes to the planner with the fewest unfinished ones."""

    def __init__(self, planners: PlannerActors) -> None:
        self._planners, self._runtime = planners, planners.runtime
        self._in_flight: list[R] = []

    def __len__(self) -> int:
        return len(self._in_flight)

    def __iter__(self) -> Iterator[R]:
        return iter(self._in_flight)

    def unfinished(self) -> list[R]:
        """Requests that are not answered yet."""
        answered = set(self._runtime.wait_all([request.refs[-1] for request in self._in_flight], timeout_s=0))
        return [request for request in self._in_flight if request.refs[-1] not in answered]

    def send(self, request: R) -> None:
        """Request one more plan."""
        request.number = self._least_busy()
        self.repeat(request)
        self._in_flight.append(request)

    def repeat(self, request: R) -> None:
        """Request it anew from its planner."""
        request.actor = self._planners[request.number]
        request.refs = request.call(request.actor)

    def wait(self, request: R, *, timeout_s: float | None = None) -> Any:
        """Wait for the record of a request. A planner that died is replaced, and repeats its unfinished requests.

        Raises:
            TaskFailedError: the planner failed; its cause is the planner's own error.
            NoAnswerError: it takes longer than `timeout_s`.
            RunAbortedError, CapacityError: too many planners die, or none can be started.
        """
        while True:
            try:
                found = self._runtime.get(request.refs[-1], timeout_s=timeout_s)
                break
            except (TaskFailedError, NoAnswerError):
                raise
            except CallError as error:  # the planner is lost, or the answer with its node
                if self._planners[request.number] is request.actor:  # others may have replaced it
                    self._planners.replace(request.number, cause=str(error))
                self._repeat_unfinished(request.number)
        self._planners.on_plan()
        return found

    def remove(self, request: R) -> None:
        """Forget a request, finished or not."""
        self._in_flight.remove(request)

    def clear(self) -> None:
        """Forget all."""
        self._in_flight.clear()

    def _least_busy(self) -> int:
        """Number of the planner with the fewest unfinished requests."""
        waiting = Counter(request.number for request in self.unfinished())
        return min(range(len(self._planners)), key=lambda number: waiting[number])

    def _repeat_unfinished(self, number: int) -> None:
        """Repeat the unfinished requests of a planner that died, in order."""
        for request in self._in_flight:
            if request.number == number and not self._has_arrived(request.refs[-1]):
                self.repeat(request)

    def _has_arrived(self, ref: Any) -> bool:
        """True if a dead planner's answer, or its own error, arrived before its death and is not lost."""
        try:
            self._runtime.get(ref, timeout_s=0)
        except TaskFailedError:
            return True
        except CallError:
            return False
        return True
