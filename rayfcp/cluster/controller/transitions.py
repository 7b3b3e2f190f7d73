"""From one generation of devices to the next: the first one, resizes between steps, recovery from losses."""

from collections.abc import Callable
from dataclasses import dataclass

from rayfcp.cluster.controller.stepping import Stepper
from rayfcp.cluster.recovery.stores import Restorable
from rayfcp.cluster.runtime import Flag
from rayfcp.cluster.workers.calls import RanksLostError
from rayfcp.cluster.workers.cluster_state import Generation
from rayfcp.cluster.workers.facts import RunAbortedError
from rayfcp.elastic.facts import Failure
from rayfcp.telemetry.events import Event, EventKind
from rayfcp.telemetry.live import RunState
from rayfcp.values import ClusterSpec, Decision, InfeasiblePlanError, Move


class StoppedError(Exception):
    """The user stopped the run while no generation could run a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialGeneration:
    """The first generation and the state after `version` steps that it starts from: `found` in memory, else the
    checkpoint that the run resumes from, else initial weights."""

    decision: Decision
    cluster: ClusterSpec
    found: Restorable | None
    version: int


class Transitions:
    """Carries out decisions about devices. Every generation is formed the same way: devices join, take up a state and
    send it to snapshot stores, while planners plan its steps.

    Args:
        began_s: start of the run on `Runtime.now_s`.
    """

    def __init__(
        self,
        stepper: Stepper,
        *,
        stopping: Flag,
        began_s: float,
        log: Callable[[str], None],
    ) -> None:
        self._stepper, self._state = stepper, stepper.cluster_state
        self._saver, self._journal = stepper.saver, stepper.journal
        self.stopping, self._log, self._began_s = stopping, log, began_s
        self._runtime = self._state.worker_group.runtime
        self._lost_steps = 0
        """Finished steps that have to run again, since the last event."""

    def begin(self, initial: InitialGeneration) -> None:
        """Form the first generation, which is not planned for yet.

        Raises:
            RanksLostError: devices were lost meanwhile.
        """
        generation = self._state.form(initial.decision, initial.cluster, empty=initial.found is not None)
        if initial.found is not None:
            self._state.restore(initial.found)
        else:
            self._saver.resume(self._state.worker_group)
        self._set_metrics(generation)
        self._stepper.begin(generation, version=initial.version)
        self._record(EventKind.START, initial.decision, step=initial.version, since_s=self._began_s)

    def at_boundary(self, *, version: int) -> int:
        """Grow, or leave draining nodes, after `version` steps if that is decided. Return the number of steps in the
        state, which is lower if a node went with the newest copies meanwhile.

        Raises:
            RanksLostError: devices were lost meanwhile.
        """
        decision = self._state.decide()
        self._journal.metrics.set_standing_by(len(self._state.worker_group.standby))
        if not decision.devices:
            if self._stepper.is_safe:
                self._state.end_draining_standbys()
            for node in self._state.newly_draining():
                self._log(f"node {node} is draining and nothing can replace it: {decision.reason}; saving")
                self._saver.save_now(version, self._state.worker_group)
            return version
        self._log(decision.reason)
        before, since_s = len(self._state.ids), self._runtime.now_s()
        self._stepper.commit()
        self._saver.finish(self._state.worker_group, metrics=self._journal.metrics)
        self._stepper.copy_state(version)
        cluster = self._state.spec(decision)
        self._stepper.plan_for(cluster, decision.devices, version=version)
        self._state.worker_group.call(lambda _, worker: worker.leave.remote())
        version = self._take_up(decision, cluster, version=version)
        self._record(EventKind.RESIZE, decision, step=version, since_s=since_s, before=before)
        self._count_resize(before)
        return version

    def after_loss(self, error: RanksLostError, *, step: int) -> int:
        """Continue with the devices that are left after a loss, or a failed exchange, in or before `step`. Return the
        number of steps in the recovered state.

        Raises:
            RunAbortedError: too few devices are left, or it happened too often.
            StoppedError: the user stopped the run meanwhile.
        """
        noticed_s = self._runtime.now_s()
        self._journal.metrics.enter(RunState.RECOVERING)
        before = len(self._state.ids)
        self._stepper.broke(step)
        self._saver.abandon()
        while True:
            failure = self._state.on_loss(error)
            try:
                decision, version = self._recover(failure, step=step)
                break
            except RanksLostError as again:
                error = again
        cause = failure.cause.value
        self._record(EventKind.RECOVERY, decision, step=version, since_s=noticed_s, before=before, cause=cause)
        self._journal.metrics.observe_recovery(cause, seconds=self._runtime.now_s() - noticed_s)
        self._count_resize(before)
        return version

    def _count_resize(self, before: int) -> None:
        devices = len(self._state.ids)
        if devices != before:
            self._journal.metrics.count_resize("up" if devices > before else "down")

    def _recover(self, failure: Failure, *, step: int) -> tuple[Decision, int]:
        decision = self._state.await_devices(failure, stopping=self.stopping)
        if decision.what is Move.GIVE_UP:
            raise RunAbortedError(f"{decision.reason}{self._rescue(failure)}")
        if not decision.devices:
            self._rescue(failure)
            raise StoppedError
        self._state.on_recovery(failure)
        self._log(f"step {step}: {decision.reason}")
        cluster = self._state.spec(decision)
        return decision, self._take_up(decision, cluster, version=None)

    def _record(
        self, kind: EventKind, decision: Decision, *, step: int, since_s: float, before: int = 0, cause: str = ""
    ) -> None:
        """Write an event with the steps lost since the last one."""
        lost_steps, self._lost_steps = self._lost_steps, 0
        if lost_steps:
            self._journal.metrics.count_lost_steps(lost_steps)
        event = Event(
            kind=kind,
            step=step,
            at_s=self._runtime.epoch_s(),
            devices=len(self._state.ids),
            devices_before=before,
            seconds=self._runtime.now_s() - since_s,
            lost_steps=lost_steps,
            cause=cause,
            reason=decision.reason,
            cluster=self._state.cluster,
        )
        self._journal.metrics.keep_ranks(event.devices)
        self._journal.record.add_event(event)

    def _rescue(self, failure: Failure) -> str:
        """Save the newest state in memory, if no checkpoint has it, with the devices that are left, too few to
        continue with. Return a clause that says so."""
        found = self._state.newest_state(up_to=self._stepper.last_finished)
        decision = self._state.decide_for_any(failure)
        if found.state is None or found.state.version <= self._saver.saved_step or not decision.devices:
            return ""
        step = found.state.version
        self._log(f"saving step {step} with the {len(decision.devices)} devices that are left")
        try:
            self._state.form(decision, self._state.spec(decision), empty=True)
            self._state.restore(found)
            checkpoint = self._saver.last(step, self._state.worker_group, metrics=self._journal.metrics)
        except (RanksLostError, RunAbortedError, InfeasiblePlanError) as error:
            return f"; step {step} could not be saved: {' '.join(str(error).split())}"
        return f"; step {step} is saved in {checkpoint}"

    def _take_up(self, decision: Decision, cluster: ClusterSpec, *, version: int | None) -> int:
        """Form the decision's generation from the newest state in memory, else from a checkpoint; return the steps in
        it. `version`: the steps that are planned for already."""
        found = self._state.newest_state(up_to=self._stepper.last_finished)
        if found.state is not None and found.state.version != version:
            version = found.state.version
            self._stepper.plan_for(cluster, decision.devices, version=version)
        generation = self._state.form(decision, cluster, empty=found.state is not None)
        if found.state is not None:
            version = found.state.version
            self._state.restore(found)
        else:
            version = self._fall_back(found, decision, cluster)
        self._set_metrics(generation)
        self._lost_steps += max(0, self._stepper.last_finished - version)
        self._stepper.begin(generation, version=version)
        return version

    def _fall_back(self, found: Restorable, decision: Decision, cluster: ClusterSpec) -> int:
        """Load the newest checkpoint, else initial weights, as no state in memory is complete. The copies that are left
        are of steps that run again."""
        self._state.drop_copies()
        version = self._saver.fall_back(self._state.worker_group, metrics=self._journal.metrics)
        source = f"the checkpoint of step {version}" if version else "the beginning, as there is no checkpoint"
        self._log(f"{found.reason}; resuming from {source}")
        self._stepper.plan_for(cluster, decision.devices, version=version)
        return version

    def _set_metrics(self, generation: Generation) -> None:
        metrics = self._journal.metrics
        metrics.set_standing_by(len(self._state.worker_group.standby))
        seconds = max(each.process_group_s for each in generation.joined)
        metrics.set_process_groups(generation.joined[0].process_groups, seconds=seconds)
