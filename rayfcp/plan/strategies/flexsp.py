"""FlexSP (Wang et al., ASPLOS 2025): Ulysses groups whose degrees are powers of two, mixed in each microbatch.

Source: arXiv 2412.01523, section 4, and the published solver. Sequences, sorted by length, are cut into microbatches
of consecutive ones with about equal tokens; in each, lengths become buckets (16, by dynamic programming), and a
mixed-integer programme puts the buckets' sequences onto groups of degrees 1, 2, 4, ..., for the least makespan;
several numbers of microbatches are tried. Solver: HiGHS on one thread with a budget of nodes, so that plans
do not depend on the clock (theirs: SCIP, many threads, a limit in seconds).

It starts from the best homogeneous plan, as theirs: one degree for all; and no plan is worse than the best one for the
whole batch, whatever its microbatches. Seconds of a bucket are those of its mean, not of its upper limit as there,
which on short sequences overstates them by a tenth; its memory is that of the upper limit. Numbers of
microbatches beyond the two that look best homogeneously are dropped, microbatches that one degree runs within 1 % of
the mean are left as they are, and the solver stops within 2 % of its bound. The paper is silent on which sequences of
a bucket a group gets: the longest goes to the group that has the least time so far.

Degrees divide heads. Where plan.primitives allow rings only, groups are rings of such degrees, which FlexSP itself does
not have. A group of one rank exchanges nothing.
"""

from collections.abc import Sequence

import numpy as np

from rayfcp.config.plan import PlanConfig
from rayfcp.plan.assembly import Draft, assemble
from rayfcp.plan.costs.model import CostModel
from rayfcp.plan.microbatches import Columns, columns_of
from rayfcp.plan.rivals.blaster import Blaster
from rayfcp.plan.rivals.opened import powers_of_two
from rayfcp.plan.rivals.static import best_static
from rayfcp.plan.strategies.interface import Proposal
from rayfcp.values import ClusterSpec, InfeasiblePlanError, Primitive, SequenceSpec

NUM_NODES = 400
"""Of all programmes of one batch; about 10 s for 512 sequences on 64 ranks."""


def propose(
    sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> Proposal:
    """The fastest plan found, or the best homogeneous one.

    Raises:
        InfeasiblePlanError: the longest sequence does not fit the largest group that ranks and heads permit.
    """
    batch = columns_of(sequences, cost=cost)
    primitive = Primitive.ULYSSES if Primitive.ULYSSES.value in options.primitives else Primitive.RING
    degrees = [
        degree
        for degree in powers_of_two(cluster.num_ranks)
        if np.isfinite(cost.group_s(1, 1, degree=degree, primitive=primitive))
    ]
    seed = best_static(batch, degrees=degrees, primitive=primitive, cluster=cluster, cost=cost, options=options)
    if seed is None:
        raise _infeasible(batch, degree=degrees[-1], primitive=primitive, cluster=cluster, cost=cost)
    kinds = [(degree, primitive if degree > 1 else Primitive.RING) for degree in degrees]
    blaster = Blaster(batch, kinds=kinds, cluster=cluster, cost=cost)
    best, seconds, reason = seed.microbatches, seed.predicted_s, f"degree {seed.degree} for all was not improved on"
    for drafts in blaster.run(max_more=options.max_microbatches, num_nodes=NUM_NODES):
        mixed = assemble(drafts, batch=batch, cluster=cluster, cost=cost)
        mixed_s = sum(microbatch.predicted_s for microbatch in mixed)
        if mixed_s < seconds:
            best, seconds, reason = mixed, mixed_s, _reason(drafts, blaster)
    return Proposal(microbatches=best, reason=f"{reason}; {primitive.value} groups of powers of two")


def _reason(drafts: Sequence[Sequence[Draft]], blaster: Blaster) -> str:
    return f"mixed degrees in {len(drafts)} microbatches, solved to {100 * blaster.gap:.1f} % of the bound"


def _infeasible(
    batch: Columns, *, degree: int, primitive: Primitive, cluster: ClusterSpec, cost: CostModel
) -> InfeasiblePlanError:
    room = cluster.max_tokens_per_rank
    heads = (
        f", must divide {cost.num_heads} heads and agree with {cost.num_kv_heads} key/value heads"
        if primitive is Primitive.ULYSSES
        else ""
    )
    return InfeasiblePlanError(
        f"sequence {batch.ids[0]} has {batch.num_tokens[0]} tokens, the largest group of flexsp holds "
        f"{degree * room} ({degree} ranks of {room} tokens: the degree is a power of two, at most "
        f"{cluster.num_ranks} ranks{heads}); lower data.max_seqlen, add memory, or use another strategy"
    )
