"""How unevenly a plan loads the ranks, per resource."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from rayfcp.cost.images import ImageColumns
from rayfcp.cost.layout import exchanged_heads, hop_heads, ring_tokens, round_tokens
from rayfcp.cost.model import CostModel
from rayfcp.plan.layout import layouts_of
from rayfcp.values import BatchPlan, Group, Imbalance, Layout, MicrobatchPlan, Primitive, SequenceSpec

Loads = npt.NDArray[np.float64]

ENCODER = 4
"""Kind of load, where there is an encoder."""


def imbalance(
    plan: BatchPlan, sequences: Sequence[SequenceSpec], *, cost: CostModel, speed_of_rank: Sequence[float] = ()
) -> Imbalance:
    """(sum of maxima - sum of means) / sum of maxima over microbatches, per rank.

    `compute`: seconds of attention and linear layers, kernels slowed by short pieces as the cost model has it, at each
    rank's own speed (none: all are as fast);
    `attention`: (query, key) pairs, counted block by block, where d ranks share out heads 1/d of theirs on each
    rank; `memory`: tokens; `communication`: the larger of what is sent and received in forward, one head of
    one token as the unit (backward sends the same again, and gradients of the same tokens). Ranks without
    tokens count as 0, save those that compute their share of heads. A resource that nobody uses is balanced. `encoder`,
    where `cost` has one: seconds of the images that each rank encodes, at its speed.
    """
    return imbalance_of(rank_loads(plan, sequences, cost=cost), speed_of_rank=speed_of_rank)


def imbalance_of(loads: Loads, *, speed_of_rank: Sequence[float] = ()) -> Imbalance:
    """`imbalance` of what `rank_loads` gives."""
    speeds = np.ones(loads.shape[1:])
    speeds[0] = speed_of_rank or 1.0
    speeds[ENCODER:] = speed_of_rank or 1.0
    maxima, means = np.zeros(len(speeds)), np.zeros(len(speeds))
    for each in loads / speeds:
        maxima += each.max(axis=1)
        means += each.mean(axis=1)
    excess = np.maximum(maxima - means, 0.0) / np.where(maxima > 0, maxima, 1.0)
    compute_share, attention, memory, communication, *encoder = (float(each) for each in excess)
    return Imbalance(
        compute=compute_share,
        attention=attention,
        memory=memory,
        communication=communication,
        encoder=encoder[0] if encoder else None,
    )


def rank_loads(
    plan: BatchPlan,
    sequences: Sequence[SequenceSpec],
    *,
    cost: CostModel,
    layouts: Sequence[Layout] | None = None,
) -> Loads:
    """`[microbatch, kind, rank]`: seconds of attention and linear layers, forward and backward, at speed 1; pairs;
    tokens; traffic; and, where `cost` has an encoder, seconds of images (`imbalance`). `layouts`: those of
    `layouts_of` where the caller has them."""
    by_id = {sequence.id: sequence for sequence in sequences}
    layouts = layouts_of(plan, sequences) if layouts is None else layouts
    both = zip(plan.microbatches, layouts, strict=True)
    loads = np.stack([_loads(each, layout, by_id=by_id, cost=cost, num_ranks=plan.num_ranks) for each, layout in both])
    if cost.encoder is None:
        return loads
    from rayfcp.plan.vision.encoding import encoded_seconds

    encoded_s = encoded_seconds(plan, ImageColumns.of(sequences), encoder=cost.encoder)
    return np.concatenate((loads, encoded_s[:, None]), axis=1)


def _loads(
    microbatch: MicrobatchPlan, layout: Layout, *, by_id: Mapping[int, SequenceSpec], cost: CostModel, num_ranks: int
) -> Loads:
    """Compute, pairs, tokens and traffic of each rank, shape [4, ranks]."""
    ranks = np.array([block.rank for block in layout.blocks], np.int64)
    block_tokens = np.array([block.num_tokens for block in layout.blocks], np.float64)
    pairs_of_block = np.array(
        [by_id[block.sequence].block_pairs(block.start, block.stop) for block in layout.blocks], np.float64
    )
    slower = pairs_of_block * (cost.attention_half_tokens / block_tokens)  # each block of a free layout is a piece
    tokens, pairs, extra = (
        np.bincount(ranks, each, minlength=num_ranks).astype(np.float64)
        for each in (block_tokens, pairs_of_block, slower)
    )
    earlier = [block for each in layout.context for block in each.blocks]
    context = np.bincount(
        [block.rank for block in earlier], [block.num_tokens for block in earlier], minlength=num_ranks
    )
    if microbatch.layout is not None:
        traffic = hop_heads(cost, heads=layout.heads) * round_tokens(layout, num_ranks=num_ranks)
        for run in layout.runs(num_ranks) if layout.heads > 1 else ():
            held = list(run)
            pairs[held], extra[held] = pairs[held].mean(), extra[held].mean()
            traffic[held] += exchanged_heads(tokens[held], cost)
    else:
        traffic = np.zeros(num_ranks)
    for group in microbatch.groups:
        held = list(group.ranks)
        by_heads = group.primitive is Primitive.ULYSSES and group.degree > 1
        if by_heads:
            pairs[held] = pairs[held].mean()
            traffic[held] = exchanged_heads(tokens[held], cost)
        elif microbatch.layout is None:
            traffic[held] = hop_heads(cost) * ring_tokens(tokens[held] + context[held])
        if by_heads or microbatch.layout is None:
            extra[held] = _extra_pairs(group, float(tokens[held].sum()), cost=cost) * (pairs[held] > 0)
    compute = cost.attention_s_per_pair * (pairs + extra) + cost.linear_s_per_token * tokens
    return np.stack((compute, pairs, tokens, traffic))


def _extra_pairs(group: Group, num_tokens: float, *, cost: CostModel) -> float:
    """Pairs more on each rank that short pieces cost as much as, by the cost model's own terms."""
    if cost.attention_s_per_pair == 0:
        return 0.0
    passes = cost.terms(group.degree, primitive=group.primitive)
    return float(sum(terms.attention_s_per_token for terms in passes)) * num_tokens / cost.attention_s_per_pair
