"""The actor that holds copies of other nodes' shards, one a node.

It loads neither torch nor the model library: starting it takes little time, and it keeps little memory but the
copies.

Who keeps whose copies: one keeper a node, which holds those of the node before it in a ring.
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
from rayfcp.cluster.workers.lifetime import KEEPER, OrphanWatch, actor_name
from rayfcp.cluster.workers.members import Member, keep_alive
from rayfcp.config import Config
from rayfcp.execute.state.copies import HeldCopies, Wanted
from rayfcp.values import ShardHeader, StateId

if TYPE_CHECKING:
    import numpy as np


THREADS = 4


class Keeper:
    """Copies in the memory of one node. Several threads call it, in any order."""

    def __init__(self, *, orphan_s: float) -> None:
        self._copies = HeldCopies()
        self._born: dict[int, str] = {}
        self._watch = OrphanWatch(orphan_s)

    def open(self) -> str:
        """The node it is on."""
        return ray.get_runtime_context().get_node_id()

    def pid(self) -> int:
        return os.getpid()

    def beat(self) -> int:
        """Sign of life; bytes that the copies take."""
        self._watch.heard()
        return self._copies.num_bytes

    def begin(
        self, header: ShardHeader, *, offset: int, data: "np.ndarray", checksum: int, drop: StateId | None
    ) -> bool:
        """A new copy, with its first bytes, `data` from byte `offset` on; before, copies older than `drop` go.
        True: the copy is complete.

        Raises:
            ValueError: `data` is not what was sent, or lies outside the copy, which is dropped.
        """
        self._watch.heard()
        if drop is not None:
            self._copies.drop_older(drop)
        if not self._copies.begin(header):
            return True
        return self._copies.write(header.state, header.number, offset=offset, data=data, checksum=checksum)

    def write(self, state: StateId, number: int, *, offset: int, data: "np.ndarray", checksum: int) -> bool:
        """Further bytes of a copy, in any order. True: the copy is complete.

        Raises:
            ValueError: as `begin`.
            CopyGoneError: the copy was dropped meanwhile.
        """
        self._watch.heard()
        return self._copies.write(state, number, offset=offset, data=data, checksum=checksum)

    def headers(self) -> tuple[ShardHeader, ...]:
        """Of the copies that are complete."""
        self._watch.heard()
        return self._copies.headers()

    def pieces(self, state: StateId, number: int, *, wanted: Sequence[Wanted]) -> "list[np.ndarray]":
        """Parts of a copy; see `HeldCopies.pieces`."""
        self._watch.heard()
        return self._copies.pieces(state, number, wanted=wanted)

    def drop_copies(self) -> None:
        self._watch.heard()
        self._copies.drop_all()

    def watch(self, pids: Sequence[int]) -> None:
        """Processes on this node that `kill` may end: these and no others."""
        self._watch.heard()
        self._born = {pid: born(pid) for pid in pids}

    def kill(self, pid: int) -> bool:
        """SIGKILL to a process that it watches, which may be stopped; False if that is gone already.

        Raises:
            ValueError: a process that is not watched.
        """
        self._watch.heard()
        if pid not in self._born:
            raise ValueError(f"process {pid} is not watched; watch it first")
        if not self._born[pid] or born(pid) != self._born[pid]:
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return True
        return False


def born(pid: int) -> str:
    """When a process started, in ticks of the kernel, so that another with the same number is told apart; "?" where
    the system does not say, empty if there is no such process."""
    path = Path(f"/proc/{pid}/stat")
    try:
        # The name in parentheses may hold spaces; the 20th field after it is the time.
        return path.read_text().rpartition(")")[2].split()[19]
    except FileNotFoundError:
        return "" if Path("/proc/self").exists() else "?"
    except ProcessLookupError:
        return ""


END_S = 5.0
"""How long the end waits for processes that keepers were told to kill."""


def ring(nodes: Iterable[str]) -> dict[str, str]:
    """Whose keeper holds a node's copies: the next node's in the order of ids, the first after the last; its own if
    there is no other.

    >>> ring(["c", "a", "b"])
    {'a': 'b', 'b': 'c', 'c': 'a'}
    """
    order = sorted(set(nodes))
    return dict(zip(order, [*order[1:], *order[:1]], strict=True))


class Keeping:
    """The keepers of a run. They belong to nobody, and are kept alive until ended.

    Args:
        run_key: of the run, for their names.
        adopted: keepers by node that live already.

    `keepers`: actors by their nodes.
    """

    def __init__(
        self, config: Config, *, runtime: Runtime, run_key: str, adopted: Mapping[str, Any] | None = None
    ) -> None:
        self._runtime, self._orphan_s, self._run_key = runtime, config.elastic.orphan_s, run_key
        self.keepers: dict[str, Any] = dict(adopted or {})
        self._ring: dict[str, str] = {}
        self._told: dict[str, Any] = {}
        self._telling: list[Any] = []
        self._kills: list[Any] = []
        self._alive = keep_alive(runtime, self._orphan_s, handles=lambda: list(self.keepers.values()))

    def cover(self, members: Sequence[Member], *, avoid: Iterable[str] = ()) -> None:
        """Keepers for the nodes of these members, new ones where there are none, and each member told which is its
        own. Does not wait for them, see `await_told`. Nodes to `avoid`, such as those that leave, keep nothing unless
        no other is there.

        Keepers of other nodes stay, with what they hold, until `forget` or `end`.
        """
        nodes = sorted({member.facts.node_id for member in members})
        stay = set(nodes) - set(avoid)
        # Who leaves hands its copies to those who stay.
        order = ring(stay or nodes)
        self._ring = {node: order.get(node) or next(iter(order)) for node in nodes}
        for node in nodes:  # also where nothing is kept: a keeper ends processes that hang
            if node not in self.keepers:
                self.keepers[node] = self._launch(node)
        pids = defaultdict(list)
        self._telling = []
        for member in members:
            pids[member.facts.node_id].append(member.facts.pid)
            self._tell(member)
        for node, found in pids.items():
            self.keepers[node].watch.remote(found)

    def await_told(self, *, timeout_s: float) -> None:
        """Until all members use the keepers that `cover` gave them: before, what they say is of earlier ones."""
        self._runtime.wait_all(self._telling, timeout_s=timeout_s)

    def keeper_of(self, node_id: str) -> Any:
        """Who keeps the copies of this node's devices."""
        return self.keepers[self._ring[node_id]]

    def replace(self, nodes: Iterable[str]) -> None:
        """The keepers of the copies of these nodes' devices are lost: ended, and forgotten until `cover`."""
        for keeper_node in sorted({self._ring[node] for node in nodes if node in self._ring}):
            self.forget(keeper_node)

    def forget(self, node_id: str) -> None:
        """End the keeper of a node that is gone or needs another; what it held is lost."""
        keeper = self.keepers.pop(node_id, None)
        if keeper is not None:
            self._runtime.end(keeper)

    def drop_copies(self) -> None:
        """All keepers forget all that they hold."""
        for keeper in self.keepers.values():
            keeper.drop_copies.remote()

    def kill(self, facts: DeviceFacts) -> None:
        """SIGKILL to a worker's process on its node, if that has a keeper. Does not wait."""
        keeper = self.keepers.get(facts.node_id)
        if keeper is not None:
            self._kills.append(keeper.kill.remote(facts.pid))

    def end(self) -> None:
        """End all keepers; the copies are gone."""
        self._alive.close()
        self._runtime.wait_all(self._kills, timeout_s=END_S)
        for node in list(self.keepers):
            self.forget(node)

    def _launch(self, node: str) -> Any:
        name = actor_name(self._run_key, KEEPER, id=self._runtime.new_id())
        return self._runtime.start(ActorSpec(role=Role.STORE, name=name, node_id=node), orphan_s=self._orphan_s)

    def _tell(self, member: Member) -> None:
        keeper = self.keeper_of(member.facts.node_id)
        if self._told.get(member.id) is not keeper:
            self._told[member.id] = keeper
            self._telling.append(member.handle.use_keeper.remote(keeper))


def keeper_id(node: str) -> str:
    """Names a node's keeper among the holders of copies."""
    return f"keeper on {node}"
