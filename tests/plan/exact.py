"""The best of all plans, on batches small enough to try every one."""

import dataclasses

import numba
import numpy as np
import numpy.typing as npt

from rayfcp.plan import CostModel
from rayfcp.values import ClusterSpec, SequenceSpec

Table = npt.NDArray[np.float64]


def best_of_all_s(
    sequences: list[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, paces: int = 24
) -> tuple[float, float]:
    """Bounds on the seconds of the best plan of ring groups, over all cuts, groupings and degrees, groups priced as if
    each that fits in a node lay in one: no plan takes less than the first, some plan takes the second.

    The head must be priced as part of the layers (`within_layers`).
    A microbatch takes its slowest forward and its slowest backward, F + B, less what ranks run ahead, max(r B - g, 0),
    but no less than any group (`CostModel.makespan_s`). For any share p in (0, 1), F + B is at most x, the slowest
    group by max(forward / p, backward / (1 - p)), and equals it at p = F / (F + B); x - max(r (1 - p) x - g, 0) is
    least there too: for a larger p x is B / (1 - p), less r B at most, for a smaller one F / p, less r F / p - r F. So
    the least over a grid of shares is what some plan takes. With forward over the upper end of an interval and backward
    over the rest of its lower end p, x is at most F + B, and B at most (1 - p) (F + B): the least over intervals is
    what no plan gets below.
    `paces` x 3^n x N^2 / 2 steps for n sequences on N ranks: n up to 13 or so.
    """
    forward, backward = _tables(sequences, cluster=cluster, cost=cost)
    fits = np.isfinite(forward) & (forward + backward > 0)
    shares = forward[fits] / (forward + backward)[fits]
    grid = np.linspace(shares.min(), shares.max(), paces)
    upper, lower = np.full(len(forward), np.inf), np.full(len(forward), np.inf)
    for at, share in enumerate(grid.tolist()):
        upper = np.minimum(upper, _spans(_paced(forward, backward, cost=cost, shares=(share, share))))
        start = float(grid[max(at - 1, 0)])
        lower = np.minimum(lower, _spans(_paced(forward, backward, cost=cost, shares=(start, share))))
    least_s, most_s = (float(_cut(_beside(spans, cost))[-1, 1]) for spans in (lower, upper))
    return least_s, most_s


def within_layers(cost: CostModel) -> CostModel:
    """Return the cost model with the head as part of the layers."""
    return dataclasses.replace(cost, head_s_per_token=0.0, fixed_outer=0.0)


def _paced(forward: Table, backward: Table, *, cost: CostModel, shares: tuple[float, float]) -> Table:
    """Least or most time of a microbatch whose slowest group is this one, if forward is such a share."""
    low, high = shares
    both = np.maximum(forward / high, backward / (1 - low))
    with np.errstate(invalid="ignore"):
        paced = both - np.maximum(cost.ahead * (1 - low) * both - cost.ahead_s, 0.0)
    return np.where(np.isfinite(both), np.maximum(paced, forward + backward), np.inf)


def _beside(spans: Table, cost: CostModel) -> Table:
    """[sets, 2]: seconds of a microbatch of each set, and of one that comes last."""
    seconds = [[cost.microbatch_s(span_s, last=last) for last in (False, True)] for span_s in spans.tolist()]
    return np.array(seconds)


def _tables(sequences: list[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel) -> tuple[Table, Table]:
    """Forward and backward of (set of sequences, degree), sets as bit masks, infinite where memory forbids it."""
    masks = np.arange(1 << len(sequences))[:, None]
    held = (masks >> np.arange(len(sequences)) & 1).astype(np.float64)
    tokens = (held @ np.array([each.num_tokens for each in sequences], np.float64))[:, None]
    pairs = (held @ np.array([each.attention_pairs for each in sequences], np.float64))[:, None]
    degrees = np.arange(1, cluster.num_ranks + 1)
    forward, _, backward = cost.passes_s(pairs, tokens, degree=degrees)
    fits = tokens <= degrees * cluster.max_tokens_per_rank
    return np.where(fits, forward, np.inf), np.where(fits, backward, np.inf)


@numba.njit  # type: ignore[untyped-decorator]
def _spans(table: Table) -> Table:
    """Least makespan of every set on all ranks: `best[set, d]` on d ranks is the best over the group of its first
    sequence."""
    sets, num_ranks = table.shape
    best = np.full((sets, num_ranks + 1), np.inf)
    best[0] = 0.0
    for whole in range(1, sets):
        lowest = whole & -whole
        rest = whole ^ lowest
        part = rest
        while True:
            group = part | lowest
            for degree in range(1, num_ranks + 1):
                seconds = table[group, degree - 1]
                for ranks in range(degree, num_ranks + 1):
                    span_s = max(seconds, best[whole ^ group, ranks - degree])
                    best[whole, ranks] = min(best[whole, ranks], span_s)
            if part == 0:
                break
            part = (part - 1) & rest
    return best[:, num_ranks]


@numba.njit  # type: ignore[untyped-decorator]
def _cut(seconds: Table) -> Table:
    """Least seconds of every set: `best[set, 1]` has chosen the microbatch that comes last."""
    sets = len(seconds)
    best = np.full((sets, 2), np.inf)
    best[0, 0] = 0.0
    for whole in range(1, sets):
        lowest = whole & -whole
        rest = whole ^ lowest
        part = rest
        while True:
            group = part | lowest
            left = whole ^ group
            middle_s, end_s = seconds[group]
            best[whole, 0] = min(best[whole, 0], middle_s + best[left, 0])
            best[whole, 1] = min(best[whole, 1], middle_s + best[left, 1], end_s + best[left, 0])
            if part == 0:
                break
            part = (part - 1) & rest
    return best
