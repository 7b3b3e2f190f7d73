"""The least makespan of groups by thresholds: an oracle for the dynamic program and the compiled search."""

import numpy as np

from rayfcp.plan.groups.two_stage import Table
from rayfcp.values import InfeasiblePlanError


def least_makespan(table: Table) -> float:
    """The least makespan that `dynamic_program` can reach, in O(K N); infinite if no degrees fit.

    With E(g, d) = min of T(g, 1..d), the ranks needed for makespan T are the sum over groups of the
    least d with E(g, d) <= T, that is K + the number of entries of E above T. They fit in N exactly
    when at most N - K entries lie above T, so the least T is the (N - K + 1)-th largest entry of E, or
    the largest of the groups' own minima E(g, N) where that is more.
    """
    num_groups, num_ranks = table.shape
    if num_groups > num_ranks:
        return float("inf")
    least = np.minimum.accumulate(table, axis=1)
    rank = least.size - 1 - (num_ranks - num_groups)
    threshold = np.partition(least, rank, axis=None)[rank]
    return float(max(threshold, least[:, -1].max()))


def least_degrees(table: Table) -> list[int]:
    """The least degrees that reach `least_makespan`: what is left over would not help, and stays unused.

    Raises:
        InfeasiblePlanError: the groups' least degrees need more than N ranks.
    """
    makespan_s = least_makespan(table)
    if not np.isfinite(makespan_s):
        raise InfeasiblePlanError(f"{len(table)} groups have no degrees that fit {table.shape[1]} ranks")
    degrees: list[int] = ((table <= makespan_s).argmax(axis=1) + 1).tolist()
    return degrees
