"""Devices of a run through its generations: which exist, which are in use, and how a new generation is formed."""

import logging
from collections.abc import Callable
from typing import Any

from rayfcp.cluster.dataset import Dataset
from rayfcp.cluster.planning.capacity import cluster_spec, layouts_that_fit
from rayfcp.cluster.recovery.stores import ANSWER_S, SnapshotStores
from rayfcp.cluster.runtime import Flag, NodeView
from rayfcp.cluster.workers.calls import RanksLostError, loss_of
from rayfcp.cluster.workers.facts import with_stages
from rayfcp.cluster.workers.group import WorkerGroup, join_devices
from rayfcp.cluster.workers.starting import PendingWorkers, WorkerStart
from rayfcp.config import Config
from rayfcp.elastic.facts import Cause, Device, Facts, Failure, Limits, Loss, Setbacks
from rayfcp.elastic.recoverable import RecoverableState
from rayfcp.elastic.recovery import Way, choose_way
from rayfcp.elastic.size import decide
from rayfcp.execute.reports import Joined
from rayfcp.values import ClusterSpec, Decision, ModelProfile, Move, StateId
from rayfcp.values.devices import DEVICES

logger = logging.getLogger(__name__)

REPLACING_LOOK_S = 0.1
"""Between two looks at fresh processes that a recovery waits for."""


class ClusterState:
    """Workers in use and standing by, pending workers, snapshot stores and nodes. Ended by `end`.

    `ids`: devices of the current generation, in the order of their numbers.

    Methods that call all devices raise `RanksLostError` if one was lost meanwhile.
    """

    def __init__(
        self,
        config: Config,
        data: Dataset,
        *,
        start: WorkerStart,
        worker_group: WorkerGroup,
        snapshot_stores: SnapshotStores,
        log: Callable[[str], None],
    ) -> None:
        self._config, self._data, self._log = config, data, log
        self._runtime, self.worker_group = start.runtime, worker_group
        self._nodes = start.runtime.nodes()
        self._stop_looking = start.runtime.every(config.elastic.look_every_s, self._look_at_nodes, name="node watch")
        self._start, self._pending = start, PendingWorkers(start)
        self._limits = Limits.of(config)
        self.snapshot_stores = snapshot_stores
        worker_group.kill_process, worker_group.way = snapshot_stores.kill, self._way
        self._rendezvous: Any = None
        self._cluster: ClusterSpec | None = None
        self.ids: tuple[str, ...] = ()
        self._setbacks, self._num_stuck = Setbacks(), 0
        self._losses: tuple[Loss, ...] = ()
        self._warned: set[str] = set()
        self._place_of: dict[str, str] = {}
        self._newest_number = snapshot_stores.history.last

    def newest_state(self, *, up_to: int) -> RecoverableState:
        """Newest state in memory of at most `up_to` steps: a step that is not in the log has to run again."""
        found = self.snapshot_stores.newest_state(self.worker_group.all, up_to=up_to)
        self._newest_number = max(self._newest_number, found.generation)
        return found

    @property
    def nodes(self) -> NodeView:
        """Nodes, as seen `elastic.look_every_s` ago at most."""
        return self._nodes

    @property
    def cluster(self) -> ClusterSpec:
        """Cluster of the current generation."""
        assert self._cluster is not None
        return self._cluster

    @property
    def model(self) -> ModelProfile:
        return self._data.model

    @property
    def device(self) -> str:
        """Kind of the devices."""
        return self._start.config.cluster.device

    def decide(self, *, failure: Failure | None = None, waiting_since_s: float | None = None) -> Decision:
        """Decide what to do about the devices now; new ones stand by from here on. More are requested, but not during a
        recovery, which needs the CPUs that starting processes would take."""
        self.worker_group.standby += self._pending.ready()
        # Accelerators that often lose their worker are avoided; CPU workers have no such place.
        self._place_of |= {member.id: member.facts.slot or member.id for member in self.worker_group.all}
        if failure is None and self._setbacks == Setbacks():
            if self._config.elastic.grow:
                self._request_missing()
            if self._cluster is not None:
                self._start.keep_standbys(self.worker_group.members)
        now_s = self._runtime.now_s()
        is_steady = failure is None and waiting_since_s is None and self._cluster is not None
        if is_steady and not self._draining_in_use() and not self.worker_group.standby:
            return Decision(what=Move.GO_ON, reason="the devices are unchanged")
        return decide(self._facts(failure=failure, waiting_since_s=waiting_since_s), now_s=now_s)

    def await_devices(self, failure: Failure | None, *, stopping: Flag) -> Decision:
        """Decision after a loss, or before the first generation, once it is not to wait."""
        since_s: float | None = None
        logged = ""
        while True:
            decision = self.decide(failure=failure, waiting_since_s=since_s)
            if decision.what is not Move.WAIT or stopping.is_set():
                return decision
            if since_s is None:
                since_s = self._runtime.now_s()
                self._log(decision.reason)
            elif logged != decision.reason:
                logger.info(decision.reason)
            logged = decision.reason
            if self._pending.replacing_since_s:
                stopping.wait(min(REPLACING_LOOK_S, self._config.elastic.look_every_s))
            else:
                self._request_missing()
                stopping.wait(self._config.elastic.look_every_s)

    def spec(self, decision: Decision) -> ClusterSpec:
        """Cluster of the generation that a decision asks for."""
        member_of = {member.id: member for member in self.worker_group.all}
        return cluster_spec(
            with_stages(self._config, decision.num_stages),
            self._data.model,
            facts=[member_of[each].facts for each in decision.devices],
            generation=self._newest_number + 1,
        )

    def form(self, decision: Decision, cluster: ClusterSpec, *, empty: bool) -> list[Joined]:
        """Join the decision's devices; those in use before have left or been aborted. `empty`: without weights, which
        will be filled."""
        self._newest_number = cluster.generation
        self.worker_group.form(cluster, decision.devices)
        self._cluster, self.ids = cluster, decision.devices
        if not self._config.elastic.grow:
            self._start.release_vacant()
        # Initial weights of a large model take long: that is no sign of survivors that cannot rebuild.
        most_s = self._config.elastic.rebuild_timeout_s if empty else None
        try:
            self._rendezvous, joined = join_devices(self.worker_group, cluster, empty=empty, most_s=most_s)
        except RanksLostError as error:
            self._num_stuck += error.cause in (Cause.HUNG, Cause.COLLECTIVE)
            raise
        return joined

    def restore(self, found: RecoverableState) -> None:
        """Make all devices take up a state from copies."""
        sources = self._runtime.put(found.copies)
        self.worker_group.call(lambda _, worker: worker.fill.remote(sources))

    def take_snapshot(self, state: StateId) -> list[StateId | None]:
        """Make all devices copy their shards; return the newest state that each has copied."""
        return self.worker_group.call(lambda _, worker: worker.take_snapshot.remote(state))

    def assign_stores(self) -> None:
        """Give every node a store, which also kills processes that hang, and another node for its copies that stays."""
        self.snapshot_stores.assign(self.worker_group.all, avoid=self._nodes.draining)

    def replace_store(self, node_id: str) -> None:
        """End a store that does not work; a node that is alive gets another."""
        self.snapshot_stores.forget(node_id)
        if node_id in self._nodes.alive:
            self.assign_stores()

    def end_draining_standbys(self) -> None:
        """End the devices that stand by on draining nodes."""
        draining = self._nodes.draining
        self.worker_group.drop([each.id for each in self.worker_group.standby if each.facts.node_id in draining])

    def drop_copies(self) -> None:
        """Drop all copies that were made up to now."""
        calls = [member.handle.drop_copies.remote(self._newest_number) for member in self.worker_group.all]
        self._runtime.wait_all(calls, timeout_s=ANSWER_S)
        self.snapshot_stores.drop_copies(self._newest_number)

    def renew_stores(self) -> bool:
        """Replace lost snapshot stores, on nodes with living workers; return True if there were any."""
        self.worker_group.call(lambda _, worker: worker.idle.remote())
        self._look_at_nodes()
        self._drop_dead()
        are_lost = self.snapshot_stores.end_lost()
        self.assign_stores()
        return are_lost

    def on_loss(self, error: RanksLostError) -> Failure:
        """Record a loss, drop dead members and stores, and let fresh processes replace lost ones."""
        self._num_stuck += error.are_stuck
        now_s = self._runtime.now_s()
        self._losses += tuple(Loss(place=self._place_of[each.id], at_s=now_s) for each in error.lost)
        gone = {each.node_id for each in error.lost if each.cause is Cause.NODE}
        for node in sorted(gone - self._runtime.nodes().alive) if gone else ():
            self.snapshot_stores.forget(node)
        self._drop_dead()
        self._pending.replace(all=bool(error.replaced) or not self.worker_group.all)
        return Failure(
            cause=error.cause, lost=tuple(each.id for each in error.lost), message=" ".join(str(error).split())
        )

    def on_recovery(self, failure: Failure) -> None:
        self._setbacks = self._setbacks.after(failure)

    def on_step_finished(self) -> None:
        self._setbacks = Setbacks()

    def newly_draining(self) -> tuple[str, ...]:
        """Draining nodes with devices in use, each returned once."""
        new = tuple(sorted(self._draining_in_use() - self._warned))
        self._warned.update(new)
        return new

    def end(self) -> None:
        """End all workers and snapshot stores."""
        for end in (self._pending.end, self._stop_looking, self.worker_group.end, self.snapshot_stores.end):
            try:
                end()
            except Exception:
                logger.exception("ending devices")

    def _way(self) -> Way:
        way, reason = choose_way(
            self._config.elastic.recovery,
            is_host=DEVICES[self.device].is_host,
            num_stuck=self._num_stuck,
            setbacks=self._setbacks,
        )
        if way is Way.FRESH_PROCESSES:
            self._log(f"recovering with fresh processes: {reason}")
        return way

    def _look_at_nodes(self) -> None:
        self._nodes = self._runtime.nodes()

    def _drop_dead(self) -> None:
        """End the dead among the members that stand by."""
        beats = {member.handle.beat.remote(): member.id for member in self.worker_group.standby}
        done = self._runtime.wait_all(list(beats), timeout_s=ANSWER_S)
        self.worker_group.drop([beats[ref] for ref in done if loss_of(self._runtime, ref) is not None])

    def _request_missing(self) -> None:
        """Request the devices that are missing; those on draining nodes do not count."""
        staying = [each for each in self.worker_group.all if each.facts.node_id not in self._nodes.draining]
        self._pending.want(max(0, self._limits.max_devices - len(staying)), in_use=len(staying))

    def _draining_in_use(self) -> set[str]:
        """Draining nodes with devices in use."""
        return {member.facts.node_id for member in self.worker_group.members} & self._nodes.draining.keys()

    def _facts(self, *, failure: Failure | None, waiting_since_s: float | None) -> Facts:
        epoch_s, now_s = self._runtime.epoch_s(), self._runtime.now_s()
        return Facts(
            limits=self._limits,
            devices=tuple(
                Device(id=member.id, node_id=member.facts.node_id, place=self._place_of[member.id])
                for member in self.worker_group.all
            ),
            fits=layouts_that_fit(
                self._config,
                self._data.model,
                facts=[member.facts for member in self.worker_group.all],
                longest_tokens=self._data.longest_tokens,
            ),
            active=self.ids,
            num_stages=self._cluster.num_stages if self._cluster else 1,
            leaving={node: now_s + (at_s or epoch_s) - epoch_s for node, at_s in self._nodes.draining.items()},
            starting_since_s=self._pending.requested_s,
            replacing_since_s=self._pending.replacing_since_s,
            losses=self._losses,
            failure=failure,
            setbacks=self._setbacks,
            waiting_since_s=waiting_since_s,
        )
