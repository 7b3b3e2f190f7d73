"""From degrees and members to microbatch plans: ranks, predicted seconds, order."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rayfcp.plan.costs.model import CostModel
from rayfcp.plan.costs.speeds import group_speeds, idle_passes_s
from rayfcp.plan.microbatches import Columns
from rayfcp.plan.placement import fastest_first, place_in, ranks_of_nodes
from rayfcp.values import ClusterSpec, Group, MicrobatchPlan, Primitive

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A group whose ranks have no names yet: sequences (positions in the columns of a batch) on `degree` of the ranks
    `among` (none: of all). In a microbatch these are the same for two groups, or have none in common."""

    members: tuple[int, ...]
    degree: int
    primitive: Primitive = Primitive.RING
    among: tuple[int, ...] = ()


def assemble(
    microbatches: Sequence[Sequence[Draft]], *, batch: Columns, cluster: ClusterSpec, cost: CostModel
) -> tuple[MicrobatchPlan, ...]:
    """Name the ranks, largest groups first, price the groups where they lie, and order the microbatches.

    Of the ranks of a node the fastest are named first; where speeds differ, the slowest groups of a node have the
    fastest of its ranks if that is better. The longest microbatch comes last, where the step's gradient
    reduction hides behind it. The sum of `predicted_s` is the step's predicted time.
    """
    loads = _Loads.of([draft for drafts in microbatches for draft in drafts], batch=batch)
    nodes = ranks_of_nodes(cluster, ranks_per_node=cost.ranks_per_node)
    ordered = _largest_first(microbatches, seconds=loads.alike_s(cost, nodes=nodes))
    ways = [_named(ordered, drafts=loads.drafts, nodes=fastest_first(nodes, cluster=cluster))]
    if cluster.speed_of_rank:
        slow_s = loads.alike_s(cost, nodes=nodes, speed=min(cluster.speed_of_rank))
        ways.append(_slowest_first(ways[0], ordered, slow_s=slow_s, cluster=cluster, nodes=nodes))
    priced = [loads.named_s(ranks, cluster=cluster, cost=cost, nodes=nodes) for ranks in ways]
    idle_s = idle_passes_s(cost, cluster=cluster)
    timed = []
    for numbers in ordered:
        makespans_s = [cost.makespan_s(*np.column_stack((passes_s[:, numbers], idle_s))) for passes_s in priced]
        best = makespans_s.index(min(makespans_s))
        groups = tuple(
            Group(
                ranks=ways[best][number],
                sequences=tuple([batch.ids[at] for at in loads.drafts[number].members]),
                primitive=loads.drafts[number].primitive,
            )
            for number in numbers
        )
        timed.append((groups, tuple(priced[best][:, numbers].sum(axis=0).tolist()), makespans_s[best]))
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
        members = np.fromiter(itertools.chain.from_iterable([draft.members for draft in drafts]), np.int64)
        owners = np.repeat(np.arange(len(drafts)), [len(draft.members) for draft in drafts])
        return cls(
            drafts=drafts,
            cells=np.bincount(owners, np.array(batch.cells, np.float64)[members]).astype(np.float64),
            tokens=np.bincount(owners, np.array(batch.num_tokens, np.float64)[members]).astype(np.float64),
            degrees=np.array([draft.degree for draft in drafts], np.float64),
        )

    def alike_s(self, cost: CostModel, *, nodes: Sequence[Sequence[int]], speed: float = 1.0) -> list[float]:
        """Seconds of each draft on ranks of that speed, in one node where the largest holds them."""
        crosses = self.degrees > max(map(len, nodes))
        seconds: list[float] = (
            self._passes_s(cost, crosses=crosses, speeds=np.full(len(crosses), speed)).sum(axis=0).tolist()
        )
        return seconds

    def named_s(
        self, ranks: Sequence[tuple[int, ...]], *, cluster: ClusterSpec, cost: CostModel, nodes: Sequence[Sequence[int]]
    ) -> Floats:
        """[2, drafts]: forward and backward on these ranks."""
        node_of_rank = _node_of_rank(nodes)
        torn = np.array([node_of_rank[held[0]] != node_of_rank[held[-1]] for held in ranks])
        return self._passes_s(cost, crosses=torn, speeds=group_speeds(ranks, cluster=cluster))

    def _passes_s(self, cost: CostModel, *, crosses: npt.NDArray[np.bool_], speeds: Floats) -> Floats:
        seconds: Floats = np.zeros((2, len(self.drafts)))
        primitives = [draft.primitive for draft in self.drafts]
        for primitive in sorted(set(primitives)):
            at = np.array([each is primitive for each in primitives])
            seconds[:, at] = cost.passes_s(
                self.cells[at],
                self.tokens[at],
                degree=self.degrees[at],
                primitive=primitive,
                crosses=crosses[at],
                speed=speeds[at],
            )
        return seconds


def _node_of_rank(nodes: Sequence[Sequence[int]]) -> dict[int, int]:
    return {rank: node for node, held in enumerate(nodes) for rank in held}


def _largest_first(microbatches: Sequence[Sequence[Draft]], *, seconds: Sequence[float]) -> list[list[int]]:
    """Numbers of the drafts of each microbatch by degree, the slowest first among equals; `seconds` by number."""
    ordered, first = [], 0
    for drafts in microbatches:
        keyed = sorted(
            (-draft.degree, -seconds[number], draft.members, number) for number, draft in enumerate(drafts, first)
        )
        ordered.append([number for *_, number in keyed])
        first += len(drafts)
    return ordered


def _named(
    ordered: Sequence[Sequence[int]], *, drafts: Sequence[Draft], nodes: Sequence[Sequence[int]]
) -> list[tuple[int, ...]]:
    """Ranks of each draft, by its number; of ranks in several nodes the first and the last are in different ones."""
    ranks: list[tuple[int, ...]] = [()] * len(drafts)
    for numbers in ordered:
        for among in dict.fromkeys(drafts[number].among for number in numbers):
            here = [number for number in numbers if drafts[number].among == among]
            within = [[rank for rank in held if rank in among] for held in nodes] if among else nodes
            placed = place_in([drafts[number].degree for number in here], within)
            for number, held in zip(here, placed, strict=True):
                ranks[number] = held
    return ranks


def _slowest_first(
    named: Sequence[tuple[int, ...]],
    ordered: Sequence[Sequence[int]],
    *,
    slow_s: Sequence[float],
    cluster: ClusterSpec,
    nodes: Sequence[Sequence[int]],
) -> list[tuple[int, ...]]:
    """The same ranks, of speeds that differ: of those that groups in one node have, the group that takes longest on
    ranks as slow as the slowest (`slow_s`, by number) gets the fastest."""
    speeds, node_of_rank = cluster.speed_of_rank, _node_of_rank(nodes)
    ranks = list(named)
    for numbers in ordered:
        of_node: dict[int, list[int]] = {}
        for number in sorted(numbers, key=lambda number: -slow_s[number]):
            held = {node_of_rank[rank] for rank in named[number]}
            if len(held) == 1:
                of_node.setdefault(held.pop(), []).append(number)
        for here in of_node.values():
            fastest = sorted((rank for number in here for rank in named[number]), key=lambda rank: -speeds[rank])
            for number in here:
                degree = len(named[number])
                ranks[number] = tuple(sorted(fastest[:degree]))
                del fastest[:degree]
    return ranks
