"""Signs of life of a device.

One call of every device: their values, or who is to blame and that all others are free again.

The workers of a run as one: started, joined, told the same, heard, ended.

What happens once before the first step: the devices' meeting, peaks, what was left out.
"""

import dataclasses
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from rayfcp.cluster.recovery.losses import (
    Casualty,
    Judge,
    Pulse,
    RanksLostError,
    WorkerFailedError,
    answer,
    judge_silence,
)
from rayfcp.cluster.runtime import ActorLostError, CallError, RendezvousServer, Runtime, TaskFailedError
from rayfcp.cluster.workers import lifetime as naming
from rayfcp.cluster.workers.facts import DeviceFacts, device_names
from rayfcp.cluster.workers.members import Killer, Launched, Member, WorkerStart
from rayfcp.cluster.workers.placement import reserve
from rayfcp.config import Config, ConfigError
from rayfcp.data import BadRow
from rayfcp.execute.reports import Beat, CollectiveFailedError, Joined
from rayfcp.values import ClusterSpec, InfeasiblePlanError


class Asked:
    """Signs of life of one device; one question at a time."""

    def __init__(self, runtime: Runtime, member: Member) -> None:
        self._runtime, self._member = runtime, member
        self._ref: Any = None
        self._asked_s = 0.0
        self._beat: Beat | None = None
        self._heard_s = 0.0

    def ask(self) -> ActorLostError | None:
        """Take the answer if there is one, ask again; the error if the device is gone."""
        if self._ref is not None:
            if not self._runtime.wait([self._ref], timeout_s=0):
                return None
            try:
                self._beat = self._runtime.get(self._ref)
            except ActorLostError as error:
                return error
            except CallError:
                self._beat = None
            self._heard_s = self._runtime.now_s()
        self._ref, self._asked_s = self._member.handle.beat.remote(), self._runtime.now_s()
        return None

    def pulse(self, number: int, *, is_busy: bool) -> Pulse:
        return Pulse(
            id=self._member.id,
            number=number,
            is_busy=is_busy,
            beat=self._beat,
            heard_s=self._heard_s,
            silent_s=self._runtime.now_s() - self._asked_s,
        )


def death(runtime: Runtime, ref: Any) -> ActorLostError | None:
    """The actor's death, if that is what its answer says."""
    try:
        runtime.get(ref)
    except ActorLostError as error:
        return error
    except CallError:
        return None
    return None


LOOK_S = 1.0
"""From one look at calls that last to the next."""

SILENT_S = 10.0
"""How long a device may leave a question unanswered while others say that an exchange failed. Well above the time in
which Ray notices a lost node."""


class Gathering:
    """The calls under way, one of each device.

    Args:
        names: of devices, for messages.
        judge: says who is hung while calls last.
        end_s: how long a call may take to end after it was aborted.
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
        self._waiting: dict[Any, int] = {ref: number for number, ref in enumerate(refs)}
        self._values: list[Any] = [None] * len(refs)
        self._asked = [Asked(runtime, member) for member in members]
        self._gone: dict[int, Literal["died", "node", "hung"]] = {}
        self._reason = ""
        self._own_error: WorkerFailedError | None = None
        self.waited_s = 0.0

    def values(self) -> list[Any]:
        """See `Crew.gather`."""
        while self._waiting and not self._reason:
            if not self._take_ended():
                self._look()
        if not self._reason:
            return self._values
        if not self._gone:
            self._find_cause()
        self._free()
        raise self._lost()

    def _take_ended(self) -> bool:
        """Wait for calls to end, for `LOOK_S` at most; False if none did.

        Raises:
            ConfigError, InfeasiblePlanError: raised by a worker.
        """
        start_s = self._runtime.now_s()
        done = self._runtime.wait(list(self._waiting), timeout_s=LOOK_S)
        self.waited_s += self._runtime.now_s() - start_s
        for ref in done:
            self._take(ref, number=self._waiting.pop(ref))
        return bool(done)

    def _take(self, ref: Any, *, number: int) -> None:
        name = self._names[number]
        try:
            self._values[number] = self._runtime.get(ref)
        except TaskFailedError as error:
            cause = error.cause
            if isinstance(cause, ConfigError | InfeasiblePlanError):
                raise cause from error
            if not isinstance(cause, CollectiveFailedError | CallError) and self._own_error is None:
                self._own_error = WorkerFailedError(f"{name} failed: {cause!r}\n{error.trace}")
            self._blame(f"{name} failed: {cause}")
        except ActorLostError as error:
            self._bury(number, error)
        except CallError as error:  # an argument of the call is lost
            self._blame(f"{name} could not be called: {error}")

    def _blame(self, reason: str) -> None:
        self._reason = self._reason or reason

    def _bury(self, number: int, error: ActorLostError) -> None:
        self._gone[number] = "node" if error.node_lost else "died"
        self._blame(f"{self._names[number]} died: {error}")

    def _look(self) -> None:
        """Ask everybody for a sign of life, and for a judgement of what they said: others may wait for one whose own
        call has ended."""
        for number, asked in enumerate(self._asked):
            error = asked.ask()
            if error is not None:
                self._bury(number, error)
        pending = set(self._waiting.values())
        pulses = [asked.pulse(number, is_busy=number in pending) for number, asked in enumerate(self._asked)]
        diagnosis = self._judge(pulses)
        self._gone |= {number: "hung" for number in diagnosis.hung if number not in self._gone}
        if diagnosis.hung or diagnosis.stuck:
            names = ", ".join(self._names[number] for number in sorted(diagnosis.hung)) or "an exchange"
            self._blame(f"{names} hangs: {diagnosis.reason}")

    def _find_cause(self) -> None:
        """Something failed: a sign of life of everybody tells whether that is because somebody is gone.

        Raises:
            WorkerFailedError: all live, and a worker's own program failed.
        """
        refs = {member.handle.beat.remote(): number for number, member in enumerate(self._members)}
        silent = self._unanswered(refs, until_death=True)
        if self._own_error is not None and not self._gone:
            raise self._own_error
        if not self._gone:
            self._gone |= dict.fromkeys(silent, "hung")

    def _unanswered(self, refs: dict[Any, int], *, until_death: bool) -> list[int]:
        """Who does not answer within `SILENT_S`; who turns out to be gone is buried."""
        end_s, left = self._runtime.now_s() + SILENT_S, dict(refs)
        while left and not (until_death and self._gone):
            done = self._runtime.wait(list(left), timeout_s=max(0.0, end_s - self._runtime.now_s()))
            if not done:
                break
            for ref in done:
                number, error = left.pop(ref), death(self._runtime, ref)
                if error is not None:
                    self._bury(number, error)
        return list(left.values())

    def _free(self) -> None:
        """Abort what the living are in, and wait until their calls have ended; who does not is hung as well. A call
        that had not begun when it was aborted is aborted again."""
        living = [number for number in range(len(self._members)) if number not in self._gone]
        refs = {self._members[number].handle.abort.remote(): number for number in living}
        self._gone |= dict.fromkeys(self._unanswered(refs, until_death=False), "hung")
        end_s = self._runtime.now_s() + self._end_s
        again: dict[Any, int] = {}
        while self._waiting_for_living() and self._runtime.now_s() < end_s:
            if not self._take_ended():
                again |= {self._members[each].handle.abort.remote(): each for each in self._waiting.values()}
        self._unanswered(again, until_death=False)  # so that none of them meets a later call
        self._gone |= dict.fromkeys(self._waiting.values(), "hung")

    def _waiting_for_living(self) -> bool:
        self._waiting = {ref: number for ref, number in self._waiting.items() if number not in self._gone}
        return bool(self._waiting)

    def _lost(self) -> WorkerFailedError:
        """End the lost for good, stopped processes that do not react to the runtime included; their devices are free
        afterwards."""
        lost = [(number, self._members[number]) for number in sorted(self._gone)]
        for _, member in lost:
            self._end(member)
        if self._own_error is not None and not lost:
            return self._own_error
        casualties = [
            Casualty(id=member.id, number=number, node_id=member.facts.node_id, cause=self._gone[number])
            for number, member in lost
        ]
        return RanksLostError(self._reason, lost=casualties)


__all__ = ["Crew", "RanksLostError", "WorkerFailedError"]


class Crew:
    """Members in use in the order of their devices, those of one node neighbours; and members that stand by.

    `kill`, if set, ends the processes of lost workers that do not react to the runtime.
    """

    def __init__(self, start: WorkerStart, members: Iterable[Member]) -> None:
        self._start, self.runtime = start, start.runtime
        self.members = sorted(members, key=lambda member: (member.facts.node_id, member.id))
        self.waiting: list[Member] = []
        self.kill: Killer | None = None
        self.waited_s = 0.0
        """Seconds spent waiting for workers, in total."""
        self._names = [f"rank {number}" for number in range(len(self.members))]
        for member in self.members:
            start.hold(member.id, member.handle)

    @classmethod
    def start(
        cls,
        config: Config,
        *,
        runtime: Runtime,
        device: str,
        data_dir: str,
        vocab_size: int,
        stopped: Callable[[], bool],
        run_key: str = "",
    ) -> "Crew":
        """One worker per device that can be reserved.

        Raises:
            CapacityError: too few devices.
            WorkerFailedError: a worker cannot start.
        """
        start = WorkerStart(
            config,
            runtime=runtime,
            device=device,
            data_dir=data_dir,
            vocab_size=vocab_size,
            run_key=run_key or naming.run_key(config),
        )
        return cls.launch(start, stopped=stopped)

    @classmethod
    def launch(cls, start: WorkerStart, *, stopped: Callable[[], bool]) -> "Crew":
        """One worker per device that can be reserved. Raises as `start`."""
        groups = reserve(
            start.config, runtime=start.runtime, device=start.device, run_key=start.run_key, stopped=stopped
        )
        launched = [start.launch(group) for group in groups]
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
        return [*self.members, *self.waiting]

    def use(self, cluster: ClusterSpec) -> int:
        """Go on with the devices of the cluster; how many others stand by: they are told nothing and end with these."""
        self.form(cluster, [member.id for member in self.members[: cluster.num_devices]])
        return len(self.waiting)

    def form(self, cluster: ClusterSpec, ids: Sequence[str]) -> None:
        """Go on with these as the devices of the cluster, in this order; all others stand by.

        Raises:
            KeyError: an id of nobody who lives.
        """
        known = {member.id: member for member in self.all}
        self.members = [known.pop(id) for id in ids]
        self.waiting = list(known.values())
        self._names = device_names(cluster)

    def add(self, members: Iterable[Member]) -> None:
        """Members that stand by from now on."""
        for member in members:
            self._start.hold(member.id, member.handle)
            self.waiting.append(member)

    def drop(self, ids: Iterable[str]) -> None:
        """End these members and give their devices back; nobody may be within a call with them."""
        gone = set(ids)
        for member in self.all:
            if member.id in gone:
                self._end(member)
        self._forget(gone)

    def each(self, call: Callable[[int, Any], Any], *, judge: Judge | None = None) -> list[Any]:
        """`call(number, worker)` gives a reference for every device; their values in order. Raises as `gather`."""
        refs = [call(number, worker) for number, worker in enumerate(self.workers)]
        return self.gather(refs, judge=judge)

    def gather(self, refs: Sequence[Any], *, judge: Judge | None = None) -> list[Any]:
        """Values of one reference per member in use. The first failure is raised, other calls may last.

        Args:
            judge: who is hung while calls last; who gives no sign of life for `elastic.hang_min_s` if absent.

        Raises:
            ConfigError, InfeasiblePlanError: raised by a worker as they are.
            WorkerFailedError: any other failure of a worker's program; names the device and the cause.
            RanksLostError: workers are gone, or an exchange between them failed. All other calls have ended; the lost
                were ended, and are members no more.
        """
        limit_s = self._start.config.elastic.hang_min_s
        gathering = Gathering(
            self.members,
            refs,
            runtime=self.runtime,
            names=self._names,
            judge=judge or judge_silence(limit_s),
            end_s=limit_s,
            end=self._end,
        )
        try:
            return gathering.values()
        except RanksLostError as error:
            self._forget({each.id for each in error.lost})
            raise
        finally:
            self.waited_s += gathering.waited_s

    def end(self) -> None:
        """Kill all members by id and give their devices back."""
        self.drop([member.id for member in self.all])

    def _end(self, member: Member) -> None:
        self._start.end(member)
        if self.kill is not None:
            self.kill(member.facts)

    def _forget(self, ids: set[str]) -> None:
        self.members = [member for member in self.members if member.id not in ids]
        self.waiting = [member for member in self.waiting if member.id not in ids]
        for id in ids:
            self._start.let_go(id)


def _opened(start: WorkerStart, launched: Sequence[Launched]) -> list[Member]:
    """Members in the order in which they opened. Those that do not open within `elastic.start_timeout_s` are ended, if
    the others are enough.

    Raises:
        ConfigError: a device is not what was asked for.
        WorkerFailedError: a worker cannot start.
    """
    runtime, limit_s = start.runtime, start.config.elastic.start_timeout_s
    left, members = {each.opening: number for number, each in enumerate(launched)}, []
    end_s = runtime.now_s() + limit_s
    while left and (done := runtime.wait(list(left), timeout_s=max(0.0, end_s - runtime.now_s()))):
        for ref in done:
            number = left.pop(ref)
            members.append(launched[number].opened(answer(runtime, ref, name=f"rank {number}")))
    if len(members) < min(start.config.cluster.min_workers, len(launched)):
        late = ", ".join(f"rank {number}" for number in left.values())
        raise WorkerFailedError(
            f"{late} did not open within elastic.start_timeout_s ({limit_s:.0f} s); look at their nodes, or raise it"
        )
    for number in left.values():
        start.end(launched[number])
        start.let_go(launched[number].id)
    return members


NAMED_AT_START = 3


def join_devices(crew: Crew, cluster: ClusterSpec, *, empty: bool = False) -> tuple[RendezvousServer, list[Joined]]:
    """All workers become devices of the cluster, in order, `empty`: with weights that will be filled. The store must
    live as long as the generation."""
    here = crew.runtime.here()
    store = crew.runtime.rendezvous(alone=all(fact.node_id == here for fact in crew.facts))
    meeting = store.meeting(cluster)
    return store, crew.each(lambda number, worker: worker.join.remote(number, meeting, empty=empty))


def device_peak_flops(config: Config, crew: Crew) -> float:
    """Peak of one device: configured, from the table, or, for CPUs, measured by all workers at once.

    Raises:
        ConfigError: an accelerator that no table knows.
    """
    peak = config.metrics.peak_flops or crew.facts[0].peak_flops
    if peak is not None:
        return peak
    if crew.facts[0].device != "cpu":
        raise ConfigError(
            f"metrics.peak_flops is not set and no table knows this {crew.facts[0].device} device; set it to the "
            "device's dense FLOP/s in model.dtype"
        )
    return statistics.fmean(crew.each(lambda _, worker: worker.measure_flops.remote()))


def write_skipped(path: Path, rows: Sequence[BadRow]) -> str:
    """Name the rows that were left out, one JSON object a line; a sentence with the first of them."""
    path.write_text("".join(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows))
    shown = "; ".join(str(row) for row in rows[:NAMED_AT_START])
    return f"left out: {shown}{f' and more, see {path}' if len(rows) > NAMED_AT_START else ''}"
