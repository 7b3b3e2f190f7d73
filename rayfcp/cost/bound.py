"""What pictures add at least to the seconds of any plan.

A lower bound on the seconds of every plan of a batch.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from rayfcp.cost.images import PictureColumns
from rayfcp.cost.model import CostModel, Seconds, speeds_of
from rayfcp.cost.placement import node_of_ranks
from rayfcp.values import ClusterSpec, InfeasiblePlanError, Mask, Primitive, SequenceSpec


def encoder_bound(sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel) -> tuple[float, float]:
    """Beside the terms of `lower_bound` for what all ranks share and for what one does alone; (0, 0) without pictures.

    The pictures of a batch take their seconds on ranks that encode; the mean over ranks, weighted by speed, is the
    first term, the largest picture on the fastest rank the second. A picture has its tokens in its microbatch, so that
    at least ceil(tokens of pictures / (N x max_tokens_per_rank)) microbatches encode. In each every rank pays the
    encoder's fixed seconds and its first gathers, and once its last reductions.
    """
    encoder, speeds = cost.encoder, speeds_of(cluster)
    pictures = PictureColumns.of(sequences)
    if encoder is None or not len(pictures):
        return 0.0, 0.0
    forward_s, backward_s = encoder.passes_s(pictures.patches)
    seconds = forward_s + backward_s
    fewest = -(-int(pictures.tokens.sum()) // (cluster.num_ranks * cluster.max_tokens_per_rank))
    shown_s = fewest * encoder.exposed_s + encoder.reduce_exposed_s
    fixed_s = fewest * encoder.fixed_s
    shared_s = (float(seconds.sum()) + cluster.num_ranks * fixed_s) / float(speeds.sum())
    alone_s = (float(seconds.max()) + fixed_s) / float(speeds.max())
    return shared_s + shown_s, alone_s + shown_s


def lower_bound(
    sequences: Sequence[SequenceSpec],
    *,
    cluster: ClusterSpec,
    cost: CostModel,
    primitives: Iterable[Primitive] = (Primitive.RING,),
    placed_freely: bool = False,
) -> float:
    """max(compute of all sequences / S, max over k of min over d of t(k, d)) + fewest microbatches x fixed cost.

    Compute is at the best efficiency that a sequence can reach: a ring of several ranks computes smaller blocks, so
    that a sequence which memory keeps off one rank takes w(k) = the least over permitted degrees and primitives.
    t(k, d) is sequence k alone on d ranks without the fixed cost (`_rings_s`, `_exchanged_s`), over degrees d <= N
    that memory permits and over `primitives`; a group spans nodes only if it must, or if that were faster. Where
    blocks are `placed_freely` (plans with layouts of their own) there are no groups: t(k, d) is left out,
    and w(k) is the compute of k in one piece.

    S is the sum of the speeds s(r) of all N ranks, N where all are as fast. What a rank does itself takes it 1 / s(r)
    of the usual time: t(k, d) is that of the d fastest, and the fixed cost is N / S of the usual one beside the first
    term, 1 / the highest speed beside the second.

    Proof, for any plan of groups, on a machine that has the seconds of `cost` for every piece of attention, linear
    layer, message and gather (the simulator, whose ports and links only add waiting), and so for seconds by `cost`.
    Shards that share ports with messages add to that too, and are left out (`CostModel.apart`).
    Let f be the fixed cost of a microbatch, which every rank pays (f / s(r)), x the exposed gather.
    (1) Communication adds to what a rank computes, it takes nothing away. The computed seconds of the d ranks
    of a group, each times the rank's speed, sum to at least w(k) over its sequences k, for d is permitted for each of
    them; so those of all N ranks over all microbatches sum to the w(k) of all. Let T be the largest over ranks of what
    they compute and pay of (3); then S T is at least that sum and N f for every microbatch.
    (2) A group that holds k needs d >= ceil(tokens of k / max_tokens_per_rank) ranks. The slowest of them is no faster
    than the d-th fastest of all, together they are no faster than the d fastest, and one of them takes t(k, d) for a
    permitted d in that microbatch, since other sequences add to its rounds only, and a slower rank takes no less: what
    it computes hides no more than itself. In each other microbatch it pays f / s(r). Mutual pictures add cells to a
    mask and pieces to what is computed, and take none away: rounds that are counted without them take no more.
    (3) A batch needs at least ceil(tokens / (N x max_tokens_per_rank)) microbatches. In each, a rank pays f / s(r), and
    x: embedding, head and first layer are asked for after all that it did before, and come before it computes. After
    the last (after each, where each reduces: then x has it) it waits for the reductions of what its last layer,
    embedding and head got, which it gave when it had computed everything. No second of (3) is one of (1) or (2).
    (4) Pictures are encoded before the forward pass, backward after the backward pass of their microbatch, and every
    rank waits in each for all others, whose shards it gathers. So what is encoded (`encoder_bound`) comes on top of
    (1) to (3): all of it in the mean over ranks, as in (1), and the largest picture on one rank, as in (2).

    Raises:
        InfeasiblePlanError: a sequence that all ranks together cannot hold.
    """
    check_longest(sequences, cluster=cluster)
    cost = cost.apart()
    num_ranks, room, speeds = cluster.num_ranks, cluster.num_ranks * cluster.max_tokens_per_rank, speeds_of(cluster)
    num_tokens = sum(sequence.num_tokens for sequence in sequences)
    used = tuple(primitives)
    extra_s = 0.0 if placed_freely else _extra_s(sequences, cluster=cluster, cost=cost, primitives=used)
    compute_s = cost.compute_s(sum(sequence.attention_cells for sequence in sequences), num_tokens)
    total = float(speeds.sum())
    shared_s = (compute_s + extra_s) / total
    alone_s = 0.0
    if not placed_freely:
        alone_s = max(_alone_s(each, cluster=cluster, cost=cost, primitives=used) for each in _largest(sequences))
    fewest = -(-num_tokens // room)
    fixed_s, fastest_s = cost.fixed_s * (num_ranks / total), cost.fixed_s / float(speeds.max())
    seen_s, largest_s = encoder_bound(sequences, cluster=cluster, cost=cost)
    return max(
        shared_s + fewest * (fixed_s + cost.exposed_s) + cost.reduce_exposed_s + seen_s,
        alone_s + fewest * (fastest_s + cost.exposed_s) + cost.reduce_exposed_s + largest_s,
    )


def _largest(sequences: Sequence[SequenceSpec]) -> list[SequenceSpec]:
    """Those beside which no other of the same mask has as many tokens and as many cells: of the others t(k, d) is no
    more at any degree, and they have no fewer of them. Without mutual pictures, the longest of each mask."""
    found: dict[Mask, float] = {}
    largest: list[SequenceSpec] = []
    loads = [(each.num_tokens, each.attention_cells, -at) for at, each in enumerate(sequences)]
    for _, cells, at in sorted(loads, reverse=True):
        each = sequences[-at]
        if cells > found.get(each.mask, 0):
            found[each.mask] = cells
            largest.append(each)
    return largest


def _extra_s(
    sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, primitives: Iterable[Primitive]
) -> float:
    """Compute seconds beyond `cost.compute_s` that sequences which one rank cannot hold take at least, on all their
    ranks together. A ring of d ranks takes (d - 1 / 2) x half tokens a token, where the slices are even: counted are
    the tokens of even slices, but one piece at least, which is what Ulysses computes. Nothing where layers have
    windows, through which few pieces are seen."""
    room = cluster.max_tokens_per_rank
    tokens = np.array([each.num_tokens for each in sequences if each.num_tokens > room], np.float64)
    if not len(tokens) or cost.attention_half_tokens == 0.0 or sequences[0].windows:
        return 0.0
    used, degrees = tuple(primitives), np.arange(1, cluster.num_ranks + 1)
    whole = np.isfinite(cost.terms(degrees, primitive=Primitive.ULYSSES)[0].moved_s) & (Primitive.ULYSSES in used)
    least, degrees = -(-tokens // room), degrees[:, None]
    even = tokens // (2 * degrees) * (2 * degrees)
    in_ring = np.maximum((degrees - 0.5) * even - tokens / 2, 0.0) if Primitive.RING in used else np.inf
    extra = np.where(degrees >= least, np.where(whole[:, None], 0.0, in_ring), np.inf).min(axis=0)
    return float(extra.sum()) * cost.attention_half_tokens * cost.attention_s_per_cell


def _alone_s(
    sequence: SequenceSpec, *, cluster: ClusterSpec, cost: CostModel, primitives: Iterable[Primitive]
) -> float:
    nodes = Counter(node_of_ranks(cluster, ranks_per_node=cost.ranks_per_node))
    least = -(-sequence.num_tokens // cluster.max_tokens_per_rank)
    degrees = np.arange(least, cluster.num_ranks + 1)
    fastest = np.sort(speeds_of(cluster))[::-1]
    slowest = fastest[least - 1 :]
    seconds = [
        _rings_s(sequence, degrees, crosses=crosses, fastest=fastest, cost=cost)
        if primitive is Primitive.RING
        else cost.group_s(
            sequence.attention_cells,
            sequence.num_tokens,
            degree=degrees,
            primitive=primitive,
            crosses=crosses,
            speed=slowest,
        )
        for primitive in primitives
        for crosses in (np.full(len(degrees), True), degrees > max(nodes.values()))
    ]
    return float(np.min(seconds)) - cost.fixed_s / float(fastest[0])


def _rings_s(
    sequence: SequenceSpec,
    degrees: npt.NDArray[np.int64],
    *,
    crosses: npt.NDArray[np.bool_],
    fastest: Seconds,
    cost: CostModel,
) -> Seconds:
    """What one rank of a ring takes at least, by degree.

    Of zig-zag slices of at least p = floor(L / 2d) tokens every rank has two, so at least what it would have of
    2 d p tokens: in its own round (2p)^2 / 2 + p causal cells, in each other 2 p^2, 2 p tokens to receive in
    each of d - 1 hops, and of one to bring home. A round takes c + m - overlap x min(c, m) seconds at least of computed
    c and moved m. That is convex: over the rounds that move, the sums take its place, with the diagonal, 1 / d (L + 1)
    of the rank's cells, in the first one. Or, if that is more, the mean over ranks of all that they compute. The
    slowest of d ranks is as fast as the d-th of the `fastest`, all together as these are; all have the slices. Where
    layers have windows, the mean is all that counts: what of the slices is seen elsewhere may be next to nothing. Cells
    of mutual pictures, which may all be one rank's, count in the mean alone.
    """
    slowest, together = fastest[degrees - 1], np.cumsum(fastest)[degrees - 1]
    computed_s = cost.compute_s(sequence.attention_cells, sequence.num_tokens) / together + cost.fixed_s / fastest[0]
    if sequence.windows:
        return np.asarray(computed_s)
    even = sequence.num_tokens // (2 * degrees) * (2 * degrees)
    even = np.where(degrees == 1, sequence.num_tokens, even)
    cells = even * (even + 1) / 2 if sequence.mask is Mask.CAUSAL else even.astype(np.float64) ** 2
    seconds: Seconds = np.zeros(len(degrees))
    for terms in cost.terms(degrees, crosses=crosses, speed=slowest):
        diagonal = np.where(degrees > 1, 1 / (degrees * (even + 1.0)), 0.0)
        covered = dataclasses.replace(terms, cover=np.minimum(terms.cover + diagonal, 1.0), edges_s=np.array(np.inf))
        seconds += covered.seconds(cells, even)
    return np.asarray(np.where(even > 0, np.maximum(seconds, computed_s), computed_s))


def check_longest(sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec) -> None:
    """All ranks together can hold the longest sequence; then every batch has a plan.

    Raises:
        InfeasiblePlanError: names the sequence, its tokens, the bound and the remedy.
        ValueError: no sequences, or ids that repeat.
    """
    check_ids(sequences)
    longest = max(sequences, key=lambda sequence: (sequence.num_tokens, -sequence.id))
    room = cluster.num_ranks * cluster.max_tokens_per_rank
    if longest.num_tokens > room:
        raise InfeasiblePlanError(
            f"sequence {longest.id} has {longest.num_tokens} tokens, {cluster.num_ranks} ranks hold at most {room} "
            f"({cluster.max_tokens_per_rank} each); lower data.max_seqlen, or add ranks or memory"
        )


def check_ids(sequences: Sequence[SequenceSpec]) -> None:
    """There are sequences, and their ids differ.

    Raises:
        ValueError: says what is wrong.
    """
    if not sequences:
        raise ValueError("sequences is empty, must hold at least 1; skip the batch")
    if len({sequence.id for sequence in sequences}) != len(sequences):
        raise ValueError(f"sequences hold ids that repeat, {len(sequences)} must differ; use positions in the batch")
