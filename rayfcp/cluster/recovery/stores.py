"""The copy stores of a run: one actor per node, which sends the copies of its node to the next one in a ring, and
writes them to checkpoints."""

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rayfcp.cluster.facts.devices import DeviceFacts, Member
from rayfcp.cluster.facts.nodes import NodeWatch
from rayfcp.cluster.recovery.history import History
from rayfcp.cluster.recovery.store import StoreFacts
from rayfcp.cluster.runtime import ActorSpec, CallError, Role, Runtime
from rayfcp.cluster.runtime.lifetime import STORE, actor_name, keep_alive
from rayfcp.cluster.workers.group import ANSWER_S
from rayfcp.cluster.workers.starting import end_stores
from rayfcp.config import Config
from rayfcp.elastic.recoverable import RecoverableState, ShardCopy, newest
from rayfcp.values import KeptStates, StateId

logger = logging.getLogger(__name__)

LOOK_S = 0.2
"""Between two looks at their answers."""

END_S = 5.0
"""Time for copy stores to kill processes before they are ended."""


def ring(nodes: Iterable[str]) -> dict[str, str]:
    """Node whose store holds each node's copies: the next one in the order of ids, cyclically.

    >>> ring(["c", "a", "b"])
    {'a': 'b', 'b': 'c', 'c': 'a'}
    """
    order = sorted(set(nodes))
    return dict(zip(order, [*order[1:], *order[:1]], strict=True))


class CopyStores:
    """The copy stores of a run, by node in `stores`. No process owns them; they are kept alive until ended.

    Args:
        history: tells which copies belong to the run.
        nodes: living and draining nodes.
        adopted: stores of a lost controller, by node.
    """

    def __init__(
        self,
        config: Config,
        *,
        runtime: Runtime,
        run_key: str,
        history: History,
        nodes: NodeWatch,
        adopted: Mapping[str, Any] | None = None,
    ) -> None:
        self._config, self._runtime, self._run_key = config, runtime, run_key
        self.history, self._nodes = history, nodes
        self.stores: dict[str, Any] = dict(adopted or {})
        self._opening = {node: store.open.remote() for node, store in self.stores.items()}
        self._ring: dict[str, str] = {}
        self._kills: list[Any] = []
        self._stop_beats = keep_alive(runtime, config.elastic.orphan_s, handles=lambda: list(self.stores.values()))

    def assign(self, members: Sequence[Member]) -> None:
        """Start stores on the nodes of these members where there are none, which also kill processes that hang, and let
        each node's copies go to another node. Draining nodes receive copies only if there are no others."""
        nodes = sorted({member.facts.node_id for member in members})
        # Draining nodes send their copies to those that stay.
        order = ring(set(nodes) - self._nodes.view.draining.keys() or nodes)
        self._ring = {node: order.get(node) or next(iter(order)) for node in nodes}
        self._start(nodes)
        pids = defaultdict(list)
        for member in members:
            pids[member.facts.node_id].append(member.facts.pid)
        for node, found in pids.items():
            self.stores[node].watch.remote(found)

    def sends(self, nodes: Iterable[str]) -> bool:
        """Whether one of these nodes sends its copies to another."""
        return any(self._ring[node] != node for node in nodes)

    def await_opened(self, *, timeout_s: float) -> None:
        """Wait until all stores receive copies."""
        self._runtime.wait_all(list(self._opening.values()), timeout_s=timeout_s)

    def push(self, state: StateId, numbers: Mapping[str, Sequence[int]]) -> list[Any] | None:
        """Make each node send its devices' copies to its target: references of the seconds that it took. None if a
        store has not opened yet.

        Raises:
            CallError: a store could not be opened.
        """
        targets = {node: self._ring[node] for node in numbers if self._ring.get(node, node) != node}
        opening = {node: self._opening[node] for node in targets.values()}
        if len(self._runtime.wait_all(list(opening.values()), timeout_s=0)) < len(opening):
            return None
        peers: dict[str, StoreFacts] = {node: self._runtime.get(ref) for node, ref in opening.items()}
        return [
            self.stores[node].push.remote(state, list(numbers[node]), to=peers[target].peer)
            for node, target in targets.items()
        ]

    def save(self, state: StateId, numbers: Mapping[str, Sequence[int]], *, folder: str) -> dict[Any, str]:
        """Make each node write its devices' copies to a checkpoint: references of the parts, with the nodes."""
        self._start(numbers)
        return {self.stores[node].save.remote(state, list(all), folder=folder): node for node, all in numbers.items()}

    def drop(self, kept: KeptStates) -> None:
        """Drop copies of all other states that were received, or whose writers are dead."""
        for store in self.stores.values():
            store.drop.remote(kept)

    def newest_state(self, members: Sequence[Member], *, up_to: int) -> RecoverableState:
        """Newest state of the run of at most `up_to` steps in the memory of all living nodes that had devices. Any
        process on a node answers for it; waits for one of each node, `elastic.hang_min_s` at most."""
        alive = self._runtime.nodes().alive
        silent = ({member.facts.node_id for member in members} | self._ring.keys() | self.stores.keys()) & alive
        self._start(sorted(silent))
        holders = [(node, store) for node, store in self.stores.items() if node in silent]
        holders += [(member.facts.node_id, member.handle) for member in members if member.facts.node_id in silent]
        asked = {holder.shard_copies.remote(): (node, holder) for node, holder in holders}
        copies: list[ShardCopy] = []
        end_s = self._runtime.now_s() + self._config.elastic.hang_min_s
        while silent and self._runtime.now_s() < end_s:
            for ref in self._runtime.wait(list(asked), timeout_s=LOOK_S):
                node, holder = asked.pop(ref)
                try:
                    found = self._runtime.get(ref)
                except CallError:
                    if holder is self.stores.get(node):
                        self.forget(node)
                    continue
                if node in silent:
                    silent.discard(node)
                    copies += found
            silent &= self._runtime.nodes().alive
            for node in sorted(silent - {each for each, _ in asked.values()}):  # all of its processes are dead
                self._start([node])
                asked[self.stores[node].shard_copies.remote()] = (node, self.stores[node])
        for node in sorted(silent & self.stores.keys()):
            logger.warning("the copy store on %s does not answer", node)
            self.forget(node)
        state = newest(copies, up_to=up_to, belongs=self.history.has)
        self.history.see(state.generation)
        return state

    def end_lost(self) -> bool:
        """End stores that do not answer, and those of lost nodes; `assign` replaces them. Return True if there were
        any."""
        alive, beats = self._nodes.look().alive, {store.beat.remote(): node for node, store in self.stores.items()}
        done = self._runtime.wait_all(list(beats), timeout_s=ANSWER_S)
        living = set()
        for ref in done:
            with suppress(CallError):
                self._runtime.get(ref)
                living.add(beats[ref])
        lost = [each for each in self.stores if each not in living & alive]
        for node in lost:
            self.forget(node)
        return bool(lost)

    def forget(self, node_id: str) -> None:
        """End a node's store; the copies stay."""
        store = self.stores.pop(node_id, None)
        self._opening.pop(node_id, None)
        if store is not None:
            self._runtime.end(store)

    def replace(self, node_id: str, *, members: Sequence[Member]) -> None:
        """End a store that does not work; a node that is alive gets another."""
        self.forget(node_id)
        if node_id in self._nodes.view.alive:
            self.assign(members)

    @property
    def targets_live(self) -> bool:
        """True if all nodes that receive copies are alive."""
        return set(self._ring.values()) <= self._nodes.view.alive

    def drop_copies(self, members: Sequence[Member]) -> None:
        """Drop all copies that were made up to now; waits for these members, which make them."""
        up_to = self.history.newest
        calls = [member.handle.drop_copies.remote(up_to) for member in members]
        self._runtime.wait_all(calls, timeout_s=ANSWER_S)
        for store in self.stores.values():
            store.drop_copies.remote(up_to)

    def kill(self, facts: DeviceFacts) -> None:
        """Send SIGKILL to a worker's process through the store on its node, without waiting."""
        store = self.stores.get(facts.node_id)
        if store is not None:
            self._kills.append(store.kill.remote(facts.pid))

    def end(self) -> None:
        """Remove all copies, and end all stores."""
        self._stop_beats()
        self._runtime.wait_all(self._kills, timeout_s=END_S)
        end_stores(self._runtime, self.stores.values())
        self.stores.clear()

    def _start(self, nodes: Iterable[str]) -> None:
        for node in nodes:
            if node not in self.stores:
                name = actor_name(self._run_key, STORE, id=self._runtime.new_id())
                spec = ActorSpec(role=Role.STORE, name=name, node_id=node)
                self.stores[node] = self._runtime.start(
                    spec, self._config, run=copies_name(self._run_key, self.history)
                )
                self._opening[node] = self.stores[node].open.remote()


def copies_name(run_key: str, history: History) -> str:
    """Name of a run's folders in shared memory."""
    return f"{run_key}-{history.run}"
