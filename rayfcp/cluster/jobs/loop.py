"""Training through generations of devices: steps, resizes between them, recovery from losses."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rayfcp.cluster.errors import RunAbortedError, StoppedError
from rayfcp.cluster.facts.costs import StartCosts
from rayfcp.cluster.facts.measured import write_refitted
from rayfcp.cluster.jobs.stepping import Stepper
from rayfcp.cluster.runtime import Flag
from rayfcp.cluster.workers.calls import GroupFailedError, MemoryExhaustedError
from rayfcp.cluster.workers.group import device_peak_flops, passes_of
from rayfcp.config import Config, ConfigError
from rayfcp.elastic.facts import Failure
from rayfcp.elastic.recoverable import RecoverableState
from rayfcp.telemetry.events import Event, EventKind
from rayfcp.telemetry.live import RunState
from rayfcp.values import ClusterSpec, Decision, Move


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A run that reached its last step or was stopped.

    Medians over steps of the controller's own work: `controller_cpu_s`, CPU time of its thread; `controller_s`, wall
    time without waiting for plans and workers.
    """

    last_step: int
    checkpoint: str | None
    controller_s: float = 0.0
    controller_cpu_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialGeneration:
    """The first generation and the state after `version` steps that it starts from: `found` in memory, else the
    checkpoint that the run resumes from, else initial weights."""

    decision: Decision
    cluster: ClusterSpec
    found: RecoverableState | None
    version: int


class TrainingLoop:
    """The steps of a run, from its first generation to its last checkpoint. Every generation is formed the same way:
    devices join, take up a state and send it to snapshot stores, while planners plan its steps.

    Args:
        began_s: start of the run on `Runtime.now_s`.
        announce: logs what comes next; raises `StoppedError` if the run shall not go on.
        only_evaluates: no step is run, the state of the first generation is evaluated.
    """

    def __init__(
        self,
        config: Config,
        stepper: Stepper,
        *,
        initial: InitialGeneration,
        costs: StartCosts,
        stopping: Flag,
        began_s: float,
        log: Callable[[str], None],
        announce: Callable[[str], None],
        only_evaluates: bool = False,
    ) -> None:
        self._last_step = initial.version if only_evaluates else config.train.steps
        self._only_evaluates = only_evaluates
        self._config, self._stepper, self._initial, self._costs = config, stepper, initial, costs
        self._devices, self._saver, self._journal = stepper.devices, stepper.saver, stepper.journal
        self._workers = self._devices.workers
        self._stopping, self._began_s, self._log, self._announce = stopping, began_s, log, announce
        self._runtime = self._workers.runtime
        self._lost_steps = 0
        """Finished steps that have to run again, since the last event."""

    def run(self) -> Finished:
        """Train to the last step, or until stopped, and save. Forming the first generation and measuring it may be
        interrupted by losses like any step."""
        version, formed, measured = self._initial.version, False, False
        self._stepper.go_on_evaluating()
        if self._only_evaluates:
            assert self._stepper.evaluator is not None, "sets were checked"
            self._stepper.evaluator.begin(version, done=lambda _: None)
        while True:
            try:
                if not formed:
                    formed = True
                    self._begin()
                if not measured:
                    self._measure(version)
                    measured = True
                while self._goes_on(version):
                    version = self.at_boundary(version=version)
                    version = self._stepper.advance(version)
                return self._finish(version)
            except ConfigError as error:  # e.g. data that cannot be read any more
                raise type(error)(f"{error}{self._rescue()}") from error
            except GroupFailedError as error:
                try:
                    under_way = version if self._stepper.is_evaluating(version) else version + 1
                    version = self._after_loss(error, step=under_way)
                except StoppedError:
                    return finished(self._saver.saved_step, self._saver.saved)

    def _goes_on(self, version: int) -> bool:
        """True if there is a step or an evaluation to run after `version` steps."""
        left = version < self._last_step or self._stepper.is_evaluating(version)
        return left and not self._stopping.is_set()

    def _begin(self) -> None:
        """Form the first generation, which is not planned for yet."""
        initial = self._initial
        joined = self._devices.form(initial.decision, initial.cluster, empty=initial.found is not None)
        self._saver.resume.check_weights(joined)
        if initial.found is not None:
            self._load(initial.found)
        else:
            self._saver.resume.load(self._workers)
        self._stepper.begin(joined, version=initial.version)
        self._record(EventKind.START, initial.decision, step=initial.version, since_s=self._began_s)

    def _measure(self, version: int) -> None:
        """Plan the steps with costs that are measured now."""
        workers, stepper = self._workers, self._stepper
        cost = self._costs.measure(passes_of(workers), workers.facts, cluster=workers.cluster)
        stepper.use_measured(cost, peak_flops=device_peak_flops(self._config, workers))
        stepper.plan_for(workers.cluster, workers.ids, version=version)
        self._announce("evaluating" if self._only_evaluates else "training")

    def _finish(self, version: int) -> Finished:
        stepper, journal = self._stepper, self._journal
        if stepper.evaluator is not None:
            stepper.evaluator.stop()
        journal.metrics.enter(RunState.SAVING)
        cost = stepper.refit.cost
        if stepper.refit.num_steps and not stepper.recomputes_more:
            write_refitted(self._costs.profile_path, cost, num_steps=stepper.refit.num_steps)
        journal.record.predict(
            lambda programs, cluster: stepper.plans.simulate_step(programs, cluster=cluster, cost=cost)
        )
        if not self._only_evaluates:
            self._announce("saving")
        checkpoint = self._saver.last(version)
        wall_s, cpu_s = zip(*stepper.own_s, strict=True) if stepper.own_s else ((0.0,), (0.0,))
        medians = statistics.median(wall_s), statistics.median(cpu_s)
        return finished(version, checkpoint, controller_s=medians[0], controller_cpu_s=medians[1])

    def at_boundary(self, *, version: int) -> int:
        """Grow, or leave draining nodes, after `version` steps if that is decided. Return the number of steps in the
        state, which is lower if a node went with the newest copies meanwhile.

        Raises:
            GroupFailedError: devices were lost meanwhile.
        """
        self._devices.upkeep()
        self._journal.metrics.set_standing_by(len(self._workers.standby))
        if self._devices.are_unchanged:
            return version
        decision = self._devices.next_move()
        if not decision.devices:
            if self._stepper.replication.is_safe:
                self._devices.end_draining_standbys()
            for node in self._devices.newly_draining():
                self._log(f"node {node} is draining and nothing can replace it: {decision.reason}; saving")
                self._saver.save_now(version)
            return version
        self._log(decision.reason)
        before, since_s = len(self._workers.ids), self._runtime.now_s()
        self._stepper.replication.copy_now(version)
        cluster = self._devices.spec(decision)
        self._stepper.plan_for(cluster, decision.devices, version=version)
        self._workers.call(lambda _, worker: worker.leave.remote())
        version = self._take_up(decision, cluster, version=version)
        self._record(EventKind.RESIZE, decision, step=version, since_s=since_s, before=before)
        return version

    def _after_loss(self, error: GroupFailedError, *, step: int) -> int:
        """Continue with the devices that are left after a loss, or a failed exchange, in or before `step`. Return the
        number of steps in the recovered state.

        Raises:
            DeviceFullError: a device ran out of memory, and plans that need less were tried.
            RunAbortedError: too few devices are left, or it happened too often.
            StoppedError: the user stopped the run meanwhile.
        """
        noticed_s = error.noticed_s
        if isinstance(error, MemoryExhaustedError) and not self._stepper.recompute_more(error.device_error):
            raise error.device_error
        self._journal.metrics.enter(RunState.RECOVERING)
        before = len(self._workers.ids)
        self._stepper.broke(step)
        self._saver.abandon()
        while True:
            failure = self._devices.on_failure(error)
            try:
                decision, version = self._recover(failure, step=step)
                break
            except GroupFailedError as again:
                error = again
        cause = failure.cause.value
        self._record(EventKind.RECOVERY, decision, step=version, since_s=noticed_s, before=before, cause=cause)
        self._journal.metrics.observe_recovery(cause, seconds=self._runtime.now_s() - noticed_s)
        return version

    def _recover(self, failure: Failure, *, step: int) -> tuple[Decision, int]:
        decision = self._devices.await_devices(failure, stopping=self._stopping)
        if decision.what is Move.GIVE_UP:
            raise RunAbortedError(f"{decision.reason}{self._rescue()}")
        if not decision.devices:
            self._rescue()
            raise StoppedError
        self._devices.losses.on_recovery(failure)
        self._stepper.replication.after_loss(failure)
        self._log(f"step {step}: {decision.reason}")
        cluster = self._devices.spec(decision)
        return decision, self._take_up(decision, cluster, version=None)

    def _record(
        self, kind: EventKind, decision: Decision, *, step: int, since_s: float, before: int = 0, cause: str = ""
    ) -> None:
        """Write an event with the steps lost since the last one; `before`: devices before it, 0 at the start."""
        metrics, devices = self._journal.metrics, len(self._workers.ids)
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
        self._journal.record.add_event(event)

    def _rescue(self) -> str:
        """Save the newest state in memory, if no checkpoint has it. Return a clause that says so."""
        found = self._devices.stores.newest_state(self._workers.all, up_to=self._stepper.last_finished)
        if found.state is None or found.state.version <= self._saver.saved_step:
            return ""
        step = found.state.version
        self._log(f"saving step {step} from copies in memory")
        problem = self._saver.rescue(found)
        return (
            f"; step {step} could not be saved: {problem}"
            if problem
            else f"; step {step} is saved in {self._saver.saved}"
        )

    def _load(self, found: RecoverableState) -> None:
        """Make all devices load a state from copies."""
        sources = self._runtime.put(found.copies)
        self._workers.call(lambda _, worker: worker.fill.remote(sources))

    def _take_up(self, decision: Decision, cluster: ClusterSpec, *, version: int | None) -> int:
        """Form the decision's generation from the newest state in memory, else from a checkpoint; return the steps in
        it. `version`: the steps in the state that plans are under way for, None if for none yet."""
        found = self._devices.stores.newest_state(self._workers.all, up_to=self._stepper.last_finished)
        if found.state is not None and found.state.version != version:
            version = found.state.version
            self._stepper.plan_for(cluster, decision.devices, version=version)
        joined = self._devices.form(decision, cluster, empty=found.state is not None)
        self._saver.resume.check_weights(joined)
        if found.state is not None:
            version = found.state.version
            self._load(found)
        else:
            self._devices.stores.drop_copies(self._workers.all)  # those that are left are of steps that run again
            version = self._saver.fall_back()
            source = f"the checkpoint of step {version}" if version else "the beginning, as there is no checkpoint"
            self._log(f"{found.reason}; resuming from {source}")
            self._stepper.plan_for(cluster, decision.devices, version=version)
        self._lost_steps += max(0, self._stepper.last_finished - version)
        self._stepper.begin(joined, version=version)
        return version


def finished(last_step: int, checkpoint: Path | None, **own_s: float) -> Finished:
    """Result of a run whose last checkpoint is this one."""
    return Finished(last_step=last_step, checkpoint=str(checkpoint) if checkpoint else None, **own_s)
