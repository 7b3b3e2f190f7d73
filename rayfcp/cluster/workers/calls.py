"""Calls of all devices at once: their heartbeats while the calls last, and losses of devices, which free the others."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rayfcp.cluster.facts.devices import Member
from rayfcp.cluster.runtime import ActorLostError, CallError, Runtime, TaskFailedError
from rayfcp.config import ConfigError
from rayfcp.elastic.facts import Cause
from rayfcp.elastic.hang import HangVerdict, Heartbeat, judge
from rayfcp.elastic.recovery import Way
from rayfcp.execute.reports import CollectiveFailedError, DeviceFullError, DeviceLostError
from rayfcp.values import InfeasiblePlanError

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks at calls that last."""

SILENT_S = 10.0
"""Time for a device to answer while others report that an exchange failed. Well above the time in which Ray notices a
lost node."""


class WorkerFailedError(RuntimeError):
    """A worker raised or died; the message names the device and holds the worker's own traceback or reason."""


def value_of(runtime: Runtime, ref: Any, *, name: str) -> Any:
    """Value that worker `name` returned.

    Raises:
        ConfigError, InfeasiblePlanError: raised by the worker, unchanged.
        WorkerFailedError: any other failure; names the worker and the cause.
    """
    try:
        return runtime.get(ref)
    except TaskFailedError as error:
        if isinstance(error.cause, ConfigError | InfeasiblePlanError):
            raise error.cause from error
        raise WorkerFailedError(f"{name} failed: {error.cause!r}\n{error.trace}") from error
    except ActorLostError as error:
        raise WorkerFailedError(f"{name} died: {error}") from error
    except CallError as error:
        raise WorkerFailedError(f"{name} could not be called: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class LostWorker:
    """A worker that is gone: its process died, its device is broken, its node was lost, or it hung and was killed."""

    id: str
    number: int
    node_id: str
    cause: Cause


class GroupFailedError(WorkerFailedError):
    """A call of all devices failed in a way that a run may recover from. The calls of the living devices have ended.

    `cause`: why. `lost`: devices that are gone. `noticed_s`: time of the failure, on `Runtime.now_s`. `replaced`: ids
    of workers that were ended too, so that fresh processes replace them on their devices. `are_stuck`: some of the lost
    did not leave in time what had failed.
    """

    def __init__(
        self,
        message: str,
        *,
        cause: Cause,
        noticed_s: float,
        lost: Sequence[LostWorker] = (),
        replaced: Sequence[str] = (),
        are_stuck: bool = False,
    ) -> None:
        super().__init__(message)
        self.cause, self.lost, self.noticed_s = cause, tuple(lost), noticed_s
        self.replaced, self.are_stuck = tuple(replaced), are_stuck


class RanksLostError(GroupFailedError):
    """Devices are gone."""


class ExchangeFailedError(GroupFailedError):
    """An exchange between devices failed though all of them are alive."""


class MemoryExhaustedError(GroupFailedError):
    """A device ran out of memory; `device_error` is its own error."""

    def __init__(self, message: str, *, device_error: DeviceFullError, **given: Any) -> None:
        super().__init__(message, **given)
        self.device_error = device_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds that calls may take.

    `deadline_s`: without progress, after which busy devices hang, see `rayfcp.elastic.hang.judge`; None: calls may
    last, but all devices must send heartbeats within `silent_s`. `most_s`: after which calls hang, however many
    heartbeats there are; None: there is no such limit. `leave_s`: for calls to end after they were aborted.
    """

    deadline_s: float | None
    silent_s: float
    most_s: float | None = None
    leave_s: float


@dataclass(slots=True, kw_only=True)
class _Found:
    """What went wrong so far. `reason`: the first problem; `gone`: lost devices by number; `broken`: those whose device
    is broken; `full`: the error of one that ran out of memory; `program_error`: that of a worker's own program;
    `are_stuck`: some did not leave in time."""

    reason: str = ""
    gone: dict[int, Cause] = field(default_factory=dict)
    broken: set[int] = field(default_factory=set)
    full: DeviceFullError | None = None
    program_error: WorkerFailedError | None = None
    are_stuck: bool = False
    noticed_s: float = 0.0

    def note(self, reason: str) -> None:
        """Keep the first reason."""
        self.reason = self.reason or reason


class GroupCall:
    """One call of each device, under way. Finds lost devices and frees the others.

    Args:
        names: names of the devices in messages.
        way: returns how survivors of a failure continue.
        end: ends a lost member for good; `keep_device` if a fresh process may replace it on its device.
    """

    def __init__(
        self,
        members: Sequence[Member],
        refs: Sequence[Any],
        *,
        runtime: Runtime,
        names: Sequence[str],
        patience: Patience,
        way: Callable[[], Way] = lambda: Way.IN_PLACE,
        end: Callable[..., None],
    ) -> None:
        self._members, self._runtime, self._names = members, runtime, names
        self._patience, self._way, self._end = patience, way, end
        self._pending: dict[Any, int] = {ref: number for number, ref in enumerate(refs)}
        self._values: list[Any] = [None] * len(refs)
        self._start_s = runtime.now_s()
        self._heartbeats = [Heartbeat(id=each.id, heard_s=self._start_s, moved_s=self._start_s) for each in members]
        self._requests: list[Any] = [None] * len(members)
        self._found = _Found()
        self.waited_s = 0.0

    def values(self) -> list[Any]:
        """See `WorkerGroup.get`."""
        while self._pending and not self._found.reason:
            if not self._take_ended():
                self._look()
        if not self._found.reason:
            return self._values
        self._found.noticed_s = self._runtime.now_s()
        if not self._found.gone:
            self._find_cause()
        way = self._way()
        if way is Way.IN_PLACE:
            self._free()
        raise self._lost(way)

    def _take_ended(self) -> bool:
        """Wait up to `LOOK_S` for calls to end; False if none did.

        Raises:
            ConfigError, InfeasiblePlanError: raised by a worker.
        """
        start_s = self._runtime.now_s()
        done = self._runtime.wait(list(self._pending), timeout_s=LOOK_S)
        self.waited_s += self._runtime.now_s() - start_s
        for ref in done:
            number = self._pending.pop(ref)
            name = self._names[number]
            try:
                self._values[number] = self._runtime.get(ref)
            except TaskFailedError as error:
                cause = error.cause
                if isinstance(cause, DeviceFullError):
                    self._found.full = self._found.full or cause
                elif isinstance(cause, ConfigError | InfeasiblePlanError):
                    raise cause from error
                elif isinstance(cause, DeviceLostError):
                    self._found.gone[number] = Cause.DIED
                    self._found.broken.add(number)
                elif not isinstance(cause, CollectiveFailedError | CallError) and self._found.program_error is None:
                    self._found.program_error = WorkerFailedError(f"{name} failed: {cause!r}\n{error.trace}")
                self._found.note(f"{name} failed: {cause}")
            except ActorLostError as error:
                self._mark_gone(number, error)
            except CallError as error:  # an argument of the call is lost
                self._found.note(f"{name} could not be called: {error}")
        return bool(done)

    def _mark_gone(self, number: int, error: ActorLostError) -> None:
        self._found.gone[number] = Cause.NODE if error.node_lost else Cause.DIED
        self._found.note(f"{self._names[number]} died: {error}")

    def _look(self) -> None:
        """Poll the heartbeats of all devices and judge them: calls may wait for a device whose own call has ended."""
        for number in range(len(self._members)):
            self._poll(number)
        verdict = self._verdict()
        hung = [number for number, member in enumerate(self._members) if member.id in verdict.hung]
        self._found.gone |= {number: Cause.HUNG for number in hung if number not in self._found.gone}
        if hung or verdict.stuck:
            names = ", ".join(self._names[number] for number in hung) or "an exchange"
            self._found.note(f"{names} hangs: {verdict.reason}")

    def _verdict(self) -> HangVerdict:
        now_s = self._runtime.now_s()
        if self._patience.deadline_s is not None:
            busy = [self._heartbeats[number] for number in sorted(self._pending.values())]
            return judge(busy, now_s=now_s, deadline_s=self._patience.deadline_s)
        hung = tuple(each.id for each in self._heartbeats if now_s - each.heard_s > self._patience.silent_s)
        if not hung and self._patience.most_s is not None and now_s - self._start_s > self._patience.most_s:
            late = tuple(self._members[number].id for number in sorted(self._pending.values()))
            return HangVerdict(hung=late, reason=f"not done within {self._patience.most_s:.0f} s")
        return HangVerdict(hung=hung, reason=f"sent no heartbeat for {self._patience.silent_s:.0f} s")

    def _poll(self, number: int) -> None:
        """Take a device's heartbeat if it came, and request the next one."""
        ref = self._requests[number]
        if ref is not None:
            if not self._runtime.wait([ref], timeout_s=0):
                return
            try:
                beat = self._runtime.get(ref)
                self._heartbeats[number] = self._heartbeats[number].after(
                    step=beat.step, num_done=beat.num_done, waiting=beat.waiting, now_s=self._runtime.now_s()
                )
            except ActorLostError as error:
                self._mark_gone(number, error)
                return
            except CallError as error:
                logger.warning("%s sent no heartbeat: %s", self._names[number], error)
        self._requests[number] = self._members[number].handle.beat.remote()

    def _find_cause(self) -> None:
        """Find out by heartbeats whether something failed because a device is gone.

        Raises:
            WorkerFailedError: all are alive, and a worker's own program failed.
        """
        refs = {member.handle.beat.remote(): number for number, member in enumerate(self._members)}
        silent = self._unanswered(refs, end_s=self._runtime.now_s() + SILENT_S, until_gone=True)
        if self._found.program_error is not None and not self._found.gone:
            raise self._found.program_error
        if not self._found.gone:
            self._found.gone |= dict.fromkeys(silent, Cause.HUNG)

    def _unanswered(self, refs: dict[Any, int], *, end_s: float, until_gone: bool) -> list[int]:
        """Devices that do not answer by `end_s`; those that turn out to be gone are marked."""
        left = dict(refs)
        while left and not (until_gone and self._found.gone):
            done = self._runtime.wait(list(left), timeout_s=max(0.0, end_s - self._runtime.now_s()))
            if not done:
                break
            for ref in done:
                number, error = left.pop(ref), loss_of(self._runtime, ref)
                if error is not None:
                    self._mark_gone(number, error)
        return list(left.values())

    def _free(self) -> None:
        """Abort the calls of living devices and wait for their end; a device that does not abort, or whose call does
        not end in time, is hung as well. A call that had not begun when it was aborted is aborted again."""
        end_s = self._runtime.now_s() + self._patience.leave_s
        aborts = {self._abort(number): number for number in range(len(self._members)) if number not in self._found.gone}
        self._stuck(self._unanswered(aborts, end_s=end_s, until_gone=False))
        again: dict[Any, int] = {}
        while self._pending_of_living() and self._runtime.now_s() < end_s:
            if not self._take_ended():
                again |= {self._abort(each): each for each in self._pending.values()}
        self._stuck(self._pending.values())
        # So that none of them meets a later call.
        again = {ref: number for ref, number in again.items() if number not in self._found.gone}
        self._stuck(self._unanswered(again, end_s=max(end_s, self._runtime.now_s() + LOOK_S), until_gone=False))

    def _abort(self, number: int) -> Any:
        return self._members[number].handle.abort.remote()

    def _stuck(self, numbers: Iterable[int]) -> None:
        """Take devices that did not leave for hung, unless they are gone for another reason."""
        for number in numbers:
            if number not in self._found.gone:
                logger.warning(
                    "%s did not leave within %.1f s after it was aborted", self._names[number], self._patience.leave_s
                )
                self._found.gone[number], self._found.are_stuck = Cause.HUNG, True

    def _pending_of_living(self) -> bool:
        self._pending = {ref: number for ref, number in self._pending.items() if number not in self._found.gone}
        return bool(self._pending)

    def _lost(self, way: Way) -> WorkerFailedError:
        """End lost members for good, stopped processes that do not react to the runtime included, so that their devices
        are free; and those that fresh processes replace."""
        if self._found.program_error is not None and not self._found.gone and way is Way.IN_PLACE:
            return self._found.program_error
        lost, replaced = [], []
        for number, member in enumerate(self._members):
            cause = self._found.gone.get(number)
            if cause is not None:
                self._end(member, keep_device=cause is not Cause.NODE and number not in self._found.broken)
                lost.append(LostWorker(id=member.id, number=number, node_id=member.facts.node_id, cause=cause))
            elif way is Way.FRESH_PROCESSES:
                self._end(member, keep_device=True)
                replaced.append(member.id)
        causes = {each.cause for each in lost}
        far_reaching = next((each for each in (Cause.NODE, Cause.DIED, Cause.HUNG) if each in causes), None)
        given: dict[str, Any] = {
            "noticed_s": self._found.noticed_s,
            "lost": lost,
            "replaced": replaced,
            "are_stuck": self._found.are_stuck,
        }
        if self._found.full is not None:
            cause = far_reaching or Cause.MEMORY
            return MemoryExhaustedError(self._found.reason, device_error=self._found.full, cause=cause, **given)
        if far_reaching is not None:
            return RanksLostError(self._found.reason, cause=far_reaching, **given)
        return ExchangeFailedError(self._found.reason, cause=Cause.COLLECTIVE, **given)


def loss_of(runtime: Runtime, ref: Any) -> ActorLostError | None:
    """The error that says that the actor is gone, if the answer is one."""
    try:
        runtime.get(ref)
    except ActorLostError as error:
        return error
    except CallError:
        return None
    return None
