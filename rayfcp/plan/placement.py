"""Which ranks a group gets: inside one node where it fits, else over as few nodes as possible."""

from collections.abc import Sequence

from rayfcp.values import ClusterSpec


def place_groups(degrees: Sequence[int], *, cluster: ClusterSpec, ranks_per_node: int) -> list[tuple[int, ...]]:
    """Ranks of each group, ascending within a node; no rank twice.

    `degrees` come largest first and sum to at most `cluster.num_ranks`. A group takes the lowest free
    ranks of the node with the least room that holds it; one that fits no node takes the emptiest nodes
    in turn. Without `cluster.node_of_rank`, a node is `ranks_per_node` ranks in a row.
    """
    nodes = cluster.node_of_rank or [rank // max(ranks_per_node, 1) for rank in range(cluster.num_ranks)]
    free: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        free.setdefault(node, []).append(rank)
    placed = []
    for degree in degrees:
        fits = [node for node in sorted(free) if len(free[node]) >= degree]
        if fits:
            order = [min(fits, key=lambda node: len(free[node]))]
        else:
            order = sorted(free, key=lambda node: (-len(free[node]), node))
        ranks: list[int] = []
        for node in order:
            take = degree - len(ranks)
            ranks += free[node][:take]
            del free[node][:take]
        placed.append(tuple(ranks))
    return placed
