"""The workers of a run as one group: started, joined, called together; lost members are found and ended."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rayfcp.cluster.facts.costs import Passes
from rayfcp.cluster.facts.devices import DeviceFacts, Member, device_names
from rayfcp.cluster.workers.calls import GroupCall, GroupFailedError, Patience, loss_of
from rayfcp.cluster.workers.starting import WorkerStart
from rayfcp.config import Config, ConfigError
from rayfcp.elastic.recovery import Way
from rayfcp.execute.reports import Joined
from rayfcp.values import ClusterSpec
from rayfcp.values.devices import DEVICES

ANSWER_S = 5.0
"""Time for workers and copy stores to answer calls for which they have threads of their own."""


class WorkerGroup:
    """Members in use in the order of their device numbers, those of one node neighbors; and members that stand by.

    `ids`: devices of the current generation, lost ones included, in the order of their numbers; empty before the first.
    `waited_s`: total seconds spent waiting for workers.

    Args:
        kill: ends the process of a lost worker that does not react to the runtime.
        way: returns how the survivors of a failure continue.
    """

    def __init__(
        self,
        start: WorkerStart,
        members: Iterable[Member],
        *,
        kill: Callable[[DeviceFacts], None] = lambda _: None,
        way: Callable[[], Way] = lambda: Way.IN_PLACE,
    ) -> None:
        self._start, self.runtime = start, start.runtime
        self._kill, self._way = kill, way
        self.members = sorted(members, key=lambda member: (member.facts.node_id, member.id))
        self.standby: list[Member] = []
        self._cluster: ClusterSpec | None = None
        self.ids: tuple[str, ...] = ()
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
    def cluster(self) -> ClusterSpec:
        """Cluster of the current generation."""
        assert self._cluster is not None, "a generation was formed"
        return self._cluster

    @property
    def is_formed(self) -> bool:
        """True from the first generation on."""
        return self._cluster is not None

    @property
    def device(self) -> str:
        """Kind of the devices."""
        return self._start.config.cluster.device

    @property
    def all(self) -> list[Member]:
        return [*self.members, *self.standby]

    def use(self, ids: Sequence[str]) -> None:
        """Use these members, in this order; all others stand by.

        Raises:
            KeyError: an id that is no member's.
        """
        known = {member.id: member for member in self.all}
        self.members = [known.pop(id) for id in ids]
        self.standby = list(known.values())

    def form(self, cluster: ClusterSpec, ids: Sequence[str]) -> None:
        """Begin a generation with these members as the devices of the cluster; errors as of `use`."""
        self.use(ids)
        self._names, self._cluster, self.ids = device_names(cluster), cluster, tuple(ids)

    def drop(self, ids: Iterable[str]) -> None:
        """End these members and give their devices back; no call to them may be under way."""
        gone = set(ids)
        for member in self.all:
            if member.id in gone:
                self._end(member)
        self._forget(gone)

    def drop_dead(self) -> None:
        """End the dead among the members that stand by."""
        beats = {member.handle.beat.remote(): member.id for member in self.standby}
        done = self.runtime.wait_all(list(beats), timeout_s=ANSWER_S)
        self.drop([beats[ref] for ref in done if loss_of(self.runtime, ref) is not None])

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
            GroupFailedError: workers are gone, or an exchange between them failed. All other calls have ended; lost
                workers were ended and are no members any more.
        """
        silent_s = self._start.config.elastic.hang_min_s
        leave_s = silent_s if leave_s is None else leave_s
        call = GroupCall(
            self.members,
            refs,
            runtime=self.runtime,
            names=self._names,
            patience=Patience(deadline_s=deadline_s, silent_s=silent_s, most_s=most_s, leave_s=leave_s),
            way=self._way,
            end=self._end,
        )
        try:
            return call.values()
        except GroupFailedError as error:
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
        self._kill(member.facts)

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


def passes_of(worker_group: WorkerGroup) -> Passes:
    """Return a function that times one pass of each shape on all devices at once."""
    return lambda shapes: worker_group.call(lambda _, worker: worker.time_passes.remote(shapes))


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
