"""Groups of one degree for one microbatch: what a mixture of degrees has to beat."""

from collections.abc import Sequence
from heapq import heappop, heappush

from rayfcp.plan.assembly import Draft
from rayfcp.plan.costs.model import CostModel
from rayfcp.plan.microbatches import Columns
from rayfcp.plan.packing import best_fit_decreasing, bins_of
from rayfcp.values import ClusterSpec, Primitive


def makespan_s(drafts: Sequence[Draft], *, batch: Columns, cost: CostModel) -> float:
    """Seconds of a microbatch without what shards add, links as the degree has them as a rule."""
    passes_s = [
        cost.passes_s(
            sum(batch.cells[at] for at in draft.members),
            sum(batch.num_tokens[at] for at in draft.members),
            degree=draft.degree,
            primitive=draft.primitive,
        )
        for draft in drafts
    ]
    return cost.makespan_s(*zip(*passes_s, strict=True))


def of_one_degree(
    members: Sequence[int],
    *,
    degree: int,
    primitive: Primitive,
    batch: Columns,
    cluster: ClusterSpec,
) -> list[list[Draft]]:
    """Up to two ways to run `members` (longest first) in one microbatch on groups of `degree` ranks: longest time first
    to the group with the least, and best-fit decreasing by length; those of them that fit."""
    lengths = [batch.num_tokens[at] for at in members]
    room, num_groups = degree * cluster.max_tokens_per_rank, cluster.num_ranks // degree
    if not num_groups or max(lengths) > room:
        return []
    work_s = [batch.compute_s[at] for at in members]
    ways = [_by_time(lengths, work_s, room=room, num_groups=num_groups)]
    owners = best_fit_decreasing(lengths, capacity_tokens=room, max_bins=num_groups)
    ways.append(bins_of(owners) if owners is not None else None)
    return [
        [Draft(members=tuple(members[at] for at in each), degree=degree, primitive=primitive) for each in way if each]
        for way in ways
        if way is not None
    ]


def _by_time(lengths: Sequence[int], work_s: Sequence[float], *, room: int, num_groups: int) -> list[list[int]] | None:
    heap = [(0.0, index) for index in range(num_groups)]
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    rooms = [room] * num_groups
    for at in sorted(range(len(lengths)), key=lambda at: -work_s[at]):
        passed = []
        while heap and rooms[heap[0][1]] < lengths[at]:
            passed.append(heappop(heap))
        if not heap:
            return None
        load_s, index = heappop(heap)
        groups[index].append(at)
        rooms[index] -= lengths[at]
        for each in [*passed, (load_s + work_s[at], index)]:
            heappush(heap, each)
    return groups
