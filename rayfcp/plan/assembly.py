"""From degrees and members to microbatch plans: ranks, predicted seconds, order."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rayfcp.plan.costs.model import CostModel
from rayfcp.plan.microbatches import Columns
from rayfcp.plan.placement import node_of_ranks, node_sizes, place_groups
from rayfcp.values import ClusterSpec, Group, MicrobatchPlan, Primitive


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A group whose ranks have no names yet: sequences (positions in the columns of a batch) on `degree` ranks."""

    members: tuple[int, ...]
    degree: int
    primitive: Primitive = Primitive.RING


def assemble(
    microbatches: Sequence[Sequence[Draft]], *, batch: Columns, cluster: ClusterSpec, cost: CostModel
) -> tuple[MicrobatchPlan, ...]:
    """Name the ranks, largest groups first, price the groups where they lie, and order the microbatches.

    The longest microbatch comes last, where the step's gradient reduction hides behind it. The sum of
    `predicted_s` is the step's predicted time.
    """
    ordered = _largest_first(microbatches, batch=batch, cluster=cluster, cost=cost)
    nodes = node_of_ranks(cluster, ranks_per_node=cost.ranks_per_node)
    ranks = [
        place_groups([draft.degree for draft in drafts], cluster=cluster, ranks_per_node=cost.ranks_per_node)
        for drafts in ordered
    ]
    crosses = [len({nodes[rank] for rank in held}) > 1 for each in ranks for held in each]
    passes_s = iter(_passes_s([draft for drafts in ordered for draft in drafts], crosses, batch=batch, cost=cost).T)
    timed = []
    for drafts, each in zip(ordered, ranks, strict=True):
        groups = tuple(
            Group(ranks=held, sequences=tuple(batch.ids[at] for at in draft.members), primitive=draft.primitive)
            for draft, held in zip(drafts, each, strict=True)
        )
        seconds = np.array([next(passes_s) for _ in groups])
        timed.append((groups, tuple(seconds.sum(axis=1).tolist()), float(seconds.max(axis=0).sum())))
    timed.sort(key=lambda each: (each[2], each[0][0].sequences))
    return tuple(
        MicrobatchPlan(
            groups=groups,
            group_s=group_s,
            predicted_s=cost.microbatch_s(makespan_s, last=index == len(timed) - 1),
        )
        for index, (groups, group_s, makespan_s) in enumerate(timed)
    )


def _largest_first(
    microbatches: Sequence[Sequence[Draft]], *, batch: Columns, cluster: ClusterSpec, cost: CostModel
) -> list[list[Draft]]:
    """By degree, the slowest first among equals."""
    flat = [draft for drafts in microbatches for draft in drafts]
    largest = max(node_sizes(cluster, ranks_per_node=cost.ranks_per_node))
    crosses = [draft.degree > largest for draft in flat]
    seconds = iter(_passes_s(flat, crosses, batch=batch, cost=cost).sum(axis=0).tolist())
    ordered = []
    for drafts in microbatches:
        keyed = sorted((-draft.degree, -next(seconds), draft.members, draft) for draft in drafts)
        ordered.append([draft for *_, draft in keyed])
    return ordered


def _passes_s(
    drafts: Sequence[Draft], crosses: Sequence[bool], *, batch: Columns, cost: CostModel
) -> npt.NDArray[np.float64]:
    """[2, groups]: forward and backward of each group, inside a node or across nodes."""
    seconds: npt.NDArray[np.float64] = np.zeros((2, len(drafts)))
    for primitive in sorted({draft.primitive for draft in drafts}):
        at = [index for index, draft in enumerate(drafts) if draft.primitive is primitive]
        seconds[:, at] = cost.passes_s(
            [sum(batch.cells[each] for each in drafts[index].members) for index in at],
            [sum(batch.num_tokens[each] for each in drafts[index].members) for index in at],
            degree=[drafts[index].degree for index in at],
            primitive=primitive,
            crosses=[crosses[index] for index in at],
        )
    return seconds
