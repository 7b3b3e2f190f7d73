"""Ring Attention (Liu et al., 2023) with zig-zag slices: every sequence over all N ranks, in the
fewest microbatches that best-fit decreasing finds in memory."""

from collections.abc import Sequence

from rayfcp.config.models import PlanConfig
from rayfcp.plan.assembly import Ring, assemble
from rayfcp.plan.cost import CostModel
from rayfcp.plan.microbatches import columns_of
from rayfcp.plan.packing import best_fit_decreasing, bins_of
from rayfcp.plan.strategies.interface import Proposal
from rayfcp.values import ClusterSpec, SequenceSpec


def propose(
    sequences: Sequence[SequenceSpec],
    *,
    cluster: ClusterSpec,
    cost: CostModel,
    options: PlanConfig,  # noqa: ARG001 (there is nothing to choose)
) -> Proposal:
    """One group of all ranks per microbatch."""
    batch = columns_of(sequences, cluster=cluster, cost=cost)
    room = cluster.num_ranks * cluster.max_tokens_per_rank
    packed = bins_of(best_fit_decreasing(batch.num_tokens, capacity_tokens=room) or [])
    rings = [[Ring(members=tuple(members), degree=cluster.num_ranks)] for members in packed]
    microbatches = assemble(rings, batch=batch, cluster=cluster, cost=cost)
    return Proposal(
        microbatches=microbatches, reason=f"every sequence over all {cluster.num_ranks} ranks, as memory permits"
    )
