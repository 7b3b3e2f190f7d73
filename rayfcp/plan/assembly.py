"""From degrees and members to microbatch plans: ranks, predicted seconds, order."""

from collections.abc import Sequence
from dataclasses import dataclass

from rayfcp.plan.cost import CostModel
from rayfcp.plan.microbatches import Columns
from rayfcp.plan.placement import place_groups
from rayfcp.values import ClusterSpec, Group, MicrobatchPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Sequences (positions in the columns of a batch) that share `degree` ranks, not yet named."""

    members: tuple[int, ...]
    degree: int


def assemble(
    microbatches: Sequence[Sequence[Ring]], *, batch: Columns, cluster: ClusterSpec, cost: CostModel
) -> tuple[MicrobatchPlan, ...]:
    """Name the ranks, largest groups first, and order the microbatches.

    The longest microbatch comes last, where the step's gradient reduction hides behind it. The sum of
    `predicted_s` is the step's predicted time.
    """
    timed = []
    for rings in microbatches:
        seconds = [_ring_s(ring, batch=batch, cost=cost) for ring in rings]
        order = sorted(range(len(rings)), key=lambda at: (-rings[at].degree, -seconds[at], rings[at].members))
        timed.append(([rings[at] for at in order], [seconds[at] for at in order]))
    timed.sort(key=lambda pair: (max(pair[1]), pair[0][0].members))
    plans = []
    for index, (ordered, group_s) in enumerate(timed):
        last = index == len(timed) - 1
        plans.append(
            MicrobatchPlan(
                groups=_groups(ordered, batch=batch, cluster=cluster, cost=cost),
                group_s=tuple(group_s),
                predicted_s=cost.microbatch_s(max(group_s), last=last),
            )
        )
    return tuple(plans)


def _ring_s(ring: Ring, *, batch: Columns, cost: CostModel) -> float:
    cells = sum(batch.cells[at] for at in ring.members)
    num_tokens = sum(batch.num_tokens[at] for at in ring.members)
    return float(cost.group_s(cells, num_tokens, degree=ring.degree))


def _groups(rings: Sequence[Ring], *, batch: Columns, cluster: ClusterSpec, cost: CostModel) -> tuple[Group, ...]:
    ranks = place_groups([ring.degree for ring in rings], cluster=cluster, ranks_per_node=cost.ranks_per_node)
    return tuple(
        Group(ranks=held, sequences=tuple(batch.ids[at] for at in ring.members))
        for ring, held in zip(rings, ranks, strict=True)
    )
