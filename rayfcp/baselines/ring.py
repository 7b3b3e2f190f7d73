"""Ring Attention (Liu et al., 2023): every sequence over all N ranks.

Source: section 3, one ring of all ranks. It cuts sequences into contiguous blocks, which leaves causal masks uneven; as
in Flexible Context Parallelism (block), appendix A.3, slices are zig-zag. Silent on many sequences of many lengths:
they go into the fewest microbatches that best-fit decreasing finds in memory. More could not be faster but
for traffic of parameters: of one group's attention and traffic together no more is exposed than of each part.
"""

from collections.abc import Sequence

from rayfcp.config.models import PlanConfig
from rayfcp.cost.model import CostModel
from rayfcp.plan.assembly import Draft, assemble, best_fit_decreasing, bins_of, columns_of
from rayfcp.plan.strategies.registry import Proposal, StrategyInfo
from rayfcp.plan.strategies.stages import in_stages
from rayfcp.values import ClusterSpec, Primitive, SequenceSpec


def propose(
    sequences: Sequence[SequenceSpec],
    *,
    cluster: ClusterSpec,
    cost: CostModel,
    options: PlanConfig,  # noqa: ARG001
) -> Proposal:
    """One group of all ranks per microbatch."""
    batch = columns_of(sequences, cost=cost)
    budget_tokens = cluster.num_ranks * cluster.max_tokens_per_rank
    packed = bins_of(best_fit_decreasing(batch.num_tokens, capacity_tokens=budget_tokens) or [])
    rings = [[Draft(members=tuple(members), degree=cluster.num_ranks)] for members in packed]
    microbatches = assemble(rings, batch=batch, cluster=cluster, cost=cost)
    return Proposal(
        microbatches=microbatches, reason=f"every sequence over all {cluster.num_ranks} ranks, as memory permits"
    )


INFO = StrategyInfo(name="ring", propose=in_stages(propose), primitive=Primitive.RING)
