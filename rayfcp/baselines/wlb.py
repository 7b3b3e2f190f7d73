"""WLB-LLM (Wang et al., 2025): the better of two ways to shard, per batch, by an oracle.

Source: section 5, adaptive sharding: per-document sharding cuts each sequence evenly over all ranks, per-sequence
sharding keeps sequences whole where it can, and an estimator picks one. Flexible Context Parallelism
(block), appendix A.3, names them Ring Attention and ByteScale and replaces the estimator by an oracle; so
do we: `ring` and `bytescale`, whichever is predicted to be faster. WLB-LLM picks per microbatch, of
microbatches that its own packing made, and delays outlier documents to later batches; here the batch is given,
so nothing is delayed, and the choice is per batch.
"""

from collections.abc import Sequence

from rayfcp.baselines import bytescale, ring
from rayfcp.config.models import PlanConfig
from rayfcp.cost.model import CostModel
from rayfcp.plan.strategies.registry import Proposal, StrategyInfo
from rayfcp.plan.strategies.stages import in_stages
from rayfcp.values import ClusterSpec, Primitive, SequenceSpec


def propose(
    sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> Proposal:
    """The faster of both; the ring where they tie."""
    proposals = {
        "ring": ring.propose(sequences, cluster=cluster, cost=cost, options=options),
        "bytescale": bytescale.propose(sequences, cluster=cluster, cost=cost, options=options),
    }
    seconds = {name: _seconds(proposal) for name, proposal in proposals.items()}
    best, other = sorted(proposals, key=lambda name: seconds[name])
    return Proposal(
        microbatches=proposals[best].microbatches,
        reason=f"{best} is predicted to take {seconds[best]:.3g} s, {other} {seconds[other]:.3g} s",
    )


def _seconds(proposal: Proposal) -> float:
    return sum(microbatch.predicted_s for microbatch in proposal.microbatches)


INFO = StrategyInfo(
    name="wlb",
    propose=in_stages(propose),
    primitive=Primitive.RING,
    is_slow_in_stages=True,
    same_as=("ring", "bytescale"),
)
