"""What a plan would take if another cost model were true."""

import dataclasses
from collections.abc import Sequence

from rayfcp.plan.bound import lower_bound
from rayfcp.plan.costs.layout_cost import layout_passes
from rayfcp.plan.costs.model import CostModel
from rayfcp.plan.costs.speeds import group_speeds, idle_passes_s
from rayfcp.plan.encoding.planned import encoded_anew
from rayfcp.plan.placement import node_of_ranks
from rayfcp.values import BatchPlan, ClusterSpec, MicrobatchPlan, Primitive, SequenceSpec


def reprice(
    plan: BatchPlan,
    sequences: Sequence[SequenceSpec],
    *,
    cluster: ClusterSpec,
    cost: CostModel,
    primitives: Sequence[Primitive] = (Primitive.RING,),
) -> BatchPlan:
    """The same groups on the same ranks in the same order, pictures encoded by the same, with the seconds and the lower
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
        passes_s = group_passes(microbatch, by_id=by_id, cluster=cluster, cost=cost)
        makespan_s = cost.makespan_s(*zip(*passes_s, idle_s, strict=True))
        microbatches.append(
            dataclasses.replace(
                microbatch,
                group_s=tuple(sum(each) for each in passes_s),
                predicted_s=cost.microbatch_s(makespan_s, last=index == len(plan.microbatches) - 1),
            )
        )
    priced = encoded_anew(microbatches, sequences, cluster=cluster, cost=cost)
    return dataclasses.replace(
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


def group_passes(
    microbatch: MicrobatchPlan, *, by_id: dict[int, SequenceSpec], cluster: ClusterSpec, cost: CostModel
) -> list[tuple[float, float]]:
    """Seconds of forward and backward of each group where it lies; a layout of its own has one value for all."""
    if microbatch.layout is not None:
        passes_s = layout_passes(microbatch.layout, by_id=by_id, cluster=cluster, cost=cost)
        return [passes_s] * len(microbatch.groups)
    nodes = node_of_ranks(cluster, ranks_per_node=cost.ranks_per_node)
    speeds = group_speeds([group.ranks for group in microbatch.groups], cluster=cluster).tolist()
    priced = (
        cost.passes_s(
            sum(by_id[each].attention_cells for each in group.sequences),
            sum(by_id[each].num_tokens for each in group.sequences),
            degree=group.degree,
            primitive=group.primitive,
            crosses=len({nodes[rank] for rank in group.ranks}) > 1,
            speed=speed,
        )
        for group, speed in zip(microbatch.groups, speeds, strict=True)
    )
    return [(float(forward_s), float(backward_s)) for forward_s, backward_s in priced]
