"""Ulysses inside a node, blocks between: runs of ranks that share the heads of their tokens.

`heads` consecutive ranks of a node exchange tokens for heads before attention and back after it, so that each has
all tokens of the run and 1 / `heads` of the heads. Between runs blocks travel as between ranks, each rank's share of
the heads to the rank of the same place in the other run. So the block planner sees every run as one rank with the
memory, compute and links of all.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np

from rayfcp.cost.model import CostModel, speeds_of
from rayfcp.cost.placement import node_of_ranks
from rayfcp.values import Block, ClusterSpec, InfeasiblePlanError, Primitive


def permitted(cluster: ClusterSpec, cost: CostModel, *, allowed: Iterable[Primitive], wanted: int | None) -> list[int]:
    """Lengths of runs to plan with: `wanted`, or all powers of two, 1 first, that heads, nodes and `allowed` permit.

    Raises:
        InfeasiblePlanError: `wanted` is not permitted.
    """
    if wanted == 1 or (wanted is None and Primitive.ULYSSES not in allowed):
        return [1]
    if wanted is not None:
        why = _forbidden(wanted, cluster, cost=cost)
        if Primitive.ULYSSES not in allowed:
            why = "plan.primitives must have ulysses; add it"
        if why:
            raise InfeasiblePlanError(f"plan.blocks.heads is {wanted}: {why}, or set it to 1")
        return [wanted]
    doubled = [2**each for each in range(cluster.num_ranks.bit_length())]
    return [heads for heads in doubled if not _forbidden(heads, cluster, cost=cost)]


def _forbidden(heads: int, cluster: ClusterSpec, *, cost: CostModel) -> str:
    """Reason why runs of `heads` ranks are impossible; empty if they are possible."""
    if cluster.num_ranks % heads:
        return f"must divide the {cluster.num_ranks} ranks; lower it"
    nodes = np.array(node_of_ranks(cluster, ranks_per_node=cost.ranks_per_node)).reshape(-1, heads)
    if (nodes != nodes[:, :1]).any():
        return "each run of so many ranks must lie in one node; lower it"
    if heads > 1 and not np.isfinite(cost.group_s(1, 1, degree=heads, primitive=Primitive.ULYSSES)):
        return f"must divide {cost.num_heads} heads and agree with {cost.num_kv_heads} key/value heads; lower it"
    return ""


def as_runs(cluster: ClusterSpec, cost: CostModel, *, heads: int) -> tuple[ClusterSpec, CostModel]:
    """Cluster and cost with each run of `heads` ranks as one rank, as fast as its slowest. As many ranks of a run share
    the keys and values of a token as there are key and value heads."""
    nodes = node_of_ranks(cluster, ranks_per_node=cost.ranks_per_node)
    runs = ClusterSpec(
        num_ranks=cluster.num_ranks // heads,
        max_tokens_per_rank=int(cost.room(cluster.max_tokens_per_rank, degree=heads, primitive=Primitive.ULYSSES)),
        node_of_rank=nodes[::heads],
        speed_of_rank=tuple(speeds_of(cluster).reshape(-1, heads).min(axis=1).tolist()),
    )
    moved = cost.kv_share(heads)
    return runs, dataclasses.replace(
        cost,
        attention_s_per_pair=cost.attention_s_per_pair / heads,
        linear_s_per_token=cost.linear_s_per_token / heads,
        ring_intra_s_per_token=cost.ring_intra_s_per_token * moved,
        ring_inter_s_per_token=cost.ring_inter_s_per_token * moved,
        uplink_ranks=cost.uplink_ranks / heads,
    )


def split(blocks: list[Block], *, num_runs: int, heads: int) -> tuple[list[Block], list[range]]:
    """Cut the blocks of runs over the ranks of each run, equal tokens to each in the order of the blocks; also return
    the positions of the parts of every block."""
    totals = [0] * num_runs
    for block in blocks:
        totals[block.rank] += block.num_tokens
    done = [0] * num_runs
    cut: list[Block] = []
    became: list[range] = []
    for block in blocks:
        run, first = block.rank, len(cut)
        start = block.start
        while start < block.stop:
            place, end = _place(done[run], totals[run], heads)
            stop = min(block.stop, start + end - done[run])
            cut.append(dataclasses.replace(block, start=start, stop=stop, rank=run * heads + place))
            done[run] += stop - start
            start = stop
        became.append(range(first, len(cut)))
    return cut, became


def _place(done: int, total: int, heads: int) -> tuple[int, int]:
    """Rank in a run of `total` tokens that has token `done`, and the end of its tokens: the first ranks have one more
    where the total does not divide."""
    share, more = divmod(total, heads)
    large = more * (share + 1)
    if done < large:
        place = done // (share + 1)
        return place, (place + 1) * (share + 1)
    place = more + (done - large) // share
    return place, large + (place - more + 1) * share
