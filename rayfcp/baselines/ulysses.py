"""DeepSpeed-Ulysses (Jacobs et al., 2023): one degree for the whole batch, all-to-all over heads.

Source: section 3.1, and DeepSpeed's `sequence_parallel_size`: each rank holds 1/d of the tokens, exchanges them for
1/d of the heads before attention and back after it. The degree divides the query heads and the ranks; key and
value heads are replicated where there are fewer than d, which the paper leaves open (it has no grouped heads).
The paper runs sequences of one length. We pack those of many as `static-cp` does, and search degree and
microbatch count likewise. A group of one rank has nothing to exchange and is a ring of one.
"""

from collections.abc import Sequence

import numpy as np

from rayfcp.baselines.static_cp import divisors, static_proposal
from rayfcp.config.models import PlanConfig
from rayfcp.cost.model import CostModel
from rayfcp.plan.assembly import columns_of
from rayfcp.plan.strategies.registry import Proposal, StrategyInfo
from rayfcp.values import ClusterSpec, InfeasiblePlanError, Primitive, SequenceSpec


def propose(
    sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> Proposal:
    """The cheapest degree that heads permit.

    Raises:
        InfeasiblePlanError: The longest sequence does not fit the largest group that heads and ranks permit.
    """
    degrees = [
        degree
        for degree in divisors(cluster.num_ranks)
        if np.isfinite(cost.terms(degree, primitive=Primitive.ULYSSES)[0].moved_s)
    ]
    found = static_proposal(
        sequences,
        degrees,
        primitive=Primitive.ULYSSES,
        cluster=cluster,
        cost=cost,
        options=options,
        what="over heads is the best",
    )
    if found is None:
        batch = columns_of(sequences, cost=cost)
        rooms = cost.room(cluster.max_tokens_per_rank, degree=degrees, primitive=Primitive.ULYSSES).astype(int).tolist()
        room, degree = max(zip(rooms, degrees, strict=True))
        raise InfeasiblePlanError(
            f"sequence {batch.ids[0]} has {batch.num_tokens[0]} tokens, the largest Ulysses group holds "
            f"{room} ({degree} ranks of {room // degree} tokens: the degree must divide "
            f"{cost.num_heads} heads, agree with {cost.num_kv_heads} key/value heads and "
            f"divide {cluster.num_ranks} ranks); lower data.max_seqlen, add memory, or use a strategy of rings"
        )
    return found


INFO = StrategyInfo(name="ulysses", propose=propose, primitive=Primitive.ULYSSES, shares_recurrent_heads=True)
