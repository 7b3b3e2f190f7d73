"""Nodes of the cluster: which live, which were told to leave."""

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import ray

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """Ids of nodes that live, draining ones included. `draining`: when these will be gone, in seconds of `time.time`;
    None where nobody said."""

    alive: frozenset[str] = frozenset()
    draining: Mapping[str, float | None] = field(default_factory=lambda: MappingProxyType({}))


def look() -> NodeView:
    """The nodes as the cluster's control service has them right now.

    Raises:
        RayError: it does not answer.
    """
    alive = frozenset(node["NodeID"] for node in ray.nodes() if node["Alive"])
    # Ray offers drain notices to its own libraries only, by this name.
    deadlines = ray._private.state.state.get_draining_nodes()
    draining = {node: deadline_ms / 1000 if deadline_ms > 0 else None for node, deadline_ms in deadlines.items()}
    return NodeView(alive=alive, draining=MappingProxyType({node: draining[node] for node in draining.keys() & alive}))


class NodeWatch:
    """Looks every `every_s`, in a thread of its own, until closed. `view` is what it saw last."""

    def __init__(self, every_s: float) -> None:
        self.view = look()
        self._every_s, self._closing = every_s, threading.Event()
        self._thread = threading.Thread(target=self._run, name="node watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(self._every_s):
            try:
                self.view = look()
            except Exception as error:  # whatever it is, the last view stays
                logger.warning("nodes cannot be listed: %s", error)
