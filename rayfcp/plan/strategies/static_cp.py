"""Static context parallelism as in Megatron-LM: one degree for the whole batch, zig-zag rings.

Source: Megatron-LM's `context_parallel_size`, which must divide the ranks; groups of consecutive ranks, the
others in data parallelism; sequences packed, up to degree x tokens per rank; per-rank work halves zig-zag.
Tuned as its authors would: every divisor of N is tried as degree and every number of microbatches, up to
`plan.max_microbatches` above the fewest.

The source packs sequences before training or, in the order in which they come, into bins of the
capacity, by tokens alone; it is silent on which packing suits a batch. `plan.packing: bfd` is that standard,
at its best: best-fit decreasing by length, at the least capacity that needs no more microbatches. Otherwise
packs are also balanced by time, which Megatron-LM does not do, and the better is taken. Packs are dealt
by time, so that groups that wait for each other hold packs of like time.
The degree is chosen per batch, not once for a run: the strongest that a static planner could be.
Over several pipeline stages, packs pass by 1F1B; degree and microbatch count are chosen by the pipeline's makespan.
"""

from collections.abc import Sequence

from rayfcp.config.plan import PlanConfig
from rayfcp.plan.costs.model import CostModel
from rayfcp.plan.microbatches import columns_of
from rayfcp.plan.primitives import require
from rayfcp.plan.rivals.staged import static_in_stages
from rayfcp.plan.rivals.static import best_static, divisors
from rayfcp.plan.strategies.interface import Proposal
from rayfcp.values import ClusterSpec, Primitive, SequenceSpec


def propose(
    sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> Proposal:
    """The cheapest degree; N itself always holds the longest sequence.

    Raises:
        InfeasiblePlanError: rings are not allowed; or stages do not have the memory.
    """
    require(Primitive.RING, options=options, strategy="static-cp")
    degrees = divisors(cluster.num_ranks)
    if cluster.num_stages > 1:
        staged = static_in_stages(
            sequences, degrees=degrees, primitive=Primitive.RING, cluster=cluster, cost=cost, options=options
        )
        assert staged is not None
        return staged
    batch = columns_of(sequences, cost=cost)
    found = best_static(
        batch,
        degrees=degrees,
        primitive=Primitive.RING,
        cluster=cluster,
        cost=cost,
        options=options,
    )
    assert found is not None
    return Proposal(
        microbatches=found.microbatches,
        reason=f"degree {found.degree} is the best static one of {found.num_packings} ways to pack the batch",
    )
