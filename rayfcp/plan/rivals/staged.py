"""One degree for the whole batch on several pipeline stages: batch-level 1F1B, degree and microbatch count tuned."""

from collections.abc import Iterable, Iterator, Sequence

from rayfcp.config.plan import PlanConfig
from rayfcp.plan.costs.model import CostModel
from rayfcp.plan.microbatches import columns_of
from rayfcp.plan.rivals.static import dealt_into
from rayfcp.plan.strategies.interface import Proposal
from rayfcp.plan.strategies.staged import as_if_whole, counts
from rayfcp.values import ClusterSpec, Primitive, SequenceSpec


def static_in_stages(
    sequences: Sequence[SequenceSpec],
    *,
    degrees: Iterable[int],
    primitive: Primitive,
    cluster: ClusterSpec,
    cost: CostModel,
    options: PlanConfig,
) -> Proposal | None:
    """The best over all degrees and a few microbatch counts; None if at no degree a group holds the longest sequence.

    As in Megatron-LM one number of layers is recomputed on every stage, the least that memory permits.

    Raises:
        InfeasiblePlanError: none fits the memory of all stages.
    """
    from rayfcp.plan.pipelines.batch_level import best_pipeline  # compiled: loaded where a plan is made

    longest = max(sequence.num_tokens for sequence in sequences)
    fitting = [degree for degree in degrees if longest <= degree * cluster.max_tokens_per_rank]
    if not fitting:
        return None
    found = best_pipeline(
        _candidates(sequences, fitting, primitive=primitive, cluster=cluster, cost=cost, options=options),
        sequences,
        cluster=cluster,
        cost=cost,
    )
    return Proposal(microbatches=found.microbatches, reason=found.reason, pipelines=(found.pipeline,))


def _candidates(
    sequences: Sequence[SequenceSpec],
    degrees: Iterable[int],
    *,
    primitive: Primitive,
    cluster: ClusterSpec,
    cost: CostModel,
    options: PlanConfig,
) -> Iterator[Proposal]:
    whole = as_if_whole(cost, num_stages=cluster.num_stages)
    batch = columns_of(sequences, cost=whole)
    for degree in degrees:
        for microbatches in dealt_into(
            batch,
            degree=degree,
            primitive=primitive,
            counts=counts(sequences, cluster=cluster),
            cluster=cluster,
            cost=whole,
            options=options,
        ):
            yield Proposal(microbatches=microbatches, reason=f"degree {degree} is the best static one")
