"""A lower bound on the seconds of every plan of a batch."""

from collections.abc import Sequence

import numpy as np

from rayfcp.plan.cost import CostModel
from rayfcp.values import ClusterSpec, InfeasiblePlanError, SequenceSpec


def lower_bound(sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel) -> float:
    """max(compute of all sequences / N, max over k of min over d of t(k, d)) + fewest microbatches x fixed cost.

    t(k, d) is sequence k alone on d ranks without the fixed cost, over degrees d <= N that memory permits.

    Proof, for any plan of ring groups, seconds by `cost`. Let w(g) be the compute seconds of group g on
    one rank, f the fixed cost of a group's microbatch, x the exposed gather. (1) T(g, d) >= w(g) / d + f:
    all communication is attention's, so the overlap takes away at most all of it. In a microbatch with
    makespan m every group has d (m - f) >= w(g); degrees sum to at most N, so N (m - f) >= sum of w(g).
    Summed over microbatches: sum of (m - f) >= compute / N. (2) T grows with the cells and tokens of a
    group, and a group that holds k needs d >= ceil(tokens of k / max_tokens_per_rank); so its microbatch
    has m - f >= t(k, d) for a permitted d, and other microbatches have m - f >= 0. (3) A microbatch takes
    at least m + x and holds at most N x max_tokens_per_rank tokens, so there are at least
    ceil(tokens / that), each paying f + x beside m - f.

    Raises:
        InfeasiblePlanError: a sequence that all ranks together cannot hold.
    """
    check_longest(sequences, cluster=cluster)
    num_ranks, room = cluster.num_ranks, cluster.num_ranks * cluster.max_tokens_per_rank
    num_tokens = sum(sequence.num_tokens for sequence in sequences)
    shared_s = cost.compute_s(sum(sequence.attention_cells for sequence in sequences), num_tokens) / num_ranks
    # of two sequences with the same mask the longer takes longer at every degree, and has fewer of them
    longest = {sequence.mask: sequence for sequence in sorted(sequences, key=lambda each: each.num_tokens)}
    alone_s = max(_alone_s(sequence, cluster=cluster, cost=cost) for sequence in longest.values())
    fewest = -(-num_tokens // room)
    return max(shared_s, alone_s) + fewest * (cost.fixed_s + cost.exposed_s)


def _alone_s(sequence: SequenceSpec, *, cluster: ClusterSpec, cost: CostModel) -> float:
    least = -(-sequence.num_tokens // cluster.max_tokens_per_rank)
    degrees = np.arange(least, cluster.num_ranks + 1)
    return float(cost.group_s(sequence.attention_cells, sequence.num_tokens, degree=degrees).min()) - cost.fixed_s


def check_longest(sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec) -> None:
    """All ranks together can hold the longest sequence; then every batch has a plan.

    Raises:
        InfeasiblePlanError: names the sequence, its tokens, the bound and the remedy.
        ValueError: no sequences, or ids that repeat.
    """
    if not sequences:
        raise ValueError("sequences is empty, must hold at least 1; skip the batch")
    if len({sequence.id for sequence in sequences}) != len(sequences):
        raise ValueError(f"sequences hold ids that repeat, {len(sequences)} must differ; use positions in the batch")
    longest = max(sequences, key=lambda sequence: (sequence.num_tokens, -sequence.id))
    room = cluster.num_ranks * cluster.max_tokens_per_rank
    if longest.num_tokens > room:
        raise InfeasiblePlanError(
            f"sequence {longest.id} has {longest.num_tokens} tokens, {cluster.num_ranks} ranks hold at most {room} "
            f"({cluster.max_tokens_per_rank} each); lower data.max_seqlen, or add ranks or memory"
        )
