"""Unequal ranks: what a rank of speed s does itself (attention, linear layers, the fixed cost of a microbatch) takes it
1 / s of the usual time, what moves takes as long as ever."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from rayfcp.plan.costs.model import CostModel
from rayfcp.values import ClusterSpec

Floats = npt.NDArray[np.float64]


def speeds_of(cluster: ClusterSpec) -> Floats:
    """Of each rank."""
    return np.array(cluster.speed_of_rank or (1.0,) * cluster.num_ranks, np.float64)


def group_speeds(groups: Iterable[Sequence[int]], *, cluster: ClusterSpec) -> Floats:
    """Of each group's slowest rank: its ranks have equal work and wait for each other."""
    held = list(groups)
    if not cluster.speed_of_rank:
        return np.ones(len(held))
    return np.array([min(cluster.speed_of_rank[rank] for rank in ranks) for ranks in held], np.float64)


def idle_passes_s(cost: CostModel, *, cluster: ClusterSpec) -> Floats:
    """Seconds of forward and backward that every microbatch takes the slowest rank, also one without tokens."""
    slowest = float(speeds_of(cluster).min())
    return np.array([float(terms.fixed_s) / slowest for terms in cost.terms(1.0)])


def slowed(cost: CostModel, *, speed: float) -> CostModel:
    """The costs of ranks of that speed."""
    if speed == 1.0:
        return cost
    return cost.with_coefficients(
        attention_s_per_cell=cost.attention_s_per_cell / speed,
        linear_s_per_token=cost.linear_s_per_token / speed,
        fixed_s=cost.fixed_s / speed,
    )
