"""The seconds that a plan takes by another cost model."""

from collections.abc import Sequence
from dataclasses import replace

from rayfcp.cost.bound import lower_bound
from rayfcp.cost.model import CostModel, idle_passes_s
from rayfcp.plan.auto import group_passes
from rayfcp.plan.vision.encoding import reprice_images
from rayfcp.values import BatchPlan, ClusterSpec, Primitive, SequenceSpec


def reprice(
    plan: BatchPlan,
    sequences: Sequence[SequenceSpec],
    *,
    cluster: ClusterSpec,
    cost: CostModel,
    primitives: Sequence[Primitive] = (Primitive.RING,),
) -> BatchPlan:
    """The same groups on the same ranks in the same order, images encoded by the same, with the seconds and the lower
    bound of `cost`.

    A plan priced anew by the model that it was made with is equal to itself. `primitives`: those that the planner
    might use, for the bound.

    Raises:
        ValueError: the plan is for another number of ranks, or of several stages: pipelines are planned anew.
    """
    if plan.pipelines:
        raise ValueError(f"plan has {plan.num_stages} stages, only plans of 1 can be priced anew; plan the batch again")
    if plan.num_ranks != cluster.num_ranks:
        raise ValueError(
            f"plan is for {plan.num_ranks} ranks, cluster.num_ranks is {cluster.num_ranks}; price it on its own"
        )
    by_id, idle_s = {each.id: each for each in sequences}, idle_passes_s(cost, cluster=cluster).tolist()
    microbatches = []
    for index, microbatch in enumerate(plan.microbatches):
        last = index == len(plan.microbatches) - 1
        passes_s = group_passes(microbatch, by_id=by_id, cluster=cluster, cost=cost.in_step(last=last))
        makespan_s = cost.makespan_s(list(zip(*passes_s, idle_s, strict=True)))
        microbatches.append(
            replace(
                microbatch,
                group_s=tuple(sum(each) for each in passes_s),
                predicted_s=cost.microbatch_s(makespan_s, last=last),
            )
        )
    priced = reprice_images(microbatches, sequences, cluster=cluster, cost=cost)
    return replace(
        plan,
        microbatches=priced,
        predicted_s=sum(microbatch.predicted_s for microbatch in priced),
        lower_bound_s=lower_bound(
            sequences,
            cluster=cluster,
            cost=cost,
            primitives=primitives,
            placed_freely=any(microbatch.layout is not None for microbatch in priced),
        ),
    )
