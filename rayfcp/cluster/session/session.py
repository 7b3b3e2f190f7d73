"""A session: the devices of a run and the state that they hold, through losses and changes of their number."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from rayfcp.cluster.errors import RunAbortedError, StoppedError
from rayfcp.cluster.runtime import Flag
from rayfcp.cluster.session.devices import Devices
from rayfcp.cluster.session.state import State
from rayfcp.cluster.workers.calls import GroupFailedError, MemoryExhaustedError
from rayfcp.config import ConfigError
from rayfcp.elastic.facts import Failure
from rayfcp.elastic.recoverable import RecoverableState
from rayfcp.execute.reports import DeviceFullError, Joined
from rayfcp.telemetry.events import Event, EventKind
from rayfcp.telemetry.live import RunState
from rayfcp.telemetry.metrics import MetricsExporter
from rayfcp.values import ClusterSpec, Decision, Move

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialGeneration:
    """The first generation and the state after `version` steps that it loads: `found` in memory, else the checkpoint
    that the run resumes from, else initial weights."""

    decision: Decision
    cluster: ClusterSpec
    found: RecoverableState
    version: int


class Job(Protocol[T_co]):
    """What a session runs, one unit (a step, or a batch) after the other. `last_finished`: steps that need not run
    again."""

    last_finished: int

    def plan_for(self, cluster: ClusterSpec, ids: Sequence[str], *, version: int) -> None:
        """Plan what follows `version` for these devices; plans for others are dropped."""

    def begin(self, *, version: int) -> None:
        """Begin a generation that holds the state after `version` steps."""

    def measure(self) -> None:
        """Measure the devices of the first generation; plans are made with what is known then."""

    def is_done(self, version: int) -> bool:
        """True if nothing is left to run with the state after `version` steps."""

    def advance(self, version: int) -> int:
        """Run the next unit; return the number of steps in the state."""

    def finish(self, version: int) -> T_co:
        """End the job, which is done or stopped, and return its result."""

    def stopped(self) -> T_co:
        """Return the result of a job that was stopped without devices."""

    def on_failure(self, version: int) -> int:
        """Take note that the unit after `version` steps failed; return the step that it belongs to."""

    def need_less(self, problem: DeviceFullError) -> bool:
        """Plan with less memory from now on; False if that cannot be done."""


class Session:
    """Runs a job on devices. Every generation is formed the same way: devices join, load a state and copy it, while
    planners plan the job's next steps.

    Args:
        add_event: writes an event of the run.
        began_s: start of the run on `Runtime.now_s`.
    """

    def __init__(
        self,
        devices: Devices,
        state: State,
        *,
        metrics: MetricsExporter,
        add_event: Callable[[Event], None],
        stopping: Flag,
        began_s: float,
        log: Callable[[str], None],
    ) -> None:
        self._devices, self._state, self._workers = devices, state, devices.workers
        self._metrics, self._add_event, self._log = metrics, add_event, log
        self._stopping, self._began_s, self._runtime = stopping, began_s, devices.workers.runtime
        self._lost_steps = 0
        """Finished steps that have to run again, since the last event."""

    def run(self, job: Job[T], initial: InitialGeneration) -> T:
        """Run a job until it is done or stopped. Losses may interrupt the first generation, too."""
        version, is_formed, is_measured = initial.version, False, False
        while True:
            try:
                if not is_formed:
                    is_formed = True  # what fails from here on is recovered from
                    self._begin(job, initial)
                if not is_measured:
                    job.measure()
                    job.plan_for(self._workers.cluster, self._workers.ids, version=version)
                    is_measured = True
                while not job.is_done(version) and not self._stopping.is_set():
                    version = self.at_boundary(job, version=version)
                    version = job.advance(version)
                    self._devices.losses.on_step_finished()
                return job.finish(version)
            except ConfigError as error:  # e.g. data that cannot be read any more
                raise type(error)(f"{error}{self._state.rescue(up_to=job.last_finished)}") from error
            except GroupFailedError as error:
                try:
                    version = self._after_failure(job, error, version=version)
                except StoppedError:
                    return job.stopped()

    def at_boundary(self, job: Job[T], *, version: int) -> int:
        """Grow, or leave draining nodes, after `version` steps if that is decided. Return the number of steps in the
        state, which is lower if a node went with the newest copies meanwhile.

        Raises:
            GroupFailedError: devices were lost meanwhile.
        """
        self._devices.upkeep()
        self._metrics.set_standing_by(len(self._workers.standby))
        if self._devices.are_unchanged:
            return version
        decision = self._devices.next_move()
        if not decision.devices:
            self._stay(decision, version=version)
            return version
        self._log(decision.reason)
        before, since_s = len(self._workers.ids), self._runtime.now_s()
        self._state.before_leaving(version=version)
        cluster = self._devices.spec(decision)
        job.plan_for(cluster, decision.devices, version=version)
        self._workers.call(lambda _, worker: worker.leave.remote())
        version = self._form(job, decision, cluster, version=version)
        self._record(EventKind.RESIZE, decision, step=version, since_s=since_s, before=before)
        return version

    def _begin(self, job: Job[T], initial: InitialGeneration) -> None:
        """Form the first generation, which is not planned for yet."""
        joined = self._devices.form(initial.decision, initial.cluster, empty=initial.found.state is not None)
        self._state.load(initial.found, joined)
        self._start(job, joined, version=initial.version)
        self._record(EventKind.START, initial.decision, step=initial.version, since_s=self._began_s)

    def _stay(self, decision: Decision, *, version: int) -> None:
        """Keep the generation, and do what can be done about nodes that drain."""
        if self._state.is_safe:
            self._devices.end_draining_standbys()
        for node in self._devices.newly_draining():
            saving = self._state.save_now(version=version)
            self._log(f"node {node} is draining and nothing can replace it: {decision.reason}{saving}")

    def _after_failure(self, job: Job[T], error: GroupFailedError, *, version: int) -> int:
        """Continue with the devices that are left after a loss, or a failed exchange. Return the number of steps in the
        recovered state.

        Raises:
            DeviceFullError: a device ran out of memory, and plans that need less were tried.
            RunAbortedError: too few devices are left, or it happened too often.
            StoppedError: the user stopped the run meanwhile.
        """
        noticed_s = error.noticed_s
        if isinstance(error, MemoryExhaustedError) and not job.need_less(error.device_error):
            raise error.device_error
        self._metrics.enter(RunState.RECOVERING)
        before = len(self._workers.ids)
        step = job.on_failure(version)
        self._state.on_failure()
        while True:
            failure = self._devices.on_failure(error)
            try:
                decision, version = self._recover(job, failure, step=step)
                break
            except GroupFailedError as again:
                error = again
        cause = failure.cause.value
        self._record(EventKind.RECOVERY, decision, step=version, since_s=noticed_s, before=before, cause=cause)
        self._metrics.observe_recovery(cause, seconds=self._runtime.now_s() - noticed_s)
        return version

    def _recover(self, job: Job[T], failure: Failure, *, step: int) -> tuple[Decision, int]:
        decision = self._devices.await_devices(failure, stopping=self._stopping)
        if decision.what is Move.GIVE_UP:
            raise RunAbortedError(f"{decision.reason}{self._state.rescue(up_to=job.last_finished)}")
        if not decision.devices:
            self._state.rescue(up_to=job.last_finished)
            raise StoppedError
        self._devices.losses.on_recovery(failure)
        self._state.on_recovery(failure)
        self._log(f"step {step}: {decision.reason}")
        return decision, self._form(job, decision, self._devices.spec(decision), version=None)

    def _form(self, job: Job[T], decision: Decision, cluster: ClusterSpec, *, version: int | None) -> int:
        """Form the decision's generation from the newest state in memory, else from a checkpoint; return the steps in
        it. `version`: the steps in the state that plans are under way for, None if for none yet."""
        found = self._state.newest(up_to=job.last_finished)
        if found.state is not None and found.state.version != version:
            version = found.state.version
            job.plan_for(cluster, decision.devices, version=version)
        joined = self._devices.form(decision, cluster, empty=found.state is not None)
        loaded = self._state.load(found, joined)
        if found.state is None:
            job.plan_for(cluster, decision.devices, version=loaded)
        self._lost_steps += max(0, job.last_finished - loaded)
        self._start(job, joined, version=loaded)
        return loaded

    def _start(self, job: Job[T], joined: Sequence[Joined], *, version: int) -> None:
        metrics = self._metrics
        metrics.set_standing_by(len(self._workers.standby))
        metrics.set("process_groups", joined[0].process_groups)
        metrics.set("process_group_seconds", max(each.process_group_s for each in joined))
        job.begin(version=version)
        self._state.begin(version=version)

    def _record(
        self, kind: EventKind, decision: Decision, *, step: int, since_s: float, before: int = 0, cause: str = ""
    ) -> None:
        """Write an event with the steps lost since the last one; `before`: devices before it, 0 at the start."""
        metrics, devices = self._metrics, len(self._workers.ids)
        lost_steps, self._lost_steps = self._lost_steps, 0
        if lost_steps:
            metrics.count("lost_steps_total", lost_steps)
        if before and devices != before:
            metrics.count("resizes_total", direction="up" if devices > before else "down")
        metrics.keep_ranks(devices)
        event = Event(
            kind=kind,
            step=step,
            at_s=self._runtime.epoch_s(),
            devices=devices,
            devices_before=before,
            seconds=self._runtime.now_s() - since_s,
            lost_steps=lost_steps,
            cause=cause,
            reason=decision.reason,
            cluster=self._workers.cluster,
        )
        self._add_event(event)
