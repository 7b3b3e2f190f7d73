"""Stage 2: exact context-parallel degrees of atomic groups on N ranks, whatever their cost does with the degree."""

import numpy as np
import numpy.typing as npt

from rayfcp.values import InfeasiblePlanError

Table = npt.NDArray[np.float64]


def dynamic_program(table: Table) -> list[int]:
    """Degrees that minimise the makespan, by the 2D dynamic programme (Eq. 11, Algorithm 1).

    `table[g, d - 1]` is T(group g, degree d) in seconds, infinite where memory forbids d; columns are
    degrees 1..N. `best[j]` is the least makespan of the groups so far on exactly j ranks. Backtracking
    starts at the best j <= N: a group that does not gain from more ranks leaves them unused. Among equals the
    smaller degree wins.

    Raises:
        InfeasiblePlanError: the groups' least degrees need more than N ranks.
    """
    from rayfcp.plan.joint.kernels.stage_two import best_paths  # compiled: loaded on use

    num_groups = len(table)
    best, path = best_paths(np.ascontiguousarray(table, np.float64))
    left = int(best.argmin())
    if num_groups and not np.isfinite(best[left]):
        raise _infeasible(table)
    degrees = []
    for group in reversed(range(num_groups)):
        degrees.append(int(path[group, left]))
        left -= degrees[-1]
    return degrees[::-1]


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
        raise _infeasible(table)
    degrees: list[int] = ((table <= makespan_s).argmax(axis=1) + 1).tolist()
    return degrees


def _infeasible(table: Table) -> InfeasiblePlanError:
    allowed = np.isfinite(table)
    num_groups, num_ranks = table.shape
    needed = int((allowed.argmax(axis=1) + 1).sum()) if allowed.any(axis=1).all() else num_ranks + 1
    return InfeasiblePlanError(
        f"{num_groups} groups need {needed} ranks or more at their least degrees, the cluster has {num_ranks}; "
        "add ranks, or use more microbatches"
    )
