"""Flexible Context Parallelism (Niu et al., 2026): rings of any degree, chosen for every microbatch.

Best-fit decreasing makes atomic groups (section 4.4, stage 1), the dynamic programme gives them ranks
(stage 2). The paper leaves open how a batch becomes microbatches and lets memory alone fill the bins; we
search over the number of microbatches and, in each, over the capacity of the bins.
"""

from collections.abc import Sequence

from rayfcp.config.models import PlanConfig
from rayfcp.plan.assembly import Ring, assemble
from rayfcp.plan.cost import CostModel
from rayfcp.plan.degrees import dynamic_program
from rayfcp.plan.microbatches import columns_of
from rayfcp.plan.search import Search
from rayfcp.plan.strategies.interface import Proposal
from rayfcp.values import ClusterSpec, SequenceSpec


def propose(
    sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> Proposal:
    """The cheapest cut that was tried, each microbatch with its best capacity and exact degrees."""
    batch = columns_of(sequences, cluster=cluster, cost=cost)
    search = Search(batch, cluster=cluster, cost=cost)
    rings = [
        [
            Ring(members=tuple(group), degree=degree)
            for group, degree in zip(packing.groups, dynamic_program(packing.table), strict=True)
        ]
        for packing in search.run(max_more=options.max_microbatches)
    ]
    return Proposal(
        microbatches=assemble(rings, batch=batch, cluster=cluster, cost=cost),
        reason=f"best of {search.num_cuts} ways to cut the batch and {search.num_packings} ways to pack it",
    )
