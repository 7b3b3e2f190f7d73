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
from rayfcp.plan.assembly import Draft, assemble, columns_of, united
from rayfcp.plan.constraints import is_constrained
from rayfcp.plan.strategies.registry import Proposal, StrategyInfo
from rayfcp.plan.strategies.stages import in_stages
from rayfcp.values import ClusterSpec, SequenceSpec


def propose(
    sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> Proposal:
    """The cheapest that was found, each microbatch with exact degrees."""
    from rayfcp.plan.groups.planner import GroupPlanner

    unequal = any(speed != 1.0 for speed in cluster.speed_of_rank)
    if unequal and not is_constrained(sequences, options.constraints):
        from rayfcp.plan.groups.unequal import propose_unequal

        return propose_unequal(sequences, cluster=cluster, cost=cost, options=options)
    batch = columns_of(sequences, cost=cost)
    if any(sequence.unit is not None for sequence in sequences):
        units, parts = united(batch, sequences)
        drafts, reason = GroupPlanner(units, cluster=cluster, cost=cost, options=options).run()
        drafts = [[replace(draft, members=_members(draft, parts)) for draft in each] for each in drafts]
    else:
        drafts, reason = GroupPlanner(batch, cluster=cluster, cost=cost, options=options).run()
    microbatches = assemble(drafts, batch=batch, cluster=cluster, cost=cost, placement=options.constraints.placement)
    return Proposal(microbatches=microbatches, reason=reason)


def _members(draft: Draft, parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Positions of the sequences of a draft of units."""
    return tuple(sorted(at for unit in draft.members for at in parts[unit]))


INFO = StrategyInfo(
    name="flex-ring",
    propose=in_stages(propose, recompute="adaptive"),
    is_baseline=False,
    spreads_images=True,
)
