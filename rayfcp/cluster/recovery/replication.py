"""When states are copied, on their nodes and to other nodes, and which copies stay."""

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rayfcp.cluster.recovery.intervals import CopyIntervals
from rayfcp.cluster.recovery.stores import CopyStores
from rayfcp.cluster.runtime import CallError, TaskFailedError
from rayfcp.cluster.workers.group import WorkerGroup
from rayfcp.config import Config
from rayfcp.elastic.facts import Failure
from rayfcp.elastic.recoverable import CopiedStates
from rayfcp.execute.reports import DeviceReport
from rayfcp.execute.state.transfer import CopyRemovedError, NoRoomError
from rayfcp.telemetry.metrics import MetricsExporter
from rayfcp.values import KeptStates, StateId
from rayfcp.values.devices import DEVICES

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks at copies that are sent while steps wait for them."""

PAUSE_S = 0.5
"""Before another attempt, while steps wait for it."""


@dataclass(slots=True, kw_only=True)
class _Sending:
    """Copies on their way to other nodes: references of the seconds that each node took, and those that have come.
    `is_failed`: a node could not send; `lacks_room`: since its target has no room; `are_removed`: since somebody has
    removed its copies."""

    refs: list[Any] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    is_failed: bool = False
    lacks_room: bool = False
    are_removed: bool = False


class Replication:
    """Copies of the states of the current generation.

    Each worker copies its shard to the shared memory of its node, from where any process of the node can take it. If
    there are several nodes, their stores send copies to other nodes, now and then, while steps go on.
    """

    def __init__(
        self,
        config: Config,
        worker_group: WorkerGroup,
        *,
        stores: CopyStores,
        version: int,
        metrics: MetricsExporter,
        log: Callable[[str], None],
    ) -> None:
        self._elastic, self._workers, self._stores = config.elastic, worker_group, stores
        self._runtime = worker_group.runtime
        self.states = CopiedStates.start((), generation=-1, first=version)
        self._taken = version
        self.intervals = CopyIntervals(
            config.elastic.snapshot_every_steps,
            is_host=DEVICES[worker_group.device].is_host,
            metrics=metrics,
            log=log,
        )
        self._sending = _Sending()

    @property
    def is_on(self) -> bool:
        return self.intervals.is_on

    @property
    def is_safe(self) -> bool:
        """True if a loss can be recovered from without copies of earlier generations."""
        states, needed = self.states, [self.states.here]
        if self.intervals.sends:
            needed.append(states.away)
        return not self.is_on or all(each is not None and each.generation == states.generation for each in needed)

    def begin(self, *, version: int) -> None:
        """Start a generation that holds the state after `version` steps: it is copied on all nodes, and sent."""
        number = self._workers.cluster.generation
        self._stores.history.begin(number, version=version)
        self.states = self.states.again(self._workers.ids, generation=number, first=version)
        self._sending.refs, self._sending.is_failed = [], False
        self._stores.assign(self._workers.all)
        self._note_assigned()
        self.intervals.show()
        if self.is_on:
            self.copy_now(version)
            self._stores.drop(self.states.kept)
            self._proceed()

    def copy_now(self, version: int) -> None:
        """Make all devices copy the current state, after `version` steps, unless they have."""
        state = StateId(version=version, generation=self.states.generation)
        if self.states.here != state:
            copied = self._workers.call(lambda _, worker: worker.copy_state.remote(state))
            self.states = self.states.after(dict(zip(self._workers.ids, copied, strict=True)))
            self._taken = version

    def copy_again(self, version: int) -> None:
        """Make all devices copy the current state, though they have: copies or stores are lost.

        Raises:
            GroupFailedError: a device is gone.
        """
        self._renew_stores()
        self.states = self.states.without_here()
        self.copy_now(version)

    def order(self, step: int, *, saved: bool = False) -> tuple[StateId | None, KeptStates]:
        """The copy that devices make after `step`, if any, and the states whose copies they keep. `saved`: a checkpoint
        of that state is due."""
        kept = self._kept(step)
        is_due = self.is_on and step - self._taken >= self.intervals.now.here
        if not is_due and not saved:
            return None, kept
        self._taken = step
        return StateId(version=step, generation=self.states.generation), kept

    def _kept(self, step: int) -> KeptStates:
        """States whose copies are needed while `step` runs. Those of checkpoints serve no recovery, and go then."""
        if self.is_on:
            return self.states.kept
        leased = frozenset([self.states.leased] if self.states.leased is not None else [])
        return KeptStates(since=StateId(version=step, generation=self.states.generation), states=leased)

    def lease(self, version: int) -> tuple[StateId, dict[str, list[int]]]:
        """Keep the copies of the state after `version` steps, which were ordered, until `end_lease`, whatever happens
        to the generation. Return the state, and the numbers of the devices of each node that make them."""
        state = StateId(version=version, generation=self.states.generation)
        self.states = replace(self.states, leased=state)
        return state, self._numbers()

    def end_lease(self) -> None:
        """Drop copies that are kept for nothing else."""
        self.states = replace(self.states, leased=None)
        self._stores.drop(self._kept(self._taken + 1))

    def _numbers(self) -> dict[str, list[int]]:
        """Devices of each node."""
        numbers: dict[str, list[int]] = defaultdict(list)
        for number, member in enumerate(self._workers.members):
            numbers[member.facts.node_id].append(number)
        return numbers

    def after_loss(self, failure: Failure) -> None:
        """Take note of a loss, for the intervals."""
        self.intervals.after_loss(failure)

    def after_step(self, devices: Sequence[DeviceReport], *, step_s: float) -> None:
        """Take note of the copies that were made, and send those that are due."""
        copied = {id: report.copied for id, report in zip(self._workers.ids, devices, strict=True)}
        self.states = self.states.after(copied)
        if self.is_on:
            copy_s = max(each.copy_s for each in devices)
            self.intervals.after_step(num_devices=len(devices), step_s=step_s, copy_s=copy_s)
            self._proceed()

    def await_safe(self, step: int) -> None:
        """Wait for copies on other nodes, so that the loss of a node never costs more finished steps than
        `elastic.snapshot_every_steps`; while they find no room there, steps go on without.

        Raises:
            GroupFailedError: a device is gone.
        """
        if not self.is_on:
            return
        if self._sending.is_failed:
            self._renew(step)
        end_s = self._runtime.now_s() + self._elastic.hang_min_s
        while (
            self.intervals.sends
            and not self._sending.lacks_room
            and not self.states.may_dispatch(step, every=self.intervals.now.away)
        ):
            if self._sending.is_failed or self._runtime.now_s() > end_s:
                self._runtime.flag().wait(PAUSE_S)
                self._renew(step)
                end_s = self._runtime.now_s() + self._elastic.hang_min_s
            self._proceed()
            if self._sending.refs:
                self._runtime.wait(self._sending.refs, timeout_s=LOOK_S)
                self._collect()
            elif self.states.to_send(every=self.intervals.now.send) is not None:
                self._stores.await_opened(timeout_s=LOOK_S)
            elif not self._sending.is_failed:
                return  # nothing newer is copied: there was no memory for it

    def _renew_stores(self) -> bool:
        """Replace lost copy stores, on nodes with living workers; return True if there were any.

        Raises:
            GroupFailedError: a device is gone.
        """
        self._workers.call(lambda _, worker: worker.idle.remote())
        self._workers.drop_dead()
        are_lost = self._stores.end_lost()
        self._stores.assign(self._workers.all)
        self._note_assigned()
        return are_lost

    def _note_assigned(self) -> None:
        self.intervals.sends = self._stores.sends(member.facts.node_id for member in self._workers.members)

    def _proceed(self) -> None:
        """Take note of what was sent, and send what is due."""
        if self._sending.refs:
            self._collect()
        if self.intervals.sends and not self._stores.targets_live:
            self.states, self._sending.is_failed = self.states.without_away(), True
        state = self.states.to_send(every=self.intervals.now.send)
        if state is None or self._sending.is_failed or not self.intervals.sends:
            return
        try:
            pushes = self._stores.push(state, self._numbers())
        except CallError as error:
            logger.warning("a copy store cannot be opened: %s", error)
            self._sending.is_failed, pushes = True, None
        if pushes is not None:
            self._sending.refs, self._sending.seconds = pushes, []
            self.states = self.states.sending(state)

    def _collect(self) -> None:
        for ref in self._runtime.wait_all(self._sending.refs, timeout_s=0):
            self._sending.refs.remove(ref)
            try:
                self._sending.seconds.append(self._runtime.get(ref))
            except CallError as error:
                logger.warning("copies of state %s could not be sent: %s", self.states.under_way, error)
                self._sending.is_failed = True
                cause = error.cause if isinstance(error, TaskFailedError) else None
                self._sending.lacks_room = isinstance(cause, NoRoomError)
                self._sending.are_removed = self._sending.are_removed or isinstance(cause, CopyRemovedError)
        if not self._sending.refs and not self._sending.is_failed:
            self.states, self._sending.lacks_room = self.states.sent(), False
            self.intervals.send_s = max(self._sending.seconds, default=0.0)
            self._stores.drop(self.states.kept)

    def _renew(self, step: int) -> None:
        """Replace stores that do not answer, and copies of the state before `step` that were removed. Makes another
        attempt if one failed, or was of such a store.

        Raises:
            GroupFailedError: a device is gone.
        """
        are_lost = self._renew_stores()
        if are_lost or self._sending.is_failed:
            self._sending.refs, self._sending.is_failed = [], False
            self.states = self.states.sending(None)
        if self._sending.are_removed:
            self._sending.are_removed, self.states = False, self.states.without_here()
            self.copy_now(step - 1)
