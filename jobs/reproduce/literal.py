"""The two stages of Flexible Context Parallelism (section 4.4) to the letter, where `flex-ring` searches more.

`packing: bfd` of flex-ring tries several capacities of the bins and several cuts into microbatches, and both depend on
the cost model. In the paper memory alone fills the bins, and the degrees alone depend on costs. The paper does not log
how a batch becomes microbatches; here by memory too: as few as hold the least degrees of all bins, dealt so that those
are level.
"""

from collections.abc import Sequence

import numpy as np

from rayfcp.plan import CostModel
from rayfcp.plan.assembly import Columns, Draft, assemble, best_fit_decreasing, bins_of, columns_of
from rayfcp.plan.groups.two_stage import dynamic_program
from rayfcp.values import BatchPlan, ClusterSpec, SequenceSpec

Bins = list[list[int]]


def literal_plan(sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel) -> BatchPlan:
    """Best-fit decreasing at the memory bound, then the dynamic program in each microbatch."""
    batch = columns_of(sequences, cost=cost)
    microbatches = assemble(
        [_drafts(bins, batch=batch, cluster=cluster, cost=cost) for bins in _dealt(batch, cluster=cluster)],
        batch=batch,
        cluster=cluster,
        cost=cost,
    )
    return BatchPlan(
        strategy="flex-ring",
        num_ranks=cluster.num_ranks,
        generation=cluster.generation,
        microbatches=microbatches,
        recomputed_layers=cost.recomputed_layers,
        predicted_s=sum(each.predicted_s for each in microbatches),
        lower_bound_s=0.0,
        reason="bins by memory, degrees by the dynamic program",
    )


def _dealt(batch: Columns, *, cluster: ClusterSpec) -> list[Bins]:
    """Bins of each microbatch."""
    room = cluster.max_tokens_per_rank
    bins = bins_of(best_fit_decreasing(batch.num_tokens, capacity_tokens=room) or [])
    needs = [-(-sum(batch.num_tokens[at] for at in held) // room) for held in bins]
    order = sorted(range(len(bins)), key=lambda at: -needs[at])
    count = -(-sum(needs) // cluster.num_ranks)
    while True:
        dealt: list[Bins] = [[] for _ in range(count)]
        used = [0] * count
        for at in order:
            least = used.index(min(used))
            used[least] += needs[at]
            dealt[least].append(bins[at])
        if max(used) <= cluster.num_ranks:
            return dealt
        count += 1


def _drafts(bins: Bins, *, batch: Columns, cluster: ClusterSpec, cost: CostModel) -> list[Draft]:
    tokens = np.array([sum(batch.num_tokens[at] for at in held) for held in bins], np.float64)[:, None]
    pairs = np.array([sum(batch.pairs[at] for at in held) for held in bins], np.float64)[:, None]
    degrees = np.arange(1, cluster.num_ranks + 1)
    seconds = np.asarray(cost.group_s(pairs, tokens, degree=degrees), np.float64)
    seconds[tokens > degrees * cluster.max_tokens_per_rank] = np.inf
    return [
        Draft(members=tuple(held), degree=degree) for held, degree in zip(bins, dynamic_program(seconds), strict=True)
    ]
