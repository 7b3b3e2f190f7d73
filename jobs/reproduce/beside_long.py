"""Seconds that no plan of groups beats, for batches with one long sequence: closer than the general lower bound.

The general bound takes the larger of all work shared evenly and of the long sequence alone at its best degree. No plan
has both: a degree at which the long sequence is that fast keeps ranks from the others.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from rayfcp.plan import CostModel
from rayfcp.plan.costs.terms import Terms
from rayfcp.plan.placement import node_of_ranks
from rayfcp.values import ClusterSpec, Primitive, SequenceSpec

Floats = npt.NDArray[np.float64]


def beside_long_s(
    sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, primitives: Iterable[Primitive]
) -> float:
    """By the cost model, for the longest sequence k and the others j of work w(j).

    Proof. Let k be in a group of d ranks, which alone takes t(k, d), in a microbatch that takes S, and f the fixed cost
    that every rank pays in every microbatch. Shards are in nobody's way here (`CostModel.apart`): they only add to
    that. A pass of a group is the largest of three sums of its sequences' terms (what moves hides behind attention, or
    attention runs out, or that of steady rounds does), so each j in the group of k adds at least r(j, d), the smallest
    of its terms, to each of d ranks; elsewhere j takes w(j) of the ranks' time.
    (1) Hence all ranks over all microbatches have d (t(k, d) - f) + sum of min(w(j), d r(j, d)) to do, beside f.
    (2) S >= t(k, d). Beside k memory has room for so many tokens; the work in them is at most that of the densest of
    the others, filled up with a part of one. What is left takes its share of all ranks in other microbatches.
    So a plan takes at least the larger of both for its d: the least over d is the bound.
    """
    cost = cost.apart()
    ordered = sorted(sequences, key=lambda each: each.num_tokens)
    long, others = ordered[-1], ordered[:-1]
    num_ranks, room = cluster.num_ranks, cluster.max_tokens_per_rank
    tokens = np.array([each.num_tokens for each in others], np.float64)
    cells = np.array([each.attention_cells for each in others], np.float64)
    work_s = np.array([cost.compute_s(each.attention_cells, each.num_tokens) for each in others])
    elsewhere_s = work_s.sum() - _densest_s(tokens, work_s, room=num_ranks * room - long.num_tokens)
    fewest = -(-sum(each.num_tokens for each in sequences) // (num_ranks * room))
    degrees = np.arange(-(-long.num_tokens // room), num_ranks + 1)
    largest = max(Counter(node_of_ranks(cluster, ranks_per_node=cost.ranks_per_node)).values())
    least = []
    for primitive in primitives:
        for crosses in (degrees > largest, np.full(len(degrees), True)):
            passes = cost.terms(degrees, primitive=primitive, crosses=crosses)
            alone_s = sum(each.seconds(long.attention_cells, long.num_tokens) for each in passes)
            added_s = degrees[:, None] * sum(_added_s(each, cells, tokens) for each in passes)
            shared_s = degrees * (alone_s - cost.fixed_s) + np.minimum(added_s, work_s).sum(axis=1)
            first = shared_s / num_ranks + fewest * cost.fixed_s
            second = alone_s + elsewhere_s / num_ranks + (fewest - 1) * cost.fixed_s
            least.append(float(np.maximum(first, second).min()))
    return min(least) + fewest * cost.exposed_s + cost.reduce_exposed_s


def _densest_s(tokens: Floats, work_s: Floats, *, room: float) -> float:
    """The most work that so many tokens can have."""
    order = np.argsort(-work_s / tokens, kind="stable")
    held = np.cumsum(tokens[order])
    share = np.clip((room - (held - tokens[order])) / tokens[order], 0.0, 1.0)
    return float((work_s[order] * share).sum())


def _added_s(terms: Terms, cells: Floats, tokens: Floats) -> Floats:
    """[degrees, sequences]: what each adds to every rank of a group at least."""
    attention, linear, moved, tail, cover, steady, edges = (
        np.broadcast_to(each, np.shape(terms.moved_s))[:, None]
        for each in (
            terms.attention_s_per_cell,
            terms.linear_s_per_token,
            terms.moved_s_per_token,
            terms.tail_s_per_token,
            terms.cover,
            terms.steady,
            terms.edges_s_per_token,
        )
    )
    attends_s = attention * cells + terms.attention_s_per_token[:, None] * tokens
    whole_s = attends_s + (linear + moved) * tokens
    steady_s = steady * attends_s + edges * tokens
    hides_s = terms.hidden * np.maximum(np.maximum((moved - tail) * tokens, cover * attends_s), steady_s)
    return np.asarray(whole_s - hides_s)
