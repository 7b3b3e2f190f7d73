"""Snapshot stores: one actor per node, which holds copies of the shards of the node before it in a ring.

The actor loads neither torch nor the model library, so that it starts quickly and needs little memory.
"""

import os
import signal
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from rayfcp.cluster.runtime import ActorSpec, Role, Runtime
from rayfcp.cluster.workers.facts import DeviceFacts
from rayfcp.cluster.workers.lifetime import STORE, OrphanWatch, actor_name
from rayfcp.cluster.workers.members import Member, keep_alive
from rayfcp.config import Config
from rayfcp.execute.state.copies import HeldCopies, Wanted
from rayfcp.values import ShardHeader, StateId

if TYPE_CHECKING:
    import numpy as np

THREADS = 4


class SnapshotStore:
    """Actor that holds copies in the memory of one node. Thread-safe."""

    def __init__(self, *, orphan_s: float) -> None:
        self._copies = HeldCopies()
        self._born: dict[int, str] = {}
        self._watch = OrphanWatch(orphan_s)

    def open(self) -> str:
        """Return its node."""
        return ray.get_runtime_context().get_node_id()

    def pid(self) -> int:
        return os.getpid()

    def beat(self) -> int:
        """Heartbeat: bytes of all copies."""
        self._watch.on_call()
        return self._copies.num_bytes

    def begin(
        self, header: ShardHeader, *, offset: int, data: "np.ndarray", checksum: int, drop: StateId | None
    ) -> bool:
        """Begin a copy with its first bytes, `data` at byte `offset`, after dropping copies older than `drop`. Return
        True if the copy is complete.

        Raises:
            ValueError: `data` has a wrong checksum or lies outside the copy, which is dropped.
        """
        self._watch.on_call()
        if drop is not None:
            self._copies.drop_older(drop)
        if not self._copies.begin(header):
            return True
        return self._copies.write(header.state, header.number, offset=offset, data=data, checksum=checksum)

    def write(self, state: StateId, number: int, *, offset: int, data: "np.ndarray", checksum: int) -> bool:
        """Write further bytes of a copy, in any order. Return True if the copy is complete.

        Raises:
            ValueError: as `begin`.
            CopyGoneError: the copy was dropped meanwhile.
        """
        self._watch.on_call()
        return self._copies.write(state, number, offset=offset, data=data, checksum=checksum)

    def headers(self) -> tuple[ShardHeader, ...]:
        """Headers of the complete copies."""
        self._watch.on_call()
        return self._copies.headers()

    def pieces(self, state: StateId, number: int, *, wanted: Sequence[Wanted]) -> "list[np.ndarray]":
        """Parts of a copy; see `HeldCopies.pieces`."""
        self._watch.on_call()
        return self._copies.pieces(state, number, wanted=wanted)

    def drop_copies(self) -> None:
        self._watch.on_call()
        self._copies.drop_all()

    def watch(self, pids: Sequence[int]) -> None:
        """Set the processes on this node that `kill` may end."""
        self._watch.on_call()
        self._born = {pid: born(pid) for pid in pids}

    def kill(self, pid: int) -> bool:
        """Send SIGKILL to a watched process, which may be stopped; False if it is gone already.

        Raises:
            ValueError: a process that is not watched.
        """
        self._watch.on_call()
        if pid not in self._born:
            raise ValueError(f"process {pid} is not watched; watch it first")
        if not self._born[pid] or born(pid) != self._born[pid]:
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return True
        return False


def born(pid: int) -> str:
    """Start time of a process in kernel ticks, which distinguishes processes with the same pid; "?" on systems without
    /proc, empty without such a process."""
    path = Path(f"/proc/{pid}/stat")
    try:
        # The name in parentheses may hold spaces; the 20th field after it is the time.
        return path.read_text().rpartition(")")[2].split()[19]
    except FileNotFoundError:
        return "" if Path("/proc/self").exists() else "?"
    except ProcessLookupError:
        return ""


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
        self._runtime, self._orphan_s, self._run_key = runtime, config.elastic.orphan_s, run_key
        self.stores: dict[str, Any] = dict(adopted or {})
        self._ring: dict[str, str] = {}
        self._assigned: dict[str, Any] = {}
        self._assigning: list[Any] = []
        self._kills: list[Any] = []
        self._alive = keep_alive(runtime, self._orphan_s, handles=lambda: list(self.stores.values()))

    def assign(self, members: Sequence[Member], *, avoid: Iterable[str] = ()) -> None:
        """Start stores on the nodes of these members where there are none, and tell each member which one to use,
        without waiting (`await_assigned`). Nodes to `avoid`, such as draining ones, hold copies only if there are no
        others.

        Stores of other nodes keep their copies until `forget` or `end`.
        """
        nodes = sorted({member.facts.node_id for member in members})
        stay = set(nodes) - set(avoid)
        # Draining nodes send their copies to those that stay.
        order = ring(stay or nodes)
        self._ring = {node: order.get(node) or next(iter(order)) for node in nodes}
        for node in nodes:  # also without copies: a store ends processes that hang
            if node not in self.stores:
                self.stores[node] = self._launch(node)
        pids = defaultdict(list)
        self._assigning = []
        for member in members:
            pids[member.facts.node_id].append(member.facts.pid)
            self._assign(member)
        for node, found in pids.items():
            self.stores[node].watch.remote(found)

    def await_assigned(self, *, timeout_s: float) -> None:
        """Wait until all members use the stores of `assign`: before, their reports refer to earlier ones."""
        self._runtime.wait_all(self._assigning, timeout_s=timeout_s)

    def store_of(self, node_id: str) -> Any:
        """Store that holds the copies of this node's devices."""
        return self.stores[self._ring[node_id]]

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
        self._alive.close()
        self._runtime.wait_all(self._kills, timeout_s=END_S)
        for node in list(self.stores):
            self.forget(node)

    def _launch(self, node: str) -> Any:
        name = actor_name(self._run_key, STORE, id=self._runtime.new_id())
        return self._runtime.start(ActorSpec(role=Role.STORE, name=name, node_id=node), orphan_s=self._orphan_s)

    def _assign(self, member: Member) -> None:
        store = self.store_of(member.facts.node_id)
        if self._assigned.get(member.id) is not store:
            self._assigned[member.id] = store
            self._assigning.append(member.handle.use_store.remote(store))


def store_id(node: str) -> str:
    """Id of a node's store among the holders of copies."""
    return f"snapshot store on {node}"
