"""A lower bound on the seconds of every plan of a batch over several stages."""

from collections.abc import Sequence

import numpy as np

from rayfcp.cost.analytic import ATTENTION_BACKWARD
from rayfcp.cost.model import CostModel, speeds_of
from rayfcp.values import ClusterSpec, SequenceSpec


def pipeline_bound(sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel) -> float:
    """Lower bound: max over stages p of (work of p + fewest microbatches x N x fixed cost of p) / S + fill of p. S is
    the sum of the speeds of the N ranks, of which each has one on all stages. The fill of a stage after the first is
    the fixed cost of a microbatch on the fastest rank of the first stage, less N / S times the fixed cost of p, and
    twice the hops on the way to p.

    The work of a stage is its share of the layers' compute of all sequences, each in one piece and without
    recomputation, and the head's on the last; fixed costs are shared likewise, less what of them may be the head's (as
    much as of the linear seconds of a token), which only the last stage pays.

    Proof, on a machine with the seconds of `cost` (as in `lower_bound`; traffic, waiting, recomputation only add).
    (1) Computed seconds of a stage's ranks, each times the rank's speed, sum to at least its work, and fixed costs to N
    of them a microbatch: some rank takes at least the S-th part. Slices compute every pair and token of their sequence
    once, in more and smaller pieces, which takes no less. There are at least ceil(tokens / budget) microbatches, where
    the budget is what `cluster.max_tokens_per_rank` permits on N ranks, and what memory permits on each stage when all
    its layers are recomputed. All of that, but the fixed cost of its first microbatch, whose load may come while others
    pass, lies between the beginning of its first pass and the end of its last one.
    (2) Before its first pass some microbatch has passed forward all stages before p: it paid the fixed cost of a
    forward pass on the first, where nothing comes before its load, and a hop from each. After its last pass one passes
    backward all stages before p. Neither is a second of (1).
    """
    pipeline = cost.pipeline
    assert pipeline is not None, "stages have a cost"
    attention, linear = (
        (1 + ATTENTION_BACKWARD) * cost.attention_forward,
        (1 + cost.linear_backward) * cost.linear_forward,
    )
    num_tokens = sum(sequence.num_tokens for sequence in sequences)
    pairs = sum(sequence.attention_pairs for sequence in sequences)
    head_s = pipeline.head_s_per_token * num_tokens
    attention_s = attention * cost.attention_s_per_pair * (pairs + cost.attention_half_tokens * num_tokens / 2)
    share, of_attention = np.array(pipeline.linear_share), np.array(pipeline.attention_share)
    work_s = share * (linear * cost.linear_s_per_token * num_tokens - head_s) + of_attention * attention_s
    work_s[-1] += head_s
    linear_s = cost.linear_s_per_token
    layers_only = 1 - min(pipeline.head_s_per_token / (linear * linear_s), 1.0) if linear_s > 0 else 1.0
    fixed_s = share * linear * layers_only * cost.fixed_s
    speeds = speeds_of(cluster)
    total = float(speeds.sum())
    first_s, fixed_s = fixed_s[0] / float(speeds.max()), fixed_s * (cluster.num_ranks / total)
    fill_s = first_s - fixed_s + 2 * pipeline.transfer_s * np.arange(pipeline.num_stages)
    fill_s[0] = 0.0
    fewest = -(-num_tokens // max(cluster.num_ranks * _rank_tokens(cluster, cost=cost), 1))
    return float((work_s / total + fewest * fixed_s + fill_s).max())


def _rank_tokens(cluster: ClusterSpec, *, cost: CostModel) -> int:
    """The most tokens that a rank may hold in one microbatch."""
    pipeline = cost.pipeline
    assert pipeline is not None
    working = min(each.working for each in pipeline.layer_bytes.shapes)
    kept = zip(pipeline.budget_bytes, pipeline.kept_bytes(), strict=True)
    fits = [budget // (own + working) for budget, own in kept]
    return min(cluster.max_tokens_per_rank, *fits)
