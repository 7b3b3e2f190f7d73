"""Clusters for runs with faults: one node, or nodes that can be taken away, drained and given back."""

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partialmethod
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

import pytest
import ray

from tests.chaos.leftovers import nodes_alive
from tests.forks.ask import SOCKET
from tests.forks.cluster import ASK, serving
from tests.forks.patience import nodes_may_take_long

HEAD_CPUS = 2
"""CPUs of the first node: one for the controller, one for a planner."""


class OneNode:
    """A Ray of one node."""

    removable: tuple[str, ...] = ()

    def __init__(self, *, num_cpus: int) -> None:
        self._num_cpus = num_cpus

    def __enter__(self) -> Self:
        _init(address="local", num_cpus=self._num_cpus, include_dashboard=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ray.shutdown()


class ManyNodes:
    """A first node, and nodes of one CPU each, all raylets of this machine. `forks`: their workers are forks of one
    process, which start in a tenth of the time; see `tests.forks`."""

    def __init__(self, *, num_nodes: int, head_cpus: int = HEAD_CPUS, forks: bool = False) -> None:
        self._num_nodes, self._head_cpus, self._forks = num_nodes, head_cpus, forks

    def __enter__(self) -> Self:
        with ExitStack() as ending:
            nodes_may_take_long(ending.enter_context(pytest.MonkeyPatch.context()))
            if self._forks:
                ending.enter_context(_workers_are_forks())
            self._start()
            ending.callback(self._stop)
            self._ending = ending.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.close()

    def _start(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": self._head_cpus, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
        try:
            self._nodes = {node.node_id: node for node in (self._add() for _ in range(self._num_nodes))}
            _init(address=self._cluster.address)
        except BaseException:
            self._cluster.shutdown()
            raise

    def _stop(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()

    @property
    def removable(self) -> tuple[str, ...]:
        """Ids of the nodes that are there but for the first."""
        return tuple(self._nodes)

    def join(self) -> str:
        """Add a node and return its id."""
        node = self._add()
        self._nodes[node.node_id] = node
        return node.node_id

    def remove(self, node_id: str) -> None:
        """Remove the node as a power failure does, without a grace period."""
        self._cluster.remove_node(self._nodes.pop(node_id), allow_graceful=False)

    def announce(self, node_id: str, *, in_s: float) -> None:
        """Announce to Ray that the node will be preempted in `in_s` seconds."""
        from ray._raylet import GcsClient
        from ray.core.generated import autoscaler_pb2

        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        deadline_ms = int((time.time() + in_s) * 1000)
        accepted, why = GcsClient(address=self._cluster.address).drain_node(node_id, reason, "preempted", deadline_ms)
        if not accepted:
            raise RuntimeError(f"node {node_id} is not drained: {why}")

    def drained(self, node_id: str) -> bool:
        """True once Ray has removed the node."""
        return node_id not in nodes_alive()

    def _add(self) -> Any:
        return self._cluster.add_node(num_cpus=1)


@contextmanager
def _workers_are_forks() -> Iterator[None]:
    """Have workers forked on the nodes that this process starts inside the context."""
    from ray._private.parameter import RayParams

    with (
        TemporaryDirectory(prefix="rayfcp-", dir="/tmp") as folder,
        serving(f"{folder}/forks"),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv(SOCKET, f"{folder}/forks")
        patch.setattr(RayParams, "__init__", partialmethod(RayParams.__init__, setup_worker_path=str(ASK)))
        yield


def _init(**options: Any) -> None:
    ray.init(logging_level=logging.ERROR, log_to_driver=False, **options)
