"""Flexible Context Parallelism (Niu et al., 2026): groups of any degree, chosen for every microbatch.

`packing: joint`, ours: how many microbatches, which sequences in each, groups and degrees searched together.
`packing: bfd`, `degrees: dp`: the paper's two stages. Best-fit decreasing makes atomic groups (section
4.4, stage 1), the dynamic program gives them ranks (stage 2). The paper leaves open how a batch becomes
microbatches and lets memory alone fill the bins; we search over the number of microbatches and, in each,
over the capacity of the bins. Groups use the fastest of the primitives that are allowed. Ranks of unequal speeds get
work in proportion (`rayfcp.plan.groups.unequal`).
"""

from collections.abc import Sequence
from dataclasses import replace

from rayfcp.config.models import PlanConfig
from rayfcp.cost.model import CostModel
from rayfcp.plan.assembly import assemble, columns_of, members_of, united
from rayfcp.plan.constraints import has_units
from rayfcp.plan.strategies.registry import Proposal, StrategyInfo
from rayfcp.plan.strategies.stages import in_stages
from rayfcp.values import ClusterSpec, SequenceSpec


def propose(
    sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> Proposal:
    """The cheapest that was found, each microbatch with exact degrees."""
    from rayfcp.plan.groups.planner import GroupPlanner

    if any(speed != 1.0 for speed in cluster.speed_of_rank):
        from rayfcp.plan.groups.unequal import propose_unequal

        return propose_unequal(sequences, cluster=cluster, cost=cost, options=options)
    batch = columns_of(sequences, cost=cost)
    units, parts = united(batch, sequences) if has_units(sequences) else (batch, None)
    drafts, reason = GroupPlanner(units, cluster=cluster, cost=cost, options=options).run()
    if parts is not None:
        drafts = [[replace(draft, members=members_of(draft, parts)) for draft in each] for each in drafts]
    microbatches = assemble(drafts, batch=batch, cluster=cluster, cost=cost, placement=options.constraints.placement)
    return Proposal(microbatches=microbatches, reason=reason)


INFO = StrategyInfo(
    name="flex-ring",
    propose=in_stages(propose, recompute="adaptive"),
    is_baseline=False,
    spreads_images=True,
    contains=("static-cp", "ulysses", "dynamic-cp"),
)
