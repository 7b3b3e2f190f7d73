"""A bound that no plan of groups gets below, for batches too large to try every plan, and how far plans are from
it.

python jobs/bench/certified.py --lengths FILE

Beyond `lower_bound` it knows that a sequence takes a degree at which it is within its microbatch's time, and pays for
that degree; that every microbatch has its own fixed cost, and memory for so many tokens; and that ranks meet twice,
after the slowest forward and after the slowest backward, whose ratio differs between long and short sequences.

Proof. Let F and B be the slowest forward and backward of a microbatch: its groups take T = F + B - max(q B - g, 0) at
least, the last being what ranks run ahead (`CostModel.makespan_s`), all together c(T) = T + (1 - overlap) x traffic +
exposed seconds, by a constant more if it is the last. Shards are in nobody's way here (`CostModel.apart`): they only
add to that. Let n_d be its number of groups of d ranks and x_kd be 1 where sequence k is in one. Of what a ring moves
all but the tail may hide. So forward of a group takes f0_d + sum of f_kd at least, linear in what it holds, and
backward likewise. Added up over the groups of d ranks:
(1) sum over k of f_kd x_kd <= n_d (F - f0_d), of b_kd x_kd <= n_d (B - b0_d), of tokens x_kd <= n_d d room; sum of
d n_d <= N;
(2) x_kd = 0 unless memory permits d and k alone takes at most F and B there: others only add to that.
Take any prices v_k >= 0 and s such that, whatever F and B are, what (1) and (2) permit has
(3) sum of v_k x_kd <= c(T) - s.
Summed over the microbatches of a plan, each sequence in one: M microbatches take at least sum of v_k + M s, and if s is
not negative more than M do too. Of several prices the best may be taken for each M.
(3) is checked on cells of (F, B) that cover all of them. In a cell let F', B' be the largest. For weights a_d, b_d, c_d
of sum 1 and r >= 0 let u_k = min over d of d a_d f_kd / (F' - f0_d) + d b_d b_kd / (B' - b0_d) + c_d tokens_k / room,
over the d that (2) permits there. By (1), with z_d = 1 - a_d (F' - F) / (F' - f0_d) - b_d (B' - B) / (B' - b0_d), sum
of u_k x_kd <= sum of d n_d z_d. So sum of v_k x_kd <= r N max(0, max over d of z_d) + sum of max(v_k - r u_k, 0). That
less T is convex in (F, B), hence largest at a corner. Cells where it is too much are halved; what is too much in
the end is taken off s. A microbatch of more seconds T than the best plan known is in no better plan: F + B are at most
as much over 1 - q.
v and s are the dual solution of a linear programme over a few (F, B); poor ones make the bound low, never wrong.
"""

import itertools

import numpy as np
from bounds import parser, print_ratios
from kinds import Cell, Floats, excess_s, weights
from mixes import Case, Prices, case_of, solved

from rayfcp.plan import CostModel
from rayfcp.values import ClusterSpec, Primitive, SequenceSpec

SHARES = (0.288, 0.296, 0.304, 0.312, 0.322, 0.333)  # of forward, of the first kinds of microbatches
EDGES = (0.0, 0.27, *np.arange(0.28, 0.346, 0.01).tolist(), 0.36, 1.0)  # of shares, of the first cells
SPANS, FIRST_CELLS = 16, 40
HALVINGS, FEWER = 11, 3  # of a cell in the last round, and how many fewer in those before, which only look for kinds
ENOUGH = 1e-3  # of the bound: closer to the linear programme it need not be
WORST = 12  # of the cells that are missed by most, apart, become kinds of the linear programme
ROUNDS = 3


def certified_s(
    sequences: list[SequenceSpec],
    *,
    cluster: ClusterSpec,
    cost: CostModel,
    best_s: float,
    primitives: tuple[Primitive, ...] = (Primitive.RING,),
    rounds: int = ROUNDS,
    halvings: int = HALVINGS,
) -> float:
    """No plan of groups of these primitives takes less, given that one takes `best_s`.

    Raises:
        ValueError: microbatches have no fixed cost, so that there may be any number of them.
    """
    if cost.fixed_s <= 0.0:
        raise ValueError(f"fixed_s is {cost.fixed_s}, must be more than 0; measure it")
    cost = cost.apart()
    case = case_of(sequences, cluster=cluster, cost=cost, primitives=primitives, best_s=best_s)
    room = cluster.num_ranks * cluster.max_tokens_per_rank
    fewest = -(-sum(each.num_tokens for each in sequences) // room)
    tried: list[Prices] = []
    while not tried or (tried[-1].extra_s < 0.0 and fewest + len(tried) <= len(sequences)):
        tried.append(_best_prices(case, fewest + len(tried), rounds, halvings))
    more = fewest + len(tried)
    found = [max(_bound_s(case, prices, count) for prices in tried) for count in range(fewest, more)]
    return min(best_s, *found, _bound_s(case, tried[-1], more)) * (1 - 1e-9)


def _bound_s(case: Case, prices: Prices, count: int) -> float:
    return float(prices.each.sum()) + prices.extra_s * count + case.last_s


def _best_prices(case: Case, count: int, rounds: int, halvings: int) -> Prices:
    """Proven prices for `count` microbatches: of the linear programme over more and more kinds, where they matter."""
    spans = np.geomspace(max(1.2 * case.least_s, 0.04 * case.best_s), case.best_s, SPANS)
    kinds = {(float(each), share) for each in spans for share in SHARES}
    best = None
    for turn in range(rounds):
        hoped, used = solved(case, sorted(kinds), count)
        prices, missed = _proven(case, hoped, count, halvings - (FEWER if turn < rounds - 1 else 0))
        if best is None or _bound_s(case, prices, count) > _bound_s(case, best, count):
            best = prices
        hoped_s = float(hoped.classes @ case.classes.count) + hoped.extra_s * count
        if _bound_s(case, prices, count) > (1 - ENOUGH) * hoped_s:
            break
        near = [(a, b) for s, p in used for a, b in ((1.04 * s, p), (0.96 * s, p), (s, p + 0.003), (s, p - 0.003))]
        kinds |= {(round(seconds, 5), round(share, 5)) for seconds, share in missed + near}
    assert best is not None
    return best


def _proven(case: Case, hoped: Prices, count: int, most: int) -> tuple[Prices, list[tuple[float, float]]]:
    """The same prices with as much less for a microbatch as they exceed what some cell permits; and the worst cells."""
    longest_s = max(case.best_s, 2 * case.least_s) / (1 - case.loads.ahead.share)
    edges = [case.least_s, *np.geomspace(1.5 * case.least_s, longest_s, FIRST_CELLS)]
    worst = 0.3 * ENOUGH * case.best_s / count
    none = np.full((3, len(case.loads.degrees)), np.nan)
    cells = [
        (Cell(*seconds, *shares), none, 0)
        for seconds in itertools.pairwise(edges)
        for shares in itertools.pairwise(EDGES)
    ]
    missed = []
    while cells:
        cell, hints, halvings = cells.pop()
        over_s = _over_s(case, hoped, cell, hints)
        if over_s > worst:
            hints = weights(case.classes, hoped.classes, cell.far)
            over_s = _over_s(case, hoped, cell, hints)
        if over_s > worst and halvings < most:
            cells += [(half, hints, halvings + 1) for half in cell.halves()]
        elif over_s > worst:
            worst = over_s
            missed.append((cell.stop_s, (cell.low + cell.high) / 2))
    return hoped._replace(extra_s=hoped.extra_s - worst), missed[-4 * WORST :: 4]


def _over_s(case: Case, hoped: Prices, cell: Cell, hints: Floats) -> float:
    return excess_s(case.loads, hoped.each, cell, hints) - case.beside_s + hoped.extra_s


def main() -> None:
    """Print the ratios of every batch, and their means."""
    print_ratios(parser(__doc__, batches=3).parse_args(), bound=certified_s)


if __name__ == "__main__":
    main()
