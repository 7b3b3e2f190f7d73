"""Share of a batch's gap that its longest sequence alone explains, whatever the planner.

python jobs/bench/longest.py --lengths FILE

Beyond `lower_bound` it knows that the longest sequence takes a degree, and that memory bounds what the other ranks
compute meanwhile.

Proof. Let k be the longest sequence, of w_k seconds of compute, S what the groups of its microbatch take together
(`CostModel.makespan_s`), f the fixed cost. Shards that share ports with messages only add to that.
Its group has d ranks, of a primitive and a degree that memory permits.
(1) Each pass of the group takes at least the larger of two sums, each linear in its pairs and tokens: all that can hide
hides, or attention hides all that it can (`Terms`). Any other sequence j of the group adds at least a_j / N to each,
a_j being its compute in that pass: that is checked for every j, degree and primitive. So S is at least t(k, d) + e / N,
e being the compute of the others in the group.
(2) The other N - d ranks hold at most (N - d) x max_tokens_per_rank tokens. By Dantzig's bound of the knapsack problem
they compute at most K(d), for which sequences are taken by compute per token until these tokens are full.
(3) So of the N (S - f) seconds of all ranks in this microbatch, useful ones are at most w_k + e + K(d), and wasted ones
at least N (t(k, d) - f) - w_k - K(d), if that is not negative. Those of the other microbatches are at least the
compute of what they hold. Added up and divided by N: all microbatches take at least what `lower_bound` has for its
shared compute, plus the N-th part of the least waste of any permitted d.
"""

import numpy as np
import numpy.typing as npt
from bounds import parser, print_ratios

from rayfcp.cost.kernels.group_time import Terms
from rayfcp.plan import CostModel
from rayfcp.values import ClusterSpec, Primitive, SequenceSpec
from rayfcp.values.arrays import Floats


def beside_longest_s(
    sequences: list[SequenceSpec],
    *,
    cluster: ClusterSpec,
    cost: CostModel,
    primitives: tuple[Primitive, ...],
    **_: float,
) -> float:
    """Lower bound on plans of groups of these primitives; no more than the compute shared by all ranks where nothing
    must be wasted."""
    ordered = sorted(sequences, key=lambda each: (-each.num_tokens, -each.attention_pairs))
    tokens = np.array([each.num_tokens for each in ordered], np.float64)
    pairs = np.array([each.attention_pairs for each in ordered], np.float64)
    work_s = np.asarray(cost.compute_s(pairs, tokens), np.float64)
    num_ranks, room = cluster.num_ranks, cluster.max_tokens_per_rank
    degrees = np.arange(-(-ordered[0].num_tokens // room), num_ranks + 1)
    beside_s = _most_work(tokens[1:], work_s[1:], (num_ranks - degrees) * float(room))
    wasted_s = np.inf
    for primitive in primitives:
        for crosses in (degrees > cost.ranks_per_node, np.ones(len(degrees), np.bool_)):
            passes = cost.terms(degrees, primitive=primitive, crosses=crosses)
            alone_s = sum(terms.seconds(pairs[0], tokens[0]) for terms in passes) - cost.fixed_s
            wasted = np.maximum(num_ranks * alone_s - work_s[0] - beside_s, 0.0)
            adds = _adds_enough(passes, pairs[1:], tokens[1:], num_ranks=num_ranks, cost=cost)
            wasted_s = min(wasted_s, float(np.where(adds, wasted, 0.0).min()))
    fewest = -(-int(tokens.sum()) // (num_ranks * room))
    shared_s = (float(work_s.sum()) + wasted_s) / num_ranks
    return shared_s + fewest * (cost.fixed_s + cost.exposed_s) + cost.reduce_exposed_s


def _most_work(tokens: Floats, work_s: Floats, rooms: Floats) -> Floats:
    """Dantzig's bound: by compute per token until so many tokens are taken, the last in part."""
    order = np.argsort(-work_s / tokens, kind="stable")
    held = np.concatenate([[0.0], np.cumsum(tokens[order])])
    return np.asarray(np.interp(rooms, held, np.concatenate([[0.0], np.cumsum(work_s[order])])), np.float64)


def _adds_enough(
    passes: tuple[Terms, Terms], pairs: Floats, tokens: Floats, *, num_ranks: int, cost: CostModel
) -> npt.NDArray[np.bool_]:
    """[degrees]: (1) of the proof holds there for every sequence."""
    found = np.ones(np.shape(passes[0].moved_s), np.bool_)
    pairs, tokens = pairs[:, None], tokens[:, None]
    shares = (cost.attention_forward, cost.linear_forward), (1 - cost.attention_forward, 1 - cost.linear_forward)
    for terms, (attention, linear) in zip(passes, shares, strict=True):
        needed = attention * cost.attention_s_per_pair * (pairs + cost.attention_half_tokens * tokens / 2)
        needed = (needed + linear * cost.linear_s_per_token * tokens) / num_ranks
        hidden, shown = (pair * pairs + token * tokens for pair, token, _ in terms.lines()[:2])
        found &= (np.minimum(hidden, shown) >= needed * (1 - 1e-12)).all(axis=0)
    return found


def main() -> None:
    """Print the ratios of every batch, and their means."""
    print_ratios(parser(__doc__, batches=10).parse_args(), bound=beside_longest_s)


if __name__ == "__main__":
    main()
