"""Who keeps whose copies: one keeper a node, which holds those of the node before it in a ring."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rayfcp.cluster.facts import DeviceFacts
from rayfcp.cluster.members import Member, keep_alive
from rayfcp.cluster.naming import KEEPER, actor_name
from rayfcp.cluster.runtime import ActorSpec, Role, Runtime
from rayfcp.config import Config

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
