"""The workers of a run as one group: started, joined, called together; lost members are found and ended."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from rayfcp.cluster.recovery.losses import (
    Heartbeat,
    Judge,
    LostWorker,
    RanksLostError,
    WorkerFailedError,
    judge_silence,
    value_of,
)
from rayfcp.cluster.runtime import ActorLostError, CallError, RendezvousServer, Runtime, TaskFailedError
from rayfcp.cluster.workers.facts import DeviceFacts, device_names
from rayfcp.cluster.workers.members import Killer, Launched, Member, WorkerStart
from rayfcp.cluster.workers.placement import reserve
from rayfcp.config import Config, ConfigError
from rayfcp.execute.reports import Beat, CollectiveFailedError, Joined
from rayfcp.values import ClusterSpec, InfeasiblePlanError
from rayfcp.values.devices import DEVICES

LOOK_S = 1.0
"""Between two looks at calls that last."""

SILENT_S = 10.0
"""Time for a device to answer while others report that an exchange failed. Well above the time in which Ray notices a
lost node."""


class WorkerGroup:
    """Members in use in the order of their device numbers, those of one node neighbors; and members that stand by.

    `kill_process`, if set, ends processes of lost workers that do not react to the runtime. `waited_s`: total seconds
    spent waiting for workers.
    """

    def __init__(self, start: WorkerStart, members: Iterable[Member]) -> None:
        self._start, self.runtime = start, start.runtime
        self.members = sorted(members, key=lambda member: (member.facts.node_id, member.id))
        self.standby: list[Member] = []
        self.kill_process: Killer | None = None
        self.waited_s = 0.0
        self._names = [f"rank {number}" for number in range(len(self.members))]
        for member in self.members:
            start.hold(member.id, member.handle)

    @classmethod
    def launch(cls, start: WorkerStart, *, stopped: Callable[[], bool] = bool) -> "WorkerGroup":
        """Start one worker per device that can be reserved.

        Raises:
            CapacityError: too few devices.
            ConfigError, WorkerFailedError: a worker cannot start.
        """
        reservations = reserve(
            start.config, runtime=start.runtime, device=start.device, run_key=start.run_key, stopped=stopped
        )
        launched = [start.launch(each) for each in reservations]
        try:
            return cls(start, _opened(start, launched))
        except BaseException:
            for each in launched:
                start.end(each)
                start.let_go(each.id)
            raise

    def __len__(self) -> int:
        return len(self.members)

    @property
    def workers(self) -> list[Any]:
        """Handles of the members in use."""
        return [member.handle for member in self.members]

    @property
    def facts(self) -> list[DeviceFacts]:
        return [member.facts for member in self.members]

    @property
    def all(self) -> list[Member]:
        return [*self.members, *self.standby]

    def form(self, cluster: ClusterSpec, ids: Sequence[str]) -> None:
        """Use these members as the devices of the cluster, in this order; all others stand by.

        Raises:
            KeyError: an id that is no member's.
        """
        known = {member.id: member for member in self.all}
        self.members = [known.pop(id) for id in ids]
        self.standby = list(known.values())
        self._names = device_names(cluster)

    def add(self, members: Iterable[Member]) -> None:
        """Add members that stand by."""
        for member in members:
            self._start.hold(member.id, member.handle)
            self.standby.append(member)

    def drop(self, ids: Iterable[str]) -> None:
        """End these members and give their devices back; no call to them may be under way."""
        gone = set(ids)
        for member in self.all:
            if member.id in gone:
                self._end(member)
        self._forget(gone)

    def call(self, method: Callable[[int, Any], Any], *, judge: Judge | None = None) -> list[Any]:
        """Values of `method(number, worker)`, which returns a reference, for every device in order. Raises as `get`."""
        return self.get([method(number, worker) for number, worker in enumerate(self.workers)], judge=judge)

    def get(self, refs: Sequence[Any], *, judge: Judge | None = None) -> list[Any]:
        """Values of one reference per member in use. The first failure is raised; other calls may go on.

        Args:
            judge: decides which devices hang while calls last; those without heartbeat for `elastic.hang_min_s` if
                absent.

        Raises:
            ConfigError, InfeasiblePlanError: raised by a worker, unchanged.
            WorkerFailedError: any other failure of a worker's program; names the device and the cause.
            RanksLostError: workers are gone, or an exchange between them failed. All other calls have ended; lost
                workers were ended and are no members any more.
        """
        limit_s = self._start.config.elastic.hang_min_s
        call = GroupCall(
            self.members,
            refs,
            runtime=self.runtime,
            names=self._names,
            judge=judge or judge_silence(limit_s),
            end_s=limit_s,
            end=self._end,
        )
        try:
            return call.values()
        except RanksLostError as error:
            self._forget({each.id for each in error.lost})
            raise
        finally:
            self.waited_s += call.waited_s

    def end(self) -> None:
        """Kill all members by id and give their devices back."""
        self.drop([member.id for member in self.all])

    def _end(self, member: Member) -> None:
        self._start.end(member)
        if self.kill_process is not None:
            self.kill_process(member.facts)

    def _forget(self, ids: set[str]) -> None:
        self.members = [member for member in self.members if member.id not in ids]
        self.standby = [member for member in self.standby if member.id not in ids]
        for id in ids:
            self._start.let_go(id)


class HeartbeatMonitor:
    """Asks one device for heartbeats, one request at a time."""

    def __init__(self, runtime: Runtime, member: Member) -> None:
        self._runtime, self._member = runtime, member
        self._ref: Any = None
        self._asked_s = 0.0
        self._beat: Beat | None = None
        self._received_s = 0.0

    def ask(self) -> ActorLostError | None:
        """Take the answer if there is one and ask again; return the error if the device is gone."""
        if self._ref is not None:
            if not self._runtime.wait([self._ref], timeout_s=0):
                return None
            try:
                self._beat = self._runtime.get(self._ref)
            except ActorLostError as error:
                return error
            except CallError:
                self._beat = None
            self._received_s = self._runtime.now_s()
        self._ref, self._asked_s = self._member.handle.beat.remote(), self._runtime.now_s()
        return None

    def heartbeat(self, number: int, *, is_busy: bool) -> Heartbeat:
        return Heartbeat(
            id=self._member.id,
            number=number,
            is_busy=is_busy,
            beat=self._beat,
            received_s=self._received_s,
            silent_s=self._runtime.now_s() - self._asked_s,
        )


class GroupCall:
    """One call of each device, under way. Finds lost devices and frees the others.

    Args:
        names: names of the devices in messages.
        judge: decides which devices hang while calls last.
        end_s: time for a call to end after it was aborted.
        end: ends a lost member for good.
    """

    def __init__(
        self,
        members: Sequence[Member],
        refs: Sequence[Any],
        *,
        runtime: Runtime,
        names: Sequence[str],
        judge: Judge,
        end_s: float,
        end: Callable[[Member], None],
    ) -> None:
        self._members, self._runtime, self._names, self._judge = members, runtime, names, judge
        self._end_s, self._end = end_s, end
        self._pending: dict[Any, int] = {ref: number for number, ref in enumerate(refs)}
        self._values: list[Any] = [None] * len(refs)
        self._monitors = [HeartbeatMonitor(runtime, member) for member in members]
        self._gone: dict[int, Literal["died", "node", "hung"]] = {}
        self._reason = ""
        self._program_error: WorkerFailedError | None = None
        self.waited_s = 0.0

    def values(self) -> list[Any]:
        """See `WorkerGroup.get`."""
        while self._pending and not self._reason:
            if not self._take_ended():
                self._look()
        if not self._reason:
            return self._values
        if not self._gone:
            self._find_cause()
        self._free()
        raise self._lost()

    def _take_ended(self) -> bool:
        """Wait up to `LOOK_S` for calls to end; False if none did.

        Raises:
            ConfigError, InfeasiblePlanError: raised by a worker.
        """
        start_s = self._runtime.now_s()
        done = self._runtime.wait(list(self._pending), timeout_s=LOOK_S)
        self.waited_s += self._runtime.now_s() - start_s
        for ref in done:
            self._take(ref, number=self._pending.pop(ref))
        return bool(done)

    def _take(self, ref: Any, *, number: int) -> None:
        name = self._names[number]
        try:
            self._values[number] = self._runtime.get(ref)
        except TaskFailedError as error:
            cause = error.cause
            if isinstance(cause, ConfigError | InfeasiblePlanError):
                raise cause from error
            if not isinstance(cause, CollectiveFailedError | CallError) and self._program_error is None:
                self._program_error = WorkerFailedError(f"{name} failed: {cause!r}\n{error.trace}")
            self._set_reason(f"{name} failed: {cause}")
        except ActorLostError as error:
            self._mark_gone(number, error)
        except CallError as error:  # an argument of the call is lost
            self._set_reason(f"{name} could not be called: {error}")

    def _set_reason(self, reason: str) -> None:
        self._reason = self._reason or reason

    def _mark_gone(self, number: int, error: ActorLostError) -> None:
        self._gone[number] = "node" if error.node_lost else "died"
        self._set_reason(f"{self._names[number]} died: {error}")

    def _look(self) -> None:
        """Ask all devices for heartbeats and judge them: calls may wait for a device whose own call has ended."""
        for number, monitor in enumerate(self._monitors):
            error = monitor.ask()
            if error is not None:
                self._mark_gone(number, error)
        busy = set(self._pending.values())
        diagnosis = self._judge(
            [monitor.heartbeat(number, is_busy=number in busy) for number, monitor in enumerate(self._monitors)]
        )
        self._gone |= {number: "hung" for number in diagnosis.hung if number not in self._gone}
        if diagnosis.hung or diagnosis.stuck:
            names = ", ".join(self._names[number] for number in sorted(diagnosis.hung)) or "an exchange"
            self._set_reason(f"{names} hangs: {diagnosis.reason}")

    def _find_cause(self) -> None:
        """Find out by heartbeats whether something failed because a device is gone.

        Raises:
            WorkerFailedError: all are alive, and a worker's own program failed.
        """
        refs = {member.handle.beat.remote(): number for number, member in enumerate(self._members)}
        silent = self._unanswered(refs, until_gone=True)
        if self._program_error is not None and not self._gone:
            raise self._program_error
        if not self._gone:
            self._gone |= dict.fromkeys(silent, "hung")

    def _unanswered(self, refs: dict[Any, int], *, until_gone: bool) -> list[int]:
        """Devices that do not answer within `SILENT_S`; those that turn out to be gone are marked."""
        end_s, left = self._runtime.now_s() + SILENT_S, dict(refs)
        while left and not (until_gone and self._gone):
            done = self._runtime.wait(list(left), timeout_s=max(0.0, end_s - self._runtime.now_s()))
            if not done:
                break
            for ref in done:
                number, error = left.pop(ref), loss_of(self._runtime, ref)
                if error is not None:
                    self._mark_gone(number, error)
        return list(left.values())

    def _free(self) -> None:
        """Abort the calls of living devices and wait for their end; a device whose call does not end is hung as well.
        A call that had not begun when it was aborted is aborted again."""
        living = [number for number in range(len(self._members)) if number not in self._gone]
        refs = {self._members[number].handle.abort.remote(): number for number in living}
        self._gone |= dict.fromkeys(self._unanswered(refs, until_gone=False), "hung")
        end_s = self._runtime.now_s() + self._end_s
        again: dict[Any, int] = {}
        while self._pending_of_living() and self._runtime.now_s() < end_s:
            if not self._take_ended():
                again |= {self._members[each].handle.abort.remote(): each for each in self._pending.values()}
        self._unanswered(again, until_gone=False)  # so that none of them meets a later call
        self._gone |= dict.fromkeys(self._pending.values(), "hung")

    def _pending_of_living(self) -> bool:
        self._pending = {ref: number for ref, number in self._pending.items() if number not in self._gone}
        return bool(self._pending)

    def _lost(self) -> WorkerFailedError:
        """End lost members for good, stopped processes that do not react to the runtime included, so that their devices
        are free."""
        lost = [(number, self._members[number]) for number in sorted(self._gone)]
        for _, member in lost:
            self._end(member)
        if self._program_error is not None and not lost:
            return self._program_error
        return RanksLostError(
            self._reason,
            lost=[
                LostWorker(id=member.id, number=number, node_id=member.facts.node_id, cause=self._gone[number])
                for number, member in lost
            ],
        )


def loss_of(runtime: Runtime, ref: Any) -> ActorLostError | None:
    """The error that says that the actor is gone, if the answer is one."""
    try:
        runtime.get(ref)
    except ActorLostError as error:
        return error
    except CallError:
        return None
    return None


def _opened(start: WorkerStart, launched: Sequence[Launched]) -> list[Member]:
    """Members in the order in which they opened. Those that do not open within `elastic.start_timeout_s` are ended, if
    the others are enough.

    Raises:
        ConfigError: a device is not what the configuration says.
        WorkerFailedError: a worker cannot start.
    """
    runtime, limit_s = start.runtime, start.config.elastic.start_timeout_s
    left, members = {each.opening: number for number, each in enumerate(launched)}, []
    end_s = runtime.now_s() + limit_s
    while left and (done := runtime.wait(list(left), timeout_s=max(0.0, end_s - runtime.now_s()))):
        for ref in done:
            number = left.pop(ref)
            members.append(launched[number].opened(value_of(runtime, ref, name=f"rank {number}")))
    if len(members) < min(start.config.cluster.min_workers, len(launched)):
        late = ", ".join(f"rank {number}" for number in left.values())
        raise WorkerFailedError(
            f"{late} did not open within elastic.start_timeout_s ({limit_s:.0f} s); look at their nodes, or raise it"
        )
    for number in left.values():
        start.end(launched[number])
        start.let_go(launched[number].id)
    return members


def join_devices(
    worker_group: WorkerGroup, cluster: ClusterSpec, *, empty: bool = False
) -> tuple[RendezvousServer, list[Joined]]:
    """Make all workers devices of the cluster, in order; `empty`: with weights that will be filled. The server must
    live as long as the generation."""
    here = worker_group.runtime.here()
    server = worker_group.runtime.rendezvous(alone=all(fact.node_id == here for fact in worker_group.facts))
    rendezvous = server.of(cluster)
    return server, worker_group.call(lambda number, worker: worker.join.remote(number, rendezvous, empty=empty))


def device_peak_flops(config: Config, worker_group: WorkerGroup) -> float:
    """Peak FLOP/s of one device: configured, from the table, or, for CPUs, measured by all workers at once.

    Raises:
        ConfigError: an accelerator that is not in the table.
    """
    device = worker_group.facts[0].device
    peak = config.metrics.peak_flops or worker_group.facts[0].peak_flops
    if peak is not None:
        return peak
    if not DEVICES[device].is_host:
        raise ConfigError(
            f"metrics.peak_flops is not set and the table does not have this {device} device; set it to the device's "
            "dense FLOP/s in model.dtype"
        )
    return statistics.fmean(worker_group.call(lambda _, worker: worker.measure_flops.remote()))
