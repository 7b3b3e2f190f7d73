"""Ranks of groups: inside one node where they fit, else over as few nodes as possible."""

from collections.abc import Sequence

from rayfcp.values import ClusterSpec


def place_groups(
    degrees: Sequence[int], ranks_of_node: Sequence[Sequence[int]], *, by_heads: Sequence[bool] = ()
) -> list[tuple[int, ...]]:
    """Ranks of each group, ascending within a node; no rank twice.

    `degrees` come largest first and sum to at most the ranks of all nodes. A group takes the lowest free ranks of the
    node with the fewest free ranks that holds it; one that fits no node takes the emptiest nodes in turn. Groups larger
    than every node come last, since they span nodes in any case, but for those that share out heads (`by_heads`) and
    fill nodes: a rank with fewer of its group in its node than others exchanges more between nodes.
    """
    nodes = [list(ranks) for ranks in ranks_of_node]
    left = [len(ranks) for ranks in nodes]
    largest = max(left)
    placed: dict[int, tuple[int, ...]] = {}
    fills = [
        whole and degree % largest == 0
        for degree, whole in zip(degrees, by_heads or [False] * len(degrees), strict=True)
    ]
    for index in sorted(range(len(degrees)), key=lambda index: degrees[index] > largest and not fills[index]):
        degree, best = degrees[index], -1
        for at, free in enumerate(left):
            if free >= degree and (best < 0 or free < left[best]):
                best = at
        ranks: list[int] = []
        for at in [best] if best >= 0 else sorted(range(len(left)), key=lambda at: (-left[at], at)):
            taken = min(degree - len(ranks), left[at])
            ranks += sorted(nodes[at][:taken])
            del nodes[at][:taken]
            left[at] -= taken
        placed[index] = tuple(ranks)
    return [placed[index] for index in range(len(degrees))]


def ranks_of_nodes(cluster: ClusterSpec, *, ranks_per_node: int) -> list[list[int]]:
    """The ranks of each node, ascending, nodes by name."""
    found: dict[int, list[int]] = {}
    for rank, node in enumerate(node_of_ranks(cluster, ranks_per_node=ranks_per_node)):
        found.setdefault(node, []).append(rank)
    return [found[node] for node in sorted(found)]


def fastest_first(nodes: Sequence[Sequence[int]], *, cluster: ClusterSpec) -> list[list[int]]:
    """The ranks of each node, the fastest first, those of one speed in order."""
    speeds = cluster.speed_of_rank
    return [sorted(ranks, key=lambda rank: -speeds[rank]) if speeds else list(ranks) for ranks in nodes]


def node_of_ranks(cluster: ClusterSpec, *, ranks_per_node: int) -> tuple[int, ...]:
    """The node of each rank; where the cluster does not name it, `ranks_per_node` ranks in a row share one.

    With several stages, two ranks share a node where they do so on every stage: a group is the same ranks on all.
    """
    count = cluster.num_ranks
    devices = cluster.node_of_rank or tuple(
        number // max(ranks_per_node, 1) for number in range(count * cluster.num_stages)
    )
    if cluster.num_stages == 1:
        return devices
    numbers: dict[tuple[int, ...], int] = {}
    return tuple(numbers.setdefault(devices[rank::count], len(numbers)) for rank in range(count))


def node_sizes(cluster: ClusterSpec, *, ranks_per_node: int) -> list[int]:
    """Number of ranks of each node, nodes by name. A group larger than the largest spans nodes wherever it lies."""
    return [len(ranks) for ranks in ranks_of_nodes(cluster, ranks_per_node=ranks_per_node)]
