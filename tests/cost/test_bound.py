import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.config.constraints import UNCONSTRAINED, HostConstraints
from rayfcp.plan import CostModel, lower_bound, plan_batch
from rayfcp.values import ClusterSpec, Primitive, SequenceSpec
from tests.examples import examples
from tests.plan.helpers import UNIT, batches, partitions


def best_makespan(
    members: list[SequenceSpec],
    cluster: ClusterSpec,
    cost: CostModel,
    primitives: tuple[Primitive, ...] = (Primitive.RING,),
    *,
    constraints: HostConstraints = UNCONSTRAINED,
) -> float:
    """Over all groupings and all degrees and primitives of one microbatch; infinite if there is none."""
    least = cluster.num_ranks if constraints.all_ranks else 0
    best = float("inf")
    for groups in partitions(list(range(len(members)))):
        loads = [
            (sum(members[at].attention_pairs for at in g), sum(members[at].num_tokens for at in g)) for g in groups
        ]
        for degrees in itertools.product(constraints.permitted(cluster.num_ranks), repeat=len(groups)):
            fits = all(tokens <= d * cluster.max_tokens_per_rank for (_, tokens), d in zip(loads, degrees, strict=True))
            if least <= sum(degrees) <= cluster.num_ranks and fits:
                for used in itertools.product(primitives, repeat=len(groups)):
                    passes = [
                        cost.passes_s(*load, degree=d, primitive=each)
                        for load, d, each in zip(loads, degrees, used, strict=True)
                    ]
                    best = min(best, cost.makespan_s(np.transpose(passes)))
    return best


def best_plan_s(
    sequences: list[SequenceSpec],
    cluster: ClusterSpec,
    cost: CostModel,
    primitives: tuple[Primitive, ...] = (Primitive.RING,),
    *,
    constraints: HostConstraints = UNCONSTRAINED,
) -> float:
    """Over all cuts, groupings, degrees and primitives; infinite if there is none."""
    best = float("inf")
    for cut in partitions(list(range(len(sequences)))):
        if constraints.least_microbatches(len(cut)) == len(cut):
            parts = [[sequences[at] for at in part] for part in cut]
            spans = [best_makespan(part, cluster, cost, primitives, constraints=constraints) for part in parts]
            best = min(best, cost.batch_s(spans) if max(spans) < float("inf") else best)
    return best


@examples(12)
@given(batches(max_sequences=4, max_tokens=60), st.integers(1, 3), st.integers(20, 80))
def test_no_plan_beats_the_bound(sequences: list[SequenceSpec], num_ranks: int, room: int) -> None:
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=max(room, -(-60 // num_ranks)))
    best_s = best_plan_s(sequences, cluster, UNIT)
    assert lower_bound(sequences, cluster=cluster, cost=UNIT) <= best_s * (1 + 1e-12)
    plan = plan_batch(sequences, cluster=cluster, cost=UNIT)
    assert best_s * (1 - 1e-12) <= plan.predicted_s


def test_the_bound_is_reached_where_nothing_is_lost() -> None:
    free = UNIT.with_coefficients(shard_s=0.0, reduce_s=0.0, ring_s_per_round=0.0, ring_intra_s_per_token=0.0)
    sequences = [SequenceSpec(id=at, num_tokens=10, num_targets=9) for at in range(4)]
    cluster = ClusterSpec(num_ranks=4, max_tokens_per_rank=10)
    plan = plan_batch(sequences, cluster=cluster, cost=free)
    assert abs(plan.gap - 1.0) < 1e-12
