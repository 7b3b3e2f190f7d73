"""The workers of a run as one: started, joined, told the same, heard, ended."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rayfcp.cluster import naming
from rayfcp.cluster.facts import DeviceFacts
from rayfcp.cluster.gathering import Gathering
from rayfcp.cluster.layout import device_names
from rayfcp.cluster.losses import Judge, RanksLostError, WorkerFailedError, answer, judge_silence
from rayfcp.cluster.members import Killer, Launched, Member, WorkerStart
from rayfcp.cluster.placement import reserve
from rayfcp.cluster.runtime import Runtime
from rayfcp.config import Config
from rayfcp.values import ClusterSpec

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
