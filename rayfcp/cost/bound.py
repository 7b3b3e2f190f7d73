"""Lower bound on the seconds of every plan of a batch."""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from rayfcp.config.constraints import UNCONSTRAINED, HostConstraints
from rayfcp.cost.images import ImageColumns
from rayfcp.cost.model import CostModel, speeds_of
from rayfcp.cost.placement import node_of_ranks
from rayfcp.values import ClusterSpec, InfeasiblePlanError, Primitive, SequenceSpec
from rayfcp.values.arrays import Bools, Floats, Ints


def lower_bound(
    sequences: Sequence[SequenceSpec],
    *,
    cluster: ClusterSpec,
    cost: CostModel,
    primitives: Iterable[Primitive] = (Primitive.RING,),
    placed_freely: bool = False,
    constraints: HostConstraints = UNCONSTRAINED,
) -> float:
    """max(compute of all sequences / S, min over d of t(k, d) for the longest sequence k) + fewest microbatches x fixed
    cost.

    Compute is at the best efficiency that a sequence can reach: a ring of several ranks computes smaller blocks, so a
    sequence which memory keeps off one rank takes w(k) = the least over permitted degrees and primitives. t(k, d) is
    sequence k alone on d ranks without the fixed cost, over degrees d <= N that memory permits and over `primitives`; a
    group spans nodes only if it must, or if that were faster. Where blocks are `placed_freely` (plans with layouts of
    their own) there are no groups: t(k, d) is left out, and w(k) is the compute of k in one piece.

    With `constraints`, degrees d are the permitted ones, a group that holds k holds its unit, and the fewest
    microbatches are the least permitted number of them, n. What a microbatch computes hides no more than its own
    traffic of shards, which counts where n is large (5). Messages of recurrent layers are left out.

    S is the sum of the speeds s(r) of all N ranks, N where all are equally fast. What a rank computes takes it 1 / s(r)
    of the usual time: t(k, d) is that of the d fastest, and the fixed cost is N / S of the usual one beside the first
    term, 1 / the highest speed beside the second.

    Proof, for any plan of groups, on a machine that has the seconds of `cost` for every piece of attention, linear
    layer, message and gather (the simulator, whose ports and links only add waiting), and so for seconds by `cost`.
    Let f be the fixed cost of a microbatch, which every rank pays (f / s(r)), x the exposed gather.
    (1) Communication adds to what a rank computes and takes nothing away. The computed seconds of the d ranks of a
    group, each times the rank's speed, sum to at least w(k) over its sequences k, since d is permitted for each of
    them; so those of all N ranks over all microbatches sum to the w(k) of all. Let T be the largest over ranks of what
    they compute and pay of (3); then S T is at least that sum and N f for every microbatch.
    (2) A group that holds k needs d >= ceil(tokens of k / max_tokens_per_rank) ranks. The slowest of them is no faster
    than the d-th fastest of all, together they are no faster than the d fastest, and one of them takes t(k, d) for a
    permitted d in that microbatch, since other sequences only add to its rounds, and a slower rank takes no less: what
    it computes hides no more than itself. In each other microbatch it pays f / s(r). A longer sequence takes no less at
    any degree, so the longest stands for all.
    (3) A batch needs at least ceil(tokens / (N x max_tokens_per_rank)) microbatches. In each, a rank pays f / s(r), and
    x: embedding, head and first layer are gathered after all that it did before, and before it computes. After the last
    (after each, where each reduces: then x includes it) it waits for the reductions of its last layer, embedding and
    head, which begin when it has computed everything. No second of (3) is one of (1) or (2).
    (4) Images are encoded before the forward pass, backward after the backward pass of their microbatch, and every
    rank waits in each for all others, whose shards it gathers. So encoding (`_encoder_bound`) comes on top of (1) to
    (3): all of it in the mean over ranks, as in (1), and the largest image on one rank, as in (2).
    (5) A microbatch in which ranks compute for y takes h(y) (`CostModel.microbatch_s`), which is convex and no less
    than y + x. So n or more microbatches of (1), whose y sum to T, take n h(T / n) at least; and if one takes t(k, d) +
    f, as in (2), the others take h(f) each.
    (6) The host enqueues a microbatch's passes in `host_s` at least, one after the other, whatever ranks compute.

    Raises:
        InfeasiblePlanError: a sequence that all ranks together cannot hold, or no group of a permitted degree.
    """
    check_longest(sequences, cluster=cluster)
    cost = cost.without_states()
    num_ranks, speeds = cluster.num_ranks, speeds_of(cluster)
    num_tokens = sum(sequence.num_tokens for sequence in sequences)
    used = tuple(primitives)
    degrees = np.array(constraints.permitted(num_ranks), np.int64)
    longest = max(sequences, key=lambda each: each.num_tokens)
    held = sum(each.num_tokens for each in sequences if each.unit is not None and each.unit == longest.unit)
    enough = degrees[degrees >= -(-max(held, longest.num_tokens) // cluster.max_tokens_per_rank)]
    if not placed_freely and not len(enough):
        raise _no_degree(longest, max(held, longest.num_tokens), degrees, cluster=cluster)
    extra_s = 0.0 if placed_freely else _extra_s(sequences, degrees, cluster=cluster, cost=cost, primitives=used)
    compute_s = cost.compute_s(sum(sequence.attention_pairs for sequence in sequences), num_tokens)
    total = float(speeds.sum())
    shared_s = (compute_s + extra_s) / total
    alone_s = 0.0 if placed_freely else _alone_s(longest, enough, cluster=cluster, cost=cost, primitives=used)
    fewest = constraints.least_microbatches(-(-num_tokens // (num_ranks * cluster.max_tokens_per_rank)))
    fixed_s, fastest_s = cost.fixed_s * (num_ranks / total), cost.fixed_s / float(speeds.max())
    encoded_s, largest_s = _encoder_bound(sequences, cluster=cluster, cost=cost)
    bounds = [
        shared_s + fewest * (fixed_s + cost.exposed_s) + cost.reduce_exposed_s + encoded_s,
        alone_s + fewest * (fastest_s + cost.exposed_s) + cost.reduce_exposed_s + largest_s,
        fewest * cost.host_s + cost.reduce_exposed_s,
    ]
    if constraints.bind:
        mean_s = cost.microbatch_s(shared_s / fewest + fixed_s, last=False)
        longest_s = cost.microbatch_s(alone_s + fastest_s, last=False)
        rest_s = (fewest - 1) * cost.microbatch_s(fastest_s, last=False)
        bounds += [fewest * mean_s + cost.reduce_exposed_s, longest_s + rest_s + cost.reduce_exposed_s]
    return max(bounds)


def _no_degree(longest: SequenceSpec, held: int, degrees: Ints, *, cluster: ClusterSpec) -> InfeasiblePlanError:
    return InfeasiblePlanError(
        f"sequence {longest.id} or its unit has {held} tokens, of {cluster.max_tokens_per_rank} that a rank holds, "
        f"plan.constraints.degrees permits {degrees.tolist()} on {cluster.num_ranks} ranks; permit a larger degree, or "
        "add ranks or memory"
    )


def _encoder_bound(sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel) -> tuple[float, float]:
    """Seconds that images add at least to the two terms of `lower_bound`, that of all ranks together and that of one
    rank; (0, 0) without images.

    The images of a batch take their seconds on ranks that encode; the mean over ranks, weighted by speed, is the first
    term, the largest image on the fastest rank the second. An image has its tokens in its microbatch, so that at least
    ceil(tokens of images / (N x max_tokens_per_rank)) microbatches encode. In each, every rank pays the encoder's fixed
    seconds and its first gathers, and once its last reductions.
    """
    encoder, speeds = cost.encoder, speeds_of(cluster)
    if encoder is None or not len(images := ImageColumns.of(sequences)):
        return 0.0, 0.0
    forward_s, backward_s = encoder.passes_s(images.patches)
    seconds = forward_s + backward_s
    fewest = -(-int(images.tokens.sum()) // (cluster.num_ranks * cluster.max_tokens_per_rank))
    shown_s = fewest * encoder.exposed_s + encoder.reduce_exposed_s
    fixed_s = fewest * encoder.fixed_s
    shared_s = (float(seconds.sum()) + cluster.num_ranks * fixed_s) / float(speeds.sum())
    alone_s = (float(seconds.max()) + fixed_s) / float(speeds.max())
    return shared_s + shown_s, alone_s + shown_s


def _extra_s(
    sequences: Sequence[SequenceSpec],
    degrees: Ints,
    *,
    cluster: ClusterSpec,
    cost: CostModel,
    primitives: Iterable[Primitive],
) -> float:
    """Compute seconds beyond `cost.compute_s` that sequences which one rank cannot hold, or may not, take at least on
    all their ranks together. A ring of d of the `degrees` takes (d - 1 / 2) x half tokens per token of even slices, and
    at least one piece, as Ulysses does. Zero where layers have windows, through which few pieces are visible."""
    max_tokens = cluster.max_tokens_per_rank
    alone = max_tokens if 1 in degrees else 0
    tokens = np.array([each.num_tokens for each in sequences if each.num_tokens > alone], np.float64)
    if not len(tokens) or cost.attention_half_tokens == 0.0 or cost.layer_kinds:
        return 0.0
    used = tuple(primitives)
    whole = np.isfinite(cost.terms(degrees, primitive=Primitive.ULYSSES)[0].moved_s) & (Primitive.ULYSSES in used)
    least, degrees = -(-tokens // max_tokens), degrees[:, None]
    even = tokens // (2 * degrees) * (2 * degrees)
    in_ring = np.maximum((degrees - 0.5) * even - tokens / 2, 0.0) if Primitive.RING in used else np.inf
    extra = np.where(degrees >= least, np.where(whole[:, None], 0.0, in_ring), np.inf).min(axis=0)
    return float(extra.sum()) * cost.attention_half_tokens * cost.attention_s_per_pair


def _alone_s(
    sequence: SequenceSpec, degrees: Ints, *, cluster: ClusterSpec, cost: CostModel, primitives: Iterable[Primitive]
) -> float:
    nodes = Counter(node_of_ranks(cluster, ranks_per_node=cost.ranks_per_node))
    fastest = np.sort(speeds_of(cluster))[::-1]
    slowest = fastest[degrees - 1]
    load = sequence.attention_pairs, sequence.num_tokens
    seconds = [
        _rings_s(sequence, degrees, crosses=crosses, fastest=fastest, cost=cost)
        if primitive is Primitive.RING
        else cost.group_s(*load, degree=degrees, primitive=primitive, crosses=crosses, speed=slowest)
        for primitive in primitives
        for crosses in (np.full(len(degrees), True), degrees > max(nodes.values()))
    ]
    return float(np.min(seconds)) - cost.fixed_s / float(fastest[0])


def _rings_s(sequence: SequenceSpec, degrees: Ints, *, crosses: Bools, fastest: Floats, cost: CostModel) -> Floats:
    """Seconds that one rank of a ring takes at least, by degree.

    Every rank has two zig-zag slices of at least p = floor(L / 2d) tokens, so at least its share of 2 d p tokens: in
    its own round (2p)^2 / 2 + p causal pairs, in each other round 2 p^2, 2 p tokens to receive in each of d - 1 hops,
    and one to bring home. A round of c seconds of computation and m of transfers takes c + m - overlap x min(c, m) at
    least. That is convex: over the rounds that move, the sums take its place, with the diagonal, 1 / d (L + 1) of the
    rank's pairs, in the first one. Or, if that is more, the mean over ranks of all that they compute. The slowest of d
    ranks is as fast as the d-th of the `fastest`, all together as these are. With windows only the mean counts: next to
    nothing of the slices may be visible elsewhere.
    """
    slowest, together = fastest[degrees - 1], np.cumsum(fastest)[degrees - 1]
    computed_s = cost.compute_s(sequence.attention_pairs, sequence.num_tokens) / together + cost.fixed_s / fastest[0]
    if cost.layer_kinds:
        return np.asarray(computed_s)
    even = sequence.num_tokens // (2 * degrees) * (2 * degrees)
    even = np.where(degrees == 1, sequence.num_tokens, even)
    pairs = even * (even + 1) / 2
    seconds: Floats = np.zeros(len(degrees))
    for terms in cost.terms(degrees, crosses=crosses, speed=slowest):
        diagonal = np.where(degrees > 1, 1 / (degrees * (even + 1.0)), 0.0)
        covered = terms._replace(cover=np.minimum(terms.cover + diagonal, 1.0), edges_s=np.array(np.inf))
        seconds += covered.seconds(pairs, even)
    return np.asarray(np.where(even > 0, np.maximum(seconds, computed_s), computed_s))


def check_longest(sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec) -> None:
    """Check that all ranks together can hold the longest sequence; then every batch has a plan.

    Raises:
        InfeasiblePlanError: names the sequence, its tokens, the bound and the remedy.
        ValueError: no sequences, or ids that repeat.
    """
    check_ids(sequences)
    longest = max(sequences, key=lambda sequence: (sequence.num_tokens, -sequence.id))
    most = cluster.num_ranks * cluster.max_tokens_per_rank
    if longest.num_tokens > most:
        raise InfeasiblePlanError(
            f"sequence {longest.id} has {longest.num_tokens} tokens, {cluster.num_ranks} ranks hold at most {most} "
            f"({cluster.max_tokens_per_rank} each); lower data.max_seqlen, or add ranks or memory"
        )


def check_ids(sequences: Sequence[SequenceSpec]) -> None:
    """Check that there are sequences and that their ids differ.

    Raises:
        ValueError: names the fault.
    """
    if not sequences:
        raise ValueError("sequences is empty, must hold at least 1; skip the batch")
    if len({sequence.id for sequence in sequences}) != len(sequences):
        raise ValueError(f"sequences hold ids that repeat, {len(sequences)} must differ; use positions in the batch")
