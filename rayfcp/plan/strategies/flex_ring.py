"""Flexible Context Parallelism (Niu et al., 2026): groups of any degree, chosen for every microbatch.

`packing: joint`, ours: how many microbatches, which sequences in each, groups and degrees searched together.
`packing: bfd`, `degrees: dp`: the paper's two stages. Best-fit decreasing makes atomic groups (section
4.4, stage 1), the dynamic programme gives them ranks (stage 2). The paper leaves open how a batch becomes
microbatches and lets memory alone fill the bins; we search over the number of microbatches and, in each,
over the capacity of the bins. Groups use the fastest of the primitives that are allowed. Ranks of unequal speeds get
work in proportion (`rayfcp.plan.joint.unequal`).
"""

from collections.abc import Sequence

from rayfcp.config.plan import PlanConfig
from rayfcp.plan.assembly import assemble
from rayfcp.plan.costs.model import CostModel
from rayfcp.plan.microbatches import columns_of
from rayfcp.plan.strategies.interface import Proposal
from rayfcp.values import ClusterSpec, SequenceSpec


def propose(
    sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> Proposal:
    """The cheapest that was found, each microbatch with exact degrees."""
    from rayfcp.plan.joint.planner import Planner  # compiled: loaded where a plan is made, not where names are listed

    if any(speed != 1.0 for speed in cluster.speed_of_rank):
        from rayfcp.plan.joint.unequal import propose_unequal

        return propose_unequal(sequences, cluster=cluster, cost=cost, options=options)
    batch = columns_of(sequences, cost=cost)
    drafts, reason = Planner(batch, cluster=cluster, cost=cost, options=options).run()
    return Proposal(microbatches=assemble(drafts, batch=batch, cluster=cluster, cost=cost), reason=reason)
