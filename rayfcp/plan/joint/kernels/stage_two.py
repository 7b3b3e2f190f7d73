"""The 2D dynamic programme (Flexible Context Parallelism, Eq. 11, Algorithm 1)."""

import math

import numpy as np

from rayfcp.plan.compiled import compiled
from rayfcp.plan.joint.kernels.price import Floats, Ints


@compiled
def best_paths(table: Floats) -> tuple[Floats, Ints]:
    """`best[j]`: the least makespan of all groups on exactly j ranks; `path[g, j]`: the degree of group g there."""
    num_groups, num_ranks = table.shape
    best = np.full(num_ranks + 1, np.inf)
    best[0] = -np.inf
    path = np.ones((num_groups, num_ranks + 1), np.int64)
    for group in range(num_groups):
        after = np.full(num_ranks + 1, np.inf)
        for ranks in range(1, num_ranks + 1):
            least_s, choice = math.inf, 1
            for degree in range(1, ranks + 1):
                makespan_s = max(best[ranks - degree], table[group, degree - 1])
                if makespan_s < least_s:
                    least_s, choice = makespan_s, degree
            after[ranks], path[group, ranks] = least_s, choice
        best = after
    return best, path
