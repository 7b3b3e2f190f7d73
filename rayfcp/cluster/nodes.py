"""Nodes of the cluster: which are alive, which were told to leave."""

from rayfcp.cluster.runtime import Runtime


class NodeWatch:
    """Looks at the nodes every `every_s` until closed. `view` is what it saw last."""

    def __init__(self, runtime: Runtime, *, every_s: float) -> None:
        self._runtime = runtime
        self.view = runtime.nodes()
        self._timer = runtime.every(every_s, self._look, name="node watch")

    def close(self) -> None:
        self._timer.close()

    def _look(self) -> None:
        self.view = self._runtime.nodes()
