"""DAPPLE (Fan et al., 2021): batch-level 1F1B, every microbatch on all ranks of each stage.

Source: sections 3.2 and 4, early backward scheduling (1F1B) of microbatches of equal size, with recomputation as an
option for all of them. It has samples of one length; InfiniPipe, which compares itself with it (section 2.1),
runs whole sequences of any length over the ranks of a stage. Chosen here, what both are silent on: sequences go,
longest first, to the microbatch with the fewest tokens, one group of all N ranks each, over the fastest of
`plan.primitives`. Tuned: the number of microbatches, their order, and none, half or all layers recomputed,
the least that memory permits.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from rayfcp.baselines.static_cp import least_loaded
from rayfcp.config.models import PlanConfig
from rayfcp.cost.model import CostModel
from rayfcp.plan.assembly import Columns, Draft, assemble, columns_of
from rayfcp.plan.strategies.registry import Proposal, StrategyInfo
from rayfcp.plan.strategies.stages import as_if_whole, counts
from rayfcp.values import ClusterSpec, InfeasiblePlanError, Primitive, SequenceSpec


def propose(
    sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> Proposal:
    """The best microbatch count, over several stages.

    Raises:
        InfeasiblePlanError: heads that all ranks cannot share; stages that do not have the memory.
    """
    from rayfcp.plan.pipeline.batch_level import best_pipeline

    candidates = _candidates(sequences, cluster=cluster, cost=cost, options=options)
    return best_pipeline(candidates, sequences, cluster=cluster, cost=cost, recompute="halves")


def _candidates(
    sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> Iterator[Proposal]:
    """
    Raises:
        InfeasiblePlanError: all ranks can share no heads, and rings are not allowed.
    """
    whole, degree = as_if_whole(cost, num_stages=cluster.num_stages), cluster.num_ranks
    primitives = [Primitive(name) for name in options.primitives]
    usable = [each for each in primitives if np.isfinite(whole.terms(degree, primitive=each)[0].moved_s)]
    if not usable:
        raise InfeasiblePlanError(
            f"dapple runs each microbatch on all {degree} ranks, which do not share out {cost.num_heads} heads; "
            "add ring to plan.primitives"
        )
    batch = columns_of(sequences, cost=whole)
    for parts in _packings(
        batch, counts(sequences, cluster=cluster), budget_tokens=degree * cluster.max_tokens_per_rank
    ):
        for primitive in usable:
            drafts = [[Draft(members=tuple(part), degree=degree, primitive=primitive)] for part in parts]
            microbatches = assemble(drafts, batch=batch, cluster=cluster, cost=whole)
            yield Proposal(microbatches=microbatches, reason=f"about equal tokens over all {degree} ranks")


def _packings(batch: Columns, numbers: Sequence[int], *, budget_tokens: int) -> Iterator[list[list[int]]]:
    """Into each number of microbatches at which none exceeds `budget_tokens`; into the least one if there is none."""
    found = False
    for number in (*numbers, *range(numbers[-1] + 1, len(batch.ids) + 1)):
        if found and number > numbers[-1]:
            break
        lengths = batch.num_tokens
        parts = least_loaded(
            range(len(lengths)), lengths, work_s=lengths, loads_s=[0] * number, budget_tokens=budget_tokens
        )
        if parts is not None:
            found = True
            yield [part for part in parts if part]


INFO = StrategyInfo(name="dapple", propose=propose, needs_stages=True)
