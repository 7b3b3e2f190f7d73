"""Devices of a run through its generations: which exist, which are in use, and how a new generation is formed."""

import logging
from collections.abc import Callable
from typing import Any

from rayfcp.cluster.dataset import ModelData
from rayfcp.cluster.facts.capacity import cluster_spec, layouts_that_fit
from rayfcp.cluster.facts.devices import with_stages
from rayfcp.cluster.facts.nodes import NodeWatch
from rayfcp.cluster.recovery.stores import CopyStores
from rayfcp.cluster.runtime import Flag
from rayfcp.cluster.session.losses import LossRecord
from rayfcp.cluster.workers.calls import GroupFailedError
from rayfcp.cluster.workers.group import WorkerGroup, join_devices
from rayfcp.cluster.workers.starting import PendingWorkers, WorkerStart
from rayfcp.config import Config
from rayfcp.elastic.facts import Cause, Device, Facts, Failure, Limits, Setbacks
from rayfcp.elastic.size import decide
from rayfcp.execute.reports import Joined
from rayfcp.values import ClusterSpec, Decision, Move

logger = logging.getLogger(__name__)

REPLACING_LOOK_S = 0.1
"""Between two looks at fresh processes that a recovery waits for."""


class Devices:
    """Workers in use, standing by and pending, and the generations that they form. Decisions on them are those of
    `rayfcp.elastic.size.decide`: `facts` are gathered for it, `upkeep` and `form` carry it out.

    Methods that call all devices raise `GroupFailedError`.
    """

    def __init__(
        self,
        config: Config,
        data: ModelData,
        *,
        start: WorkerStart,
        workers: WorkerGroup,
        stores: CopyStores,
        nodes: NodeWatch,
        losses: LossRecord,
        log: Callable[[str], None],
    ) -> None:
        self._config, self._data, self._log = config, data, log
        self._start, self._pending, self.workers = start, PendingWorkers(start), workers
        self.stores, self._nodes, self.losses = stores, nodes, losses
        self._rendezvous: Any = None
        self._warned: set[str] = set()

    def upkeep(self, *, failure: Failure | None = None) -> None:
        """Let new devices stand by. Request missing ones, and start processes that stand by, but not during a recovery,
        which needs the CPUs that starting processes would take."""
        self.workers.standby += self._pending.ready()
        self.losses.know(self.workers.all)
        if failure is None and self.losses.setbacks == Setbacks():
            if self._config.elastic.grow:
                self._request_missing()
            if self.workers.is_formed:
                self._start.keep_standbys(self.workers.members)

    @property
    def are_unchanged(self) -> bool:
        """True if no device in use is on a draining node, and none stands by."""
        return self.workers.is_formed and not self._draining_in_use() and not self.workers.standby

    def next_move(self, *, failure: Failure | None = None, waiting_since_s: float | None = None) -> Decision:
        """Decide by the facts of now."""
        facts = self.facts(failure=failure, waiting_since_s=waiting_since_s)
        return decide(facts, now_s=self._start.runtime.now_s())

    def await_devices(self, failure: Failure | None, *, stopping: Flag) -> Decision:
        """Wait for devices after a loss, or before the first generation; return the first decision other than WAIT."""
        since_s: float | None = None
        logged = ""
        while True:
            self.upkeep(failure=failure)
            decision = self.next_move(failure=failure, waiting_since_s=since_s)
            if decision.what is not Move.WAIT or stopping.is_set():
                return decision
            if since_s is None:
                since_s = self._start.runtime.now_s()
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
        """Return the cluster of the generation that a decision asks for."""
        member_of = {member.id: member for member in self.workers.all}
        return cluster_spec(
            with_stages(self._config, decision.num_stages),
            self._data.model,
            facts=[member_of[each].facts for each in decision.devices],
            generation=self.stores.history.newest + 1,
        )

    def form(self, decision: Decision, cluster: ClusterSpec, *, empty: bool) -> list[Joined]:
        """Join the decision's devices; those in use before have left or been aborted. `empty`: without weights, which
        are loaded later."""
        self.stores.history.see(cluster.generation)
        self.workers.form(cluster, decision.devices)
        if not self._config.elastic.grow:
            self._start.release_vacant()
        # Initial weights of a large model take long: that is no sign of survivors that cannot rebuild.
        most_s = self._config.elastic.rebuild_timeout_s if empty else None
        try:
            self._rendezvous, joined = join_devices(self.workers, cluster, empty=empty, most_s=most_s)
        except GroupFailedError as error:
            self.losses.on_failed_join(error.cause)
            raise
        return joined

    def end_draining_standbys(self) -> None:
        """End the devices that stand by on draining nodes."""
        draining = self._nodes.view.draining
        self.workers.drop([each.id for each in self.workers.standby if each.facts.node_id in draining])

    def on_failure(self, error: GroupFailedError) -> Failure:
        """Record a failure, drop dead members and stores, and let fresh processes replace lost ones."""
        failure = self.losses.on_failure(error, now_s=self._start.runtime.now_s())
        gone = {each.node_id for each in error.lost if each.cause is Cause.NODE}
        for node in sorted(gone - self._nodes.look().alive) if gone else ():
            self.stores.forget(node)
        self.workers.drop_dead()
        self._pending.replace(all=bool(error.replaced) or not self.workers.all)
        return failure

    def newly_draining(self) -> tuple[str, ...]:
        """Return draining nodes with devices in use, each once."""
        new = tuple(sorted(self._draining_in_use() - self._warned))
        self._warned.update(new)
        return new

    def facts(self, *, failure: Failure | None = None, waiting_since_s: float | None = None) -> Facts:
        """Gather what a decision depends on, beside the time."""
        runtime, workers, losses = self._start.runtime, self.workers, self.losses
        epoch_s, now_s = runtime.epoch_s(), runtime.now_s()
        return Facts(
            limits=Limits.of(self._config),
            devices=tuple(
                Device(id=member.id, node_id=member.facts.node_id, place=losses.place_of(member))
                for member in workers.all
            ),
            fits=layouts_that_fit(
                self._config,
                self._data.model,
                facts=[member.facts for member in workers.all],
                longest_tokens=self._data.longest_tokens,
            ),
            active=workers.ids,
            num_stages=workers.cluster.num_stages if workers.is_formed else 1,
            leaving={node: now_s + (at_s or epoch_s) - epoch_s for node, at_s in self._nodes.view.draining.items()},
            starting_since_s=self._pending.requested_s,
            replacing_since_s=self._pending.replacing_since_s,
            losses=losses.losses,
            failure=failure,
            setbacks=losses.setbacks,
            waiting_since_s=waiting_since_s,
        )

    def end(self) -> None:
        """End all workers and copy stores."""
        for end in (self._pending.end, self._nodes.end, self.workers.end, self.stores.end):
            try:
                end()
            except Exception:
                logger.exception("ending devices")

    def _request_missing(self) -> None:
        """Request the devices that are missing; those on draining nodes do not count."""
        staying = [each for each in self.workers.all if each.facts.node_id not in self._nodes.view.draining]
        missing = max(0, Limits.of(self._config).max_devices - len(staying))
        self._pending.want(missing, in_use=len(staying))

    def _draining_in_use(self) -> set[str]:
        return {member.facts.node_id for member in self.workers.members} & self._nodes.view.draining.keys()
