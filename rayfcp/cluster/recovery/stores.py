"""The snapshot stores of a run: one actor per node, with copies of the shards of the node before it in a ring."""

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rayfcp.cluster.runtime import ActorSpec, CallError, Role, Runtime
from rayfcp.cluster.workers.facts import DeviceFacts, Member
from rayfcp.cluster.workers.lifetime import STORE, actor_name
from rayfcp.cluster.workers.starting import keep_alive
from rayfcp.config import Config
from rayfcp.elastic.recoverable import RecoverableState, ShardCopy, newest

logger = logging.getLogger(__name__)

ANSWER_S = 5.0
"""Time for workers and snapshot stores to list their copies, for which they have threads of their own."""

END_S = 5.0
"""Time for snapshot stores to kill processes before they are ended."""


def ring(nodes: Iterable[str]) -> dict[str, str]:
    """Node whose store holds each node's copies: the next one in the order of ids, cyclically.

    >>> ring(["c", "a", "b"])
    {'a': 'b', 'b': 'c', 'c': 'a'}
    """
    order = sorted(set(nodes))
    return dict(zip(order, [*order[1:], *order[:1]], strict=True))


class SnapshotStores:
    """The snapshot stores of a run, by node in `stores`. No process owns them; they are kept alive until ended.

    Args:
        adopted: stores of a lost controller, by node.
    """

    def __init__(
        self, config: Config, *, runtime: Runtime, run_key: str, adopted: Mapping[str, Any] | None = None
    ) -> None:
        self._runtime, self._elastic, self._run_key = runtime, config.elastic, run_key
        self.stores: dict[str, Any] = dict(adopted or {})
        self._ring: dict[str, str] = {}
        self._assigned: dict[str, Any] = {}
        self._assigning: list[Any] = []
        self._kills: list[Any] = []
        self._stop_beats = keep_alive(runtime, self._elastic.orphan_s, handles=lambda: list(self.stores.values()))

    def assign(self, members: Sequence[Member], *, avoid: Iterable[str] = ()) -> None:
        """Start stores on the nodes of these members where there are none, and assign one to each member, without
        waiting (`await_assigned`). Nodes to `avoid`, such as draining ones, hold copies only if there are no others.

        Stores of other nodes keep their copies until `forget` or `end`.
        """
        nodes = sorted({member.facts.node_id for member in members})
        # Draining nodes send their copies to those that stay.
        order = ring(set(nodes) - set(avoid) or nodes)
        self._ring = {node: order.get(node) or next(iter(order)) for node in nodes}
        for node in nodes:  # also without copies: a store ends processes that hang
            if node not in self.stores:
                name = actor_name(self._run_key, STORE, id=self._runtime.new_id())
                spec = ActorSpec(role=Role.STORE, name=name, node_id=node)
                self.stores[node] = self._runtime.start(spec, orphan_s=self._elastic.orphan_s)
        pids = defaultdict(list)
        self._assigning = []
        for member in members:
            pids[member.facts.node_id].append(member.facts.pid)
            store = self.store_of(member.facts.node_id)
            if self._assigned.get(member.id) is not store:
                self._assigned[member.id] = store
                self._assigning.append(member.handle.use_store.remote(store))
        for node, found in pids.items():
            self.stores[node].watch.remote(found)

    def await_assigned(self) -> None:
        """Wait until all members use the stores of `assign`: before, their reports refer to earlier ones."""
        self._runtime.wait_all(self._assigning, timeout_s=ANSWER_S)

    def store_of(self, node_id: str) -> Any:
        """Store that holds the copies of this node's devices."""
        return self.stores[self._ring[node_id]]

    def newest_state(self, members: Sequence[Member], *, up_to: int) -> RecoverableState:
        """Newest state of at most `up_to` steps in the memory of these members and all stores. After `ANSWER_S` waits
        for further answers only while no state is complete, for `elastic.hang_min_s` at most."""
        stores = {f"snapshot store on {node}": node for node in self.stores}
        holders = {each.id: each.handle for each in members} | {id: self.stores[node] for id, node in stores.items()}
        pending = {handle.headers.remote(): id for id, handle in holders.items()}
        silent, copies = set(holders), []
        end_s = self._runtime.now_s() + self._elastic.hang_min_s
        while True:
            for ref in self._runtime.wait_all(list(pending), timeout_s=ANSWER_S):
                id = pending.pop(ref)
                with suppress(CallError):
                    copies += [
                        ShardCopy(header=header, holder=holders[id], holder_id=id, is_store=id in stores)
                        for header in self._runtime.get(ref)
                    ]
                    silent.discard(id)
            found = newest(copies, up_to=up_to)
            if not pending or found.state is not None or self._runtime.now_s() > end_s:
                break
        for id in sorted(silent & stores.keys()):
            logger.warning("the %s does not answer", id)
            self.forget(stores[id])
        return found

    def end_lost(self, nodes: Iterable[str]) -> None:
        """End the lost stores of these nodes' copies; `assign` replaces them."""
        for store_node in sorted({self._ring[node] for node in nodes if node in self._ring}):
            self.forget(store_node)

    def forget(self, node_id: str) -> None:
        """End a node's store; its copies are lost."""
        store = self.stores.pop(node_id, None)
        if store is not None:
            self._runtime.end(store)

    def drop_copies(self) -> None:
        """Drop all copies in all stores."""
        for store in self.stores.values():
            store.drop_copies.remote()

    def kill(self, facts: DeviceFacts) -> None:
        """Send SIGKILL to a worker's process through the store on its node, without waiting."""
        store = self.stores.get(facts.node_id)
        if store is not None:
            self._kills.append(store.kill.remote(facts.pid))

    def end(self) -> None:
        """End all stores; the copies are lost."""
        self._stop_beats()
        self._runtime.wait_all(self._kills, timeout_s=END_S)
        for node in list(self.stores):
            self.forget(node)
