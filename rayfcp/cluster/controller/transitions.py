"""From one generation of devices to the next: the first one, resizes between steps, recovery from losses."""

from collections.abc import Callable
from dataclasses import dataclass

from rayfcp.cluster.checkpoints.saving import Saver
from rayfcp.cluster.controller.reporting import Journal
from rayfcp.cluster.controller.stepping import Stepper
from rayfcp.cluster.recovery.losses import RanksLostError
from rayfcp.cluster.recovery.restoring import Restorable
from rayfcp.cluster.runtime import Flag
from rayfcp.cluster.workers.facts import CannotGoOnError
from rayfcp.cluster.workers.fleet import Fleet, Formed
from rayfcp.elastic.facts import Failure
from rayfcp.telemetry.events import Event, EventKind
from rayfcp.telemetry.live import State
from rayfcp.values import ClusterSpec, Decision, InfeasiblePlanError, Move


class StoppedError(Exception):
    """The user asked for an end while there was no generation that could run a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class First:
    """What the first generation is to be, and the state after `version` steps that it takes up: `found` in memory, else
    the checkpoint that the run goes on from, else first weights."""

    decision: Decision
    cluster: ClusterSpec
    found: Restorable | None
    version: int


class Transitions:
    """Carries decisions out. A generation is formed the same way whatever came before: devices meet, take up a state,
    hand it to keepers; it is planned for meanwhile. `began_s`: when the run did, on `Runtime.now_s`."""

    def __init__(
        self,
        fleet: Fleet,
        stepper: Stepper,
        *,
        saver: Saver,
        journal: Journal,
        stopping: Flag,
        began_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._fleet, self._stepper, self._saver, self._journal = fleet, stepper, saver, journal
        self._stopping, self._say, self._began_s = stopping, say, began_s
        self._runtime = fleet.crew.runtime
        self._lost_steps = 0
        """Finished steps that have to run again, since the last event."""

    def begin(self, first: First) -> None:
        """The first generation; it is not planned for yet.

        Raises:
            RanksLostError: a device was lost meanwhile.
        """
        formed = self._fleet.form(first.decision, first.cluster, empty=first.found is not None)
        if first.found is not None:
            self._fleet.fill(first.found)
        else:
            self._saver.resume(self._fleet.crew)
        self._note(formed)
        self._stepper.begin(formed, version=first.version)
        self._happened(EventKind.START, first.decision, step=first.version, since_s=self._began_s)

    def at_boundary(self, *, version: int) -> int:
        """After `version` steps: grow, or leave nodes that are about to go, where that is decided. How many steps the
        state has then: fewer, if a node went with the newest copies meanwhile.

        Raises:
            RanksLostError: a device was lost meanwhile.
        """
        decision = self._fleet.decide()
        self._journal.metrics.set_standing_by(len(self._fleet.crew.waiting))
        if not decision.devices:
            if self._stepper.is_safe:
                self._fleet.end_leaving()
            for node in self._fleet.leaves_soon():
                self._say(f"node {node} is about to go and nothing can replace it: {decision.reason}; saving")
                self._saver.save_now(version, self._fleet.crew)
            return version
        self._say(decision.reason)
        before, since_s = len(self._fleet.ids), self._runtime.now_s()
        self._stepper.commit()
        self._saver.finish(self._fleet.crew, metrics=self._journal.metrics)
        self._stepper.copy_state(version)
        cluster = self._fleet.spec(decision)
        self._stepper.plan_for(cluster, decision.devices, version=version)
        self._fleet.leave()
        version = self._take_up(decision, cluster, version=version)
        self._happened(EventKind.RESIZE, decision, step=version, since_s=since_s, before=before)
        self._count_resize(before)
        return version

    def after_loss(self, error: RanksLostError, *, step: int) -> int:
        """Devices were lost, or an exchange failed, while `step` was under way or before it: go on with what is left.
        How many steps the state has.

        Raises:
            CannotGoOnError: too little is left, or it happened too often.
            StoppedError: the user asked for an end meanwhile.
        """
        noticed_s = self._runtime.now_s()
        self._journal.metrics.enter(State.RECOVERING)
        before = len(self._fleet.ids)
        self._stepper.broke(step)
        self._saver.abandon()
        while True:
            failure = self._fleet.count_loss(error)
            try:
                decision, version = self._go_on(failure, step=step)
                break
            except RanksLostError as again:
                error = again
        self._happened(
            EventKind.RECOVERY,
            decision,
            step=version,
            since_s=noticed_s,
            before=before,
            cause=failure.cause.value,
        )
        self._journal.metrics.observe_recovery(failure.cause.value, seconds=self._runtime.now_s() - noticed_s)
        self._count_resize(before)
        return version

    def _count_resize(self, before: int) -> None:
        devices = len(self._fleet.ids)
        if devices != before:
            self._journal.metrics.count_resize("up" if devices > before else "down")

    def _go_on(self, failure: Failure, *, step: int) -> tuple[Decision, int]:
        decision = self._fleet.await_devices(failure, stopping=self._stopping)
        if decision.what is Move.GIVE_UP:
            raise CannotGoOnError(f"{decision.reason}{self._rescue(failure)}")
        if not decision.devices:
            self._rescue(failure)
            raise StoppedError
        self._fleet.went_on(failure)
        self._say(f"step {step}: {decision.reason}")
        cluster = self._fleet.spec(decision)
        return decision, self._take_up(decision, cluster, version=None)

    def _happened(
        self,
        kind: EventKind,
        decision: Decision,
        *,
        step: int,
        since_s: float,
        before: int = 0,
        cause: str = "",
    ) -> None:
        """Write it down, with the steps that were lost; the gauge of devices in use changes with it."""
        lost_steps, self._lost_steps = self._lost_steps, 0
        if lost_steps:
            self._journal.metrics.count_lost_steps(lost_steps)
        event = Event(
            kind=kind,
            step=step,
            at_s=self._runtime.epoch_s(),
            devices=len(self._fleet.ids),
            devices_before=before,
            seconds=self._runtime.now_s() - since_s,
            lost_steps=lost_steps,
            cause=cause,
            reason=decision.reason,
            cluster=self._fleet.cluster,
        )
        self._journal.metrics.keep_ranks(event.devices)
        self._journal.record.happened(event)

    def _rescue(self, failure: Failure) -> str:
        """Before the end: those who are left, too few to go on, save the newest state in memory if no checkpoint has
        it. A clause that says so."""
        found, decision = self._fleet.newest(up_to=self._stepper.last_finished), self._fleet.decide_for_any(failure)
        if found.state is None or found.state.version <= self._saver.saved_step or not decision.devices:
            return ""
        self._say(f"saving step {found.state.version} with the {len(decision.devices)} devices that are left")
        try:
            self._fleet.form(decision, self._fleet.spec(decision), empty=True)
            self._fleet.fill(found)
            checkpoint = self._saver.last(found.state.version, self._fleet.crew, metrics=self._journal.metrics)
        except (RanksLostError, CannotGoOnError, InfeasiblePlanError) as error:
            return f"; step {found.state.version} could not be saved: {' '.join(str(error).split())}"
        return f"; step {found.state.version} is saved in {checkpoint}"

    def _take_up(self, decision: Decision, cluster: ClusterSpec, *, version: int | None) -> int:
        """Form the decision's generation and give it the newest state that there is; `version`, where it is known and
        planned for."""
        found = self._fleet.newest(up_to=self._stepper.last_finished)
        if found.state is not None and found.state.version != version:
            version = found.state.version
            self._stepper.plan_for(cluster, decision.devices, version=version)
        formed = self._fleet.form(decision, cluster, empty=found.state is not None)
        if found.state is not None:
            self._fleet.fill(found)
        else:
            version = self._fall_back(found, decision, cluster)
        assert version is not None
        self._note(formed)
        self._lost_steps += max(0, self._stepper.last_finished - version)
        self._stepper.begin(formed, version=version)
        return version

    def _fall_back(self, found: Restorable, decision: Decision, cluster: ClusterSpec) -> int:
        """No state has all its shards: the newest checkpoint, or the first weights. What copies are left of are of
        steps that run again."""
        self._fleet.forget_copies()
        version = self._saver.fall_back(self._fleet.crew, metrics=self._journal.metrics)
        whence = f"the checkpoint of step {version}" if version else "the beginning, for there is no checkpoint"
        self._say(f"{found.reason}; going on from {whence}")
        self._stepper.plan_for(cluster, decision.devices, version=version)
        return version

    def _note(self, formed: Formed) -> None:
        metrics = self._journal.metrics
        metrics.set_standing_by(len(self._fleet.crew.waiting))
        seconds = max(each.process_group_s for each in formed.joined)
        metrics.set_process_groups(formed.joined[0].process_groups, seconds=seconds)
