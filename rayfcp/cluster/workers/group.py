"""The workers of a run as one group: started, joined, called together; lost members are found and ended."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rayfcp.cluster.workers.calls import GroupCall, RanksLostError
from rayfcp.cluster.workers.facts import DeviceFacts, Member, device_names
from rayfcp.cluster.workers.starting import WorkerStart
from rayfcp.config import Config, ConfigError
from rayfcp.elastic.recovery import Way
from rayfcp.execute.reports import Joined
from rayfcp.values import ClusterSpec
from rayfcp.values.devices import DEVICES


class WorkerGroup:
    """Members in use in the order of their device numbers, those of one node neighbors; and members that stand by.

    `kill_process`, if set, ends processes of lost workers that do not react to the runtime. `way` returns how survivors
    of a failure go on. `waited_s`: total seconds spent waiting for workers.
    """

    def __init__(self, start: WorkerStart, members: Iterable[Member]) -> None:
        self._start, self.runtime = start, start.runtime
        self.members = sorted(members, key=lambda member: (member.facts.node_id, member.id))
        self.standby: list[Member] = []
        self.kill_process: Callable[[DeviceFacts], None] | None = None
        self.way: Callable[[], Way] = lambda: Way.IN_PLACE
        self.waited_s = 0.0
        self._names = [f"rank {number}" for number in range(len(self.members))]
        for member in self.members:
            start.hold(member.id, member.handle)

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

    def drop(self, ids: Iterable[str]) -> None:
        """End these members and give their devices back; no call to them may be under way."""
        gone = set(ids)
        for member in self.all:
            if member.id in gone:
                self._end(member)
        self._forget(gone)

    def call(self, method: Callable[[int, Any], Any], *, most_s: float | None = None) -> list[Any]:
        """Values of `method(number, worker)`, which returns a reference, for every device in order. Raises as `get`."""
        return self.get([method(number, worker) for number, worker in enumerate(self.workers)], most_s=most_s)

    def get(
        self,
        refs: Sequence[Any],
        *,
        deadline_s: float | None = None,
        most_s: float | None = None,
        leave_s: float | None = None,
    ) -> list[Any]:
        """Values of one reference per member in use. The first failure is raised; other calls may go on.

        Args:
            deadline_s: seconds without progress after which devices hang; None: they hang without heartbeat for
                `elastic.hang_min_s`, however long the calls last, but for `most_s`.
            most_s: seconds after which calls hang in any case, if there is no `deadline_s`.
            leave_s: time for devices to leave a call that failed elsewhere; `elastic.hang_min_s` if None.

        Raises:
            ConfigError, InfeasiblePlanError: raised by a worker, unchanged.
            WorkerFailedError: any other failure of a worker's program; names the device and the cause.
            RanksLostError: workers are gone, or an exchange between them failed. All other calls have ended; lost
                workers were ended and are no members any more.
        """
        call = GroupCall(
            self.members,
            refs,
            runtime=self.runtime,
            names=self._names,
            deadline_s=deadline_s,
            limit_s=self._start.config.elastic.hang_min_s,
            most_s=most_s,
            leave_s=leave_s,
            way=self.way,
            end=self._end,
        )
        try:
            return call.values()
        except RanksLostError as error:
            self._forget({each.id for each in error.lost} | set(error.replaced))
            raise
        finally:
            self.waited_s += call.waited_s

    def end(self) -> None:
        """Kill all members by id and give their devices back, and those of lost members."""
        self.drop([member.id for member in self.all])
        self._start.release_vacant()

    def _end(self, member: Member, *, keep_device: bool = False) -> None:
        self._start.end(member, keep_device=keep_device)
        if self.kill_process is not None:
            self.kill_process(member.facts)

    def _forget(self, ids: set[str]) -> None:
        self.members = [member for member in self.members if member.id not in ids]
        self.standby = [member for member in self.standby if member.id not in ids]


def join_devices(
    worker_group: WorkerGroup, cluster: ClusterSpec, *, empty: bool = False, most_s: float | None = None
) -> tuple[Any, list[Joined]]:
    """Make all workers devices of the cluster, in order, within `most_s`. The server must live as long as the
    generation. `empty`: with weights that will be filled."""
    here = worker_group.runtime.here()
    alone = all(fact.node_id == here for fact in worker_group.facts)
    rendezvous, server = worker_group.runtime.rendezvous(cluster, alone=alone)
    joined = worker_group.call(
        lambda number, worker: worker.join.remote(number, rendezvous, empty=empty), most_s=most_s
    )
    return server, joined


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
