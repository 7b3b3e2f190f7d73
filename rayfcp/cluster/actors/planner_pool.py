"""Planner actors for the driver of another trainer: it submits batches ahead of time and takes their plans."""

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rayfcp.cluster.actors.planner import PlannedBatch, plan_call
from rayfcp.cluster.actors.pool import START_TIMEOUT_S, ActorPool, Request
from rayfcp.cluster.runtime import ActorSpec, NoAnswerError, Role, Runtime, TaskFailedError
from rayfcp.cluster.runtime.on_ray import RayRuntime
from rayfcp.config.models import PlanConfig
from rayfcp.plan import CostModel
from rayfcp.plan.first import COMPILES, compiles_first
from rayfcp.plan.strategies.registry import get
from rayfcp.telemetry.metrics import MetricsExporter, RunSeries
from rayfcp.values import ClusterSpec, SequenceSpec

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """A submitted batch, until its plan is taken. `sequences` is a reference."""

    sequences: Any
    request: Request
    answer: PlannedBatch | Exception | None = None


class PlannerPool:
    """Planner actors that plan batches ahead of the step, for drivers of other trainers. Any process connected to Ray
    may have one, an actor or task too; where Ray is not initialized, it is as by `ray.init()`.

    A plan has the bytes that `rayfcp.plan_batch` returns for the same sequences, cluster, cost, strategy and options. A
    planner that dies is replaced and repeats its unfinished batches. The pool is used by one thread, and as a context
    manager leaves no actor behind.

    Args:
        cluster: Ranks of the plans, and their token budget.
        cost: Time model of the plans.
        strategy: As of `plan_batch`.
        options: Search bounds of the strategy, as of `plan_batch`.
        num_planners: Actors, each with one CPU of Ray.
        lookahead: Most batches that may be submitted and not planned yet.
        programs: Whether planners also lower each plan to the programs of all ranks and check these, which takes
            sequences whose ids are their places.
        reduce_every: Of `rayfcp.lower`, for the programs.
        run: Label of the metrics.
        run_dir: Directory for the discovery files of an endpoint for Prometheus; none is opened without. Ray's own
            endpoint has the metrics in any case.
        start_timeout_s: Time for the planners to start.

    Raises:
        ValueError: no such strategy, or a bound that is too low.
        CapacityError: Ray has no CPUs for the planners.

    Example:
        >>> with rayfcp.PlannerPool(cluster=cluster, cost=cost) as pool:  # doctest: +SKIP
        ...     for planned in pool.map(batches):
        ...         train(planned.plan)
    """

    def __init__(
        self,
        *,
        cluster: ClusterSpec,
        cost: CostModel,
        strategy: str = "flex-ring",
        options: PlanConfig | None = None,
        num_planners: int = 2,
        lookahead: int = 4,
        programs: bool = False,
        reduce_every: str = "step",
        run: str = "planner-pool",
        run_dir: str | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        _check(strategy, num_planners=num_planners, lookahead=lookahead)
        self._runtime: Runtime = RayRuntime()
        self._cluster, self._cost, self._lookahead, self._closed = cluster, cost, lookahead, False
        self._series = _series(run, run_dir=run_dir, runtime=self._runtime)
        lowering = {"reduce_every": reduce_every} if programs else None
        self._options = {"strategy": strategy, "options": options, "lowering": lowering}
        self._share_facts()
        self._planners = ActorPool(
            self._start, runtime=self._runtime, count=num_planners, setting="num_planners", timeout_s=start_timeout_s
        )
        self._tickets: list[Ticket] = []
        try:
            self._planners.await_ready()
        except BaseException:
            self.close()
            raise
        self._series.set("planners", num_planners)

    def submit(self, sequences: Sequence[SequenceSpec], *, timeout_s: float | None = None) -> Ticket:
        """Have a batch planned. Blocks while `lookahead` batches are not planned yet.

        Raises:
            TimeoutError: it blocks longer than `timeout_s`; 0 does not block.
            RunAbortedError, CapacityError: planners died one after the other, or none can be started.
        """
        self._check_open()
        self._await_room(timeout_s)
        ref = self._runtime.put(tuple(sequences))
        ticket = Ticket(sequences=ref, request=self._request(ref))
        self._tickets.append(ticket)
        self._show_depth()
        return ticket

    def result(self, ticket: Ticket, *, timeout_s: float | None = None) -> PlannedBatch:
        """Take the plan of a submitted batch, waiting for it; in any order, each once.

        Raises:
            InfeasiblePlanError, ValueError: the batch has no plan, as `plan_batch` raises them.
            TimeoutError: it takes longer than `timeout_s`; the batch can still be taken later.
            RunAbortedError, CapacityError: planners died one after the other, or none can be started.
        """
        self._check_open()
        if ticket not in self._tickets:
            raise ValueError("the ticket is of a batch that was taken already, or of another pool; submit the batch")
        start_s = self._runtime.now_s()
        if ticket.answer is None and not self._settle(ticket, timeout_s=timeout_s):
            raise TimeoutError(f"the batch is not planned within {timeout_s} s; take it later")
        self._remove(ticket)
        self._show_depth()
        answer = ticket.answer
        if not isinstance(answer, PlannedBatch):
            assert answer is not None, "settled"
            raise answer
        wait_s = self._runtime.now_s() - start_s
        for name, value in (("plan", answer.plan_s), ("prepare", answer.prepare_s), ("plan_wait", wait_s)):
            self._series.set(f"{name}_seconds", value)
        programs = ticket.request.refs[0] if self._options["lowering"] else None
        return replace(answer, programs=programs, wait_s=wait_s)

    def map(self, batches: Iterable[Sequence[SequenceSpec]]) -> Iterator[PlannedBatch]:
        """Plans of batches, in order. `lookahead` batches are taken from `batches` ahead of the one that is yielded.

        Raises:
            InfeasiblePlanError, ValueError, RunAbortedError, CapacityError: as `result`.
        """
        ahead: deque[Ticket] = deque()
        try:
            for sequences in batches:
                done = self.result(ahead.popleft()) if len(ahead) == self._lookahead else None
                ahead.append(self.submit(sequences))
                if done is not None:
                    yield done
            while ahead:
                yield self.result(ahead.popleft())
        finally:
            for ticket in ahead:  # after an error, or a consumer that stopped early
                if ticket in self._tickets:
                    self._remove(ticket)

    def update(self, *, cluster: ClusterSpec | None = None, cost: CostModel | None = None) -> None:
        """Plan with this cluster and this cost model from now on, those batches included whose result was not taken
        yet: they are planned again."""
        self._check_open()
        self._cluster, self._cost = cluster or self._cluster, cost or self._cost
        self._share_facts()
        for ticket in self._tickets:
            self._planners.forget(ticket.request)
            ticket.request, ticket.answer = self._request(ticket.sequences), None
        self._show_depth()

    def close(self) -> None:
        """End planners and metrics; batches in flight are lost. Idempotent."""
        if not self._closed:
            self._closed = True
            self._planners.end()
            self._series.close()

    @property
    def target(self) -> str | None:
        """HOST:PORT of the endpoint for Prometheus, None without `run_dir`."""
        return self._series.target if isinstance(self._series, MetricsExporter) else None

    def __enter__(self) -> "PlannerPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> tuple[Any, Any, Any]:
        actor = self._runtime.start(ActorSpec(role=Role.BATCH_PLANNER))
        ready = actor.ready.remote()
        return actor, ready, ready

    def _share_facts(self) -> None:
        """Store what all batches are planned with once."""
        self._cluster_ref, self._cost_ref = self._runtime.put(self._cluster), self._runtime.put(self._cost)

    def _request(self, sequences: Any) -> Request:
        given = self._options | {"cost": self._cost_ref}
        return self._planners.send(plan_call(sequences, self._cluster_ref, **given))

    def _remove(self, ticket: Ticket) -> None:
        self._tickets.remove(ticket)
        self._planners.forget(ticket.request)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the planner pool is closed; make another one")

    def _unplanned(self) -> list[Ticket]:
        return [ticket for ticket in self._tickets if ticket.answer is None]

    def _await_room(self, timeout_s: float | None) -> None:
        until_s = None if timeout_s is None else self._runtime.now_s() + timeout_s
        while len(waiting := self._unplanned()) >= self._lookahead:
            left_s = None if until_s is None else max(0.0, until_s - self._runtime.now_s())
            ready = set(self._runtime.wait([ticket.request.refs[-1] for ticket in waiting], timeout_s=left_s))
            if not ready:
                raise TimeoutError(
                    f"lookahead is {self._lookahead}, and as many batches are not planned within {timeout_s} s; wait "
                    "longer, or raise num_planners"
                )
            for ticket in waiting:
                if ticket.request.refs[-1] in ready:
                    self._settle(ticket, timeout_s=0)

    def _settle(self, ticket: Ticket, *, timeout_s: float | None) -> bool:
        """Set the answer of a ticket if it comes in time; whether it does."""
        try:
            ticket.answer = self._planners.wait(ticket.request, timeout_s=timeout_s)
        except TaskFailedError as error:
            ticket.answer = error.cause
        except NoAnswerError:
            return False
        return True

    def _show_depth(self) -> None:
        self._series.set(
            "plan_queue_depth", len(self._planners.unfinished([ticket.request for ticket in self._tickets]))
        )


def _check(strategy: str, *, num_planners: int, lookahead: int) -> None:
    get(strategy)  # raises for an unknown one
    if num_planners < 1:
        raise ValueError(f"num_planners is {num_planners}, must be at least 1; raise it")
    if lookahead < num_planners:
        raise ValueError(
            f"lookahead is {lookahead}, must be at least num_planners ({num_planners}), or planners idle; raise it"
        )
    if compiles_first(strategy):
        logger.warning(COMPILES)


def _series(run: str, *, run_dir: str | None, runtime: Runtime) -> RunSeries | MetricsExporter:
    mirror = runtime.mirror()
    return RunSeries(run, mirror=mirror) if run_dir is None else MetricsExporter(run, run_dir=run_dir, mirror=mirror)
