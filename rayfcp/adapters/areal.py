"""Groups of AReaL: `kk_allocate` and `ffd_allocate` with rayfcp's plans."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from rayfcp.adapters import bins
from rayfcp.adapters.planning import HostPlanner, planner_for


def allocate(
    values: Sequence[int],
    capacity: int,
    *,
    min_groups: int | None = None,
    n_groups_divisor: int = 1,
    **settings: Any,
) -> list[list[int]]:
    """Return positions of `values`, lengths in tokens, by group: as few groups as AReaL's arguments allow, of which the
    longest takes the least time. Both of AReaL's uses are of this kind: microbatches of one rank, of which other ranks
    have as many, and the trajectories of each rank.

    Raises:
        InfeasiblePlanError: A sequence longer than `capacity`, or fewer sequences than groups.
    """
    return bins.balanced(
        planner_for(**settings),
        values,
        capacity=capacity,
        num_bins=min_groups or 1,
        multiple=n_groups_divisor,
    )


def install(seqpack: Any, **settings: Any) -> HostPlanner:
    """Put `allocate` in the place of AReaL's algorithms in the module `areal.utils.seqpack`.

    `settings`: `planner`, or arguments of `HostPlanner`. Returns the planner, whose `observe` takes the time of a step.
    """
    planner = planner_for(**settings)
    seqpack.kk_allocate = seqpack.ffd_allocate = partial(allocate, planner=planner)
    return planner
