"""A Ray of its own for a benchmark: one node, or a node for each worker, which can be removed."""

import logging
from types import TracebackType
from typing import Any

import ray
from faults import Moment, kill_process

STORE_BYTES = 512 << 20
"""Of each node's object store: nodes of one machine share its memory."""


class BenchCluster:
    """Cluster on which workers run, and a way to lose one of them.

    `kind` worker: one node, and a process is killed. `kind` node: a node for each worker and a first one with
    `others_cpus` for controllers and planners; a worker's node is removed, and a fresh one joins.
    """

    def __init__(self, kind: str, *, workers: int, others_cpus: int) -> None:
        self._kind, self._workers, self._others_cpus = kind, workers, others_cpus
        self._node = {"num_cpus": 1, "object_store_memory": STORE_BYTES}

    def __enter__(self) -> "BenchCluster":
        if self._kind == "worker":
            _init(address="local", num_cpus=self._workers + self._others_cpus, include_dashboard=False)
            return self
        from ray.cluster_utils import Cluster

        head = {"num_cpus": self._others_cpus, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
        self._nodes = [self._cluster.add_node(**self._node) for _ in range(self._workers)]
        self._cluster.wait_for_nodes()
        _init(address=self._cluster.address)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ray.shutdown()
        if self._kind == "node":
            self._cluster.shutdown()

    def can_inject(self, moment: Moment) -> bool:
        """True if the device can be lost: the first node stays."""
        return self._kind == "worker" or any(node.node_id == moment.node_id for node in self._nodes)

    def inject(self, moment: Moment) -> None:
        """The loss of the device, or of its node."""
        if self._kind == "worker":
            kill_process(moment)
            return
        node = next(node for node in self._nodes if node.node_id == moment.node_id)
        self._nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def mend(self) -> None:
        """A fresh node for one that was removed."""
        if self._kind == "node":
            self._nodes.append(self._cluster.add_node(**self._node))


def _init(**options: Any) -> None:
    ray.init(logging_level=logging.ERROR, log_to_driver=False, **options)
