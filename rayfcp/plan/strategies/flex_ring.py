"""Flexible Context Parallelism (Niu et al., 2026): rings of any degree, chosen for every microbatch.

`packing: joint`, ours: how many microbatches, which sequences in each, groups and degrees searched together.
`packing: bfd`, `degrees: dp`: the paper's two stages. Best-fit decreasing makes atomic groups (section
4.4, stage 1), the dynamic programme gives them ranks (stage 2). The paper leaves open how a batch becomes
microbatches and lets memory alone fill the bins; we search over the number of microbatches and, in each,
over the capacity of the bins.
"""

from collections.abc import Sequence

from rayfcp.config.models import PlanConfig
from rayfcp.plan.assembly import Ring, assemble
from rayfcp.plan.cost import CostModel
from rayfcp.plan.degrees import dynamic_program, least_degrees
from rayfcp.plan.grouping import Grouping
from rayfcp.plan.joint import JointSearch
from rayfcp.plan.microbatches import Columns, columns_of
from rayfcp.plan.search import Packing, Search
from rayfcp.plan.strategies.interface import Proposal
from rayfcp.values import ClusterSpec, SequenceSpec

BOTH_UP_TO = 256  # sequences: up to so many the two stages are run too, and the better of both is taken

BOTH_FROM = 1.1  # of the lower bound: a larger batch that stays above it gets both as well


def propose(
    sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> Proposal:
    """The cheapest that was found, each microbatch with exact degrees."""
    batch = columns_of(sequences, cluster=cluster, cost=cost)
    search = _joint if options.packing == "joint" else _two_stages
    found, reason = search(batch, cluster=cluster, cost=cost, options=options)
    degrees_of = dynamic_program if options.degrees == "dp" else least_degrees
    rings = [
        [
            Ring(members=tuple(group), degree=degree)
            for group, degree in zip(each.groups, degrees_of(each.table), strict=True)
        ]
        for each in found
    ]
    return Proposal(microbatches=assemble(rings, batch=batch, cluster=cluster, cost=cost), reason=reason)


def _joint(
    batch: Columns, *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> tuple[Sequence[Grouping | Packing], str]:
    search = JointSearch(batch, cluster=cluster, cost=cost, max_moves=options.search_moves)
    found = search.run(max_more=options.max_microbatches)
    reason = f"best of {search.num_cuts} ways to cut the batch, in {search.num_moves} moves"
    found_s = cost.batch_s([each.makespan_s for each in found])
    if len(batch.ids) <= BOTH_UP_TO or found_s > BOTH_FROM * search.bound_s:
        other, other_reason = _two_stages(batch, cluster=cluster, cost=cost, options=options)
        if cost.batch_s([each.makespan_s for each in other]) < found_s:
            return other, other_reason
    return found, reason


def _two_stages(
    batch: Columns, *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> tuple[Sequence[Grouping | Packing], str]:
    search = Search(batch, cluster=cluster, cost=cost)
    found = search.run(max_more=options.max_microbatches)
    return found, f"best of {search.num_cuts} ways to cut the batch and {search.num_packings} ways to pack it"
