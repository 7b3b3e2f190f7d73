"""How unevenly a plan loads the ranks, per resource."""

from collections.abc import Sequence

import numpy as np

from rayfcp.cost.images import ImageColumns
from rayfcp.cost.model import CostModel
from rayfcp.plan.layout import Members, Placement, placements_of
from rayfcp.values import BatchPlan, Imbalance, LayerKinds, MicrobatchPlan, Primitive, SequenceSpec
from rayfcp.values.arrays import Floats, Ints, firsts
from rayfcp.values.layers import layers_work

Loads = Floats

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
    placements: Sequence[Placement] | None = None,
) -> Loads:
    """`[microbatch, kind, rank]`: seconds of attention and linear layers, forward and backward, at speed 1; pairs;
    tokens; traffic; and, where `cost` has an encoder, seconds of images (`imbalance`). `placements`: those of
    `placements_of` where the caller has them."""
    kinds = sequences[0].layer_kinds if sequences else ()
    placements = placements_of(plan, sequences) if placements is None else placements
    both = zip(plan.microbatches, placements, strict=True)
    loads = np.stack([_loads(each, placed, kinds=kinds, cost=cost, num_ranks=plan.num_ranks) for each, placed in both])
    if cost.encoder is None:
        return loads
    from rayfcp.plan.vision.encoding import encoded_seconds

    encoded_s = encoded_seconds(plan, ImageColumns.of(sequences), encoder=cost.encoder)
    return np.concatenate((loads, encoded_s[:, None]), axis=1)


def _loads(
    microbatch: MicrobatchPlan, placement: Placement, *, kinds: LayerKinds, cost: CostModel, num_ranks: int
) -> Loads:
    """Compute, pairs, tokens and traffic of each rank, shape [4, ranks]."""
    own, heads = placement.own, placement.heads
    pairs_of_block = layers_work(kinds, start=own.start, stop=own.stop).pairs
    slower = pairs_of_block * (cost.attention_half_tokens / own.num_tokens)  # each block of a free layout is a piece
    tokens, pairs, extra = (
        np.bincount(own.rank, each, minlength=num_ranks).astype(np.float64)
        for each in (own.num_tokens, pairs_of_block, slower)
    )
    traffic = np.zeros(num_ranks)
    if microbatch.layout is not None:
        traffic = hop_heads(cost, heads=heads) * round_tokens(placement, num_ranks=num_ranks)
    if heads > 1:
        runs = np.arange(num_ranks) // heads
        pairs, extra = _means(pairs, runs), _means(extra, runs)
        traffic += exchanged_heads(tokens, group=runs, cost=cost)
    _add_groups(placement, microbatch, tokens=tokens, pairs=pairs, extra=extra, traffic=traffic, cost=cost)
    compute = cost.attention_s_per_pair * (pairs + extra) + cost.linear_s_per_token * tokens
    return np.stack((compute, pairs, tokens, traffic))


def _add_groups(
    placement: Placement,
    microbatch: MicrobatchPlan,
    *,
    tokens: Floats,
    pairs: Floats,
    extra: Floats,
    traffic: Floats,
    cost: CostModel,
) -> None:
    """What groups share out or exchange, and pairs more that short pieces cost as much as, in place."""
    members = Members.of(microbatch.groups)
    earlier = placement.blocks.at(slice(placement.num_own, None))
    context = np.bincount(earlier.rank, earlier.num_tokens, minlength=len(tokens))
    group = np.repeat(np.arange(len(members.degree)), members.degree)
    by_heads = (~members.is_ring & (members.degree > 1))[group]
    for primitive, held in ((Primitive.RING, ~by_heads), (Primitive.ULYSSES, by_heads)):
        ranks, numbers = members.ranks[held], group[held]
        if primitive is Primitive.ULYSSES:
            pairs[ranks] = _means(pairs[ranks], numbers)
            traffic[ranks] = exchanged_heads(tokens[ranks], group=numbers, cost=cost)
        elif microbatch.layout is None:
            traffic[ranks] = hop_heads(cost) * ring_tokens(tokens[ranks] + context[ranks], group=numbers)
        else:
            continue
        forward, backward = cost.terms(members.degree, primitive=primitive)
        per_token = np.zeros(len(members.degree)) + forward.attention_s_per_token + backward.attention_s_per_token
        seconds = per_token[numbers] * _sums(tokens[ranks], numbers) * (pairs[ranks] > 0)
        extra[ranks] = seconds / cost.attention_s_per_pair if cost.attention_s_per_pair else 0.0


def hop_heads(cost: CostModel, *, heads: int = 1) -> float:
    """Heads of one token that pass one hop of a ring forward: its keys and values, of one of `heads` shares."""
    return 2 * max(cost.num_kv_heads / heads, 1.0)


def ring_tokens(tokens: Floats, *, group: Ints) -> Floats:
    """Tokens whose keys and values each position of a ring sends or receives; `tokens[p]` are its own, those of a ring,
    `group`, follow each other.

    All of the group's but those of its successor leave it, all but its own come.

    >>> ring_tokens(np.array([5.0, 4.0, 4.0, 7.0]), group=np.array([0, 0, 0, 1]))
    array([9., 9., 9., 0.])
    """
    if not len(group):
        return tokens
    goes_on = group[1:] == group[:-1]
    next_one = np.where(np.append(goes_on, False), np.arange(len(group)) + 1, firsts(goes_on))
    total = _sums(tokens, group)
    volumes: Floats = np.maximum(total - tokens[next_one], total - tokens)
    return volumes


def round_tokens(placement: Placement, *, num_ranks: int) -> Floats:
    """Tokens whose keys and values each rank sends or receives in the rounds of a layout, of its share of heads."""
    transfers, num_runs = placement.transfers, num_ranks // placement.heads
    before = np.append(0, np.cumsum(placement.blocks.num_tokens[transfers.block]))
    moved = np.diff(before[transfers.first])[transfers.carried]
    ends = [np.bincount(end, moved, minlength=num_runs) for end in (transfers.source, transfers.target)]
    return np.repeat(np.maximum(*ends), placement.heads)


def exchanged_heads(tokens: Floats, *, group: Ints, cost: CostModel) -> Floats:
    """Heads of one token that each position of a Ulysses group sends or receives forward (DeepSpeed-Ulysses, 3.2).

    Of d ranks each sends every other its own tokens' queries, keys and values of that rank's heads, and gets
    back their outputs; keys and values are replicated beyond their count of heads.
    """
    degree = _sums(np.ones(len(group)), group)
    outputs = cost.num_heads / degree
    inputs = outputs + 2 * np.maximum(cost.num_kv_heads / degree, 1.0)
    own, others = (degree - 1) * tokens, _sums(tokens, group) - tokens
    volumes: Floats = np.maximum(own * inputs + others * outputs, others * inputs + own * outputs)
    return volumes


def _sums(values: Floats, group: Ints) -> Floats:
    """For each rank, the sum over its group."""
    return np.bincount(group, values)[group].astype(np.float64) if len(group) else values


def _means(values: Floats, group: Ints) -> Floats:
    return _sums(values, group) / _sums(np.ones(len(group)), group)
