"""Nodes of the cluster, looked at now and then."""

from rayfcp.cluster.runtime import NodeView, Runtime


class NodeWatch:
    """Living and draining nodes, as seen at most `every_s` seconds ago. Ended by `end`."""

    def __init__(self, runtime: Runtime, *, every_s: float) -> None:
        self._runtime = runtime
        self.view: NodeView = runtime.nodes()
        self.end = runtime.every(every_s, self.look, name="node watch")

    def look(self) -> NodeView:
        """Look now."""
        self.view = self._runtime.nodes()
        return self.view
