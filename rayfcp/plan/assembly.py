"""From degrees and members to microbatch plans: ranks, predicted seconds, order."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rayfcp.plan.costs.model import CostModel
from rayfcp.plan.microbatches import Columns
from rayfcp.plan.placement import node_of_ranks, node_sizes, place_groups
from rayfcp.values import ClusterSpec, Group, MicrobatchPlan, Primitive

Floats = npt.NDArray[np.float64]


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
    loads = _Loads.of([draft for drafts in microbatches for draft in drafts], batch=batch)
    ordered = _largest_first(microbatches, loads=loads, cluster=cluster, cost=cost)
    nodes = node_of_ranks(cluster, ranks_per_node=cost.ranks_per_node)
    ranks: list[tuple[int, ...]] = [()] * len(loads.drafts)
    for numbers in ordered:
        degrees = [loads.drafts[number].degree for number in numbers]
        placed = place_groups(degrees, cluster=cluster, ranks_per_node=cost.ranks_per_node)
        for number, held in zip(numbers, placed, strict=True):
            ranks[number] = held
    crosses = np.array([len({nodes[rank] for rank in held}) > 1 for held in ranks])
    passes_s = loads.passes_s(cost, crosses=crosses)
    timed = []
    for numbers in ordered:
        groups = tuple(
            Group(
                ranks=ranks[number],
                sequences=tuple([batch.ids[at] for at in loads.drafts[number].members]),
                primitive=loads.drafts[number].primitive,
            )
            for number in numbers
        )
        seconds = passes_s[:, numbers]
        timed.append((groups, tuple(seconds.sum(axis=0).tolist()), float(seconds.max(axis=1).sum())))
    timed.sort(key=lambda each: (each[2], each[0][0].sequences))
    return tuple(
        MicrobatchPlan(
            groups=groups,
            group_s=group_s,
            predicted_s=cost.microbatch_s(makespan_s, last=index == len(timed) - 1),
        )
        for index, (groups, group_s, makespan_s) in enumerate(timed)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loads:
    """Drafts of all microbatches in one row, and what each holds."""

    drafts: list[Draft]
    cells: Floats
    tokens: Floats
    degrees: Floats

    @classmethod
    def of(cls, drafts: list[Draft], *, batch: Columns) -> "_Loads":
        members = np.concatenate([draft.members for draft in drafts])
        owners = np.repeat(np.arange(len(drafts)), [len(draft.members) for draft in drafts])
        return cls(
            drafts=drafts,
            cells=np.bincount(owners, np.array(batch.cells, np.float64)[members]).astype(np.float64),
            tokens=np.bincount(owners, np.array(batch.num_tokens, np.float64)[members]).astype(np.float64),
            degrees=np.array([draft.degree for draft in drafts], np.float64),
        )

    def passes_s(self, cost: CostModel, *, crosses: npt.NDArray[np.bool_]) -> Floats:
        """[2, drafts]: forward and backward of each, inside a node or across nodes."""
        seconds: Floats = np.zeros((2, len(self.drafts)))
        for primitive in sorted({draft.primitive for draft in self.drafts}):
            at = np.array([draft.primitive is primitive for draft in self.drafts])
            seconds[:, at] = cost.passes_s(
                self.cells[at], self.tokens[at], degree=self.degrees[at], primitive=primitive, crosses=crosses[at]
            )
        return seconds


def _largest_first(
    microbatches: Sequence[Sequence[Draft]], *, loads: _Loads, cluster: ClusterSpec, cost: CostModel
) -> list[list[int]]:
    """Numbers of the drafts of each microbatch by degree, the slowest first among equals."""
    largest = max(node_sizes(cluster, ranks_per_node=cost.ranks_per_node))
    seconds = loads.passes_s(cost, crosses=loads.degrees > largest).sum(axis=0).tolist()
    ordered, first = [], 0
    for drafts in microbatches:
        keyed = sorted(
            (-draft.degree, -seconds[number], draft.members, number) for number, draft in enumerate(drafts, first)
        )
        ordered.append([number for *_, number in keyed])
        first += len(drafts)
    return ordered
