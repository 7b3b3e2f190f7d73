"""From a batch as columns, by drafts of groups (members and degrees), to microbatch plans: ranks, seconds, order."""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from rayfcp.config.constraints import HostConstraints, Placement
from rayfcp.cost.model import CostModel, group_speeds, idle_passes_s
from rayfcp.cost.placement import fastest_first, place_groups, ranks_of_nodes
from rayfcp.cost.uplinks import filled_s, queued_tokens
from rayfcp.values import ClusterSpec, Group, MicrobatchPlan, Primitive, SequenceSpec
from rayfcp.values.arrays import Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """A batch as columns, most tokens first, ids ascending among equals: position p is sequence `ids[p]`, or a unit of
    `counts[p]` sequences."""

    ids: list[int]
    counts: list[int]
    num_tokens: list[int]
    pairs: list[float]
    compute_s: list[float]


def columns_of(sequences: Sequence[SequenceSpec], *, cost: CostModel) -> Columns:
    """The batch in the order in which all planners walk it."""
    ordered = sorted(sequences, key=attrgetter("id"))
    ordered.sort(key=attrgetter("num_tokens"), reverse=True)
    pairs = [sequence.attention_pairs for sequence in ordered]
    num_tokens = [sequence.num_tokens for sequence in ordered]
    return Columns(
        ids=[sequence.id for sequence in ordered],
        counts=[1] * len(ordered),
        num_tokens=num_tokens,
        pairs=pairs,
        compute_s=cost.compute_s(np.array(pairs, np.float64), np.array(num_tokens, np.float64)).tolist(),
    )


def united(batch: Columns, sequences: Sequence[SequenceSpec]) -> tuple[Columns, list[tuple[int, ...]]]:
    """The batch with the sequences of each unit as one, and the positions in `batch` of what each stands for."""
    units = {sequence.id: sequence.unit for sequence in sequences if sequence.unit is not None}
    members: dict[tuple[bool, int], list[int]] = {}
    for at, each in enumerate(batch.ids):
        members.setdefault((True, units[each]) if each in units else (False, each), []).append(at)
    parts = sorted(map(tuple, members.values()), key=lambda part: (-sum(batch.num_tokens[at] for at in part), part))
    columns = Columns(
        ids=[batch.ids[part[0]] for part in parts],
        counts=[len(part) for part in parts],
        num_tokens=[sum(batch.num_tokens[at] for at in part) for part in parts],
        pairs=[sum(batch.pairs[at] for at in part) for part in parts],
        compute_s=[sum(batch.compute_s[at] for at in part) for part in parts],
    )
    return columns, parts


def best_fit_decreasing(
    lengths: Sequence[int], *, capacity_tokens: int, max_bins: int | None = None
) -> list[int] | None:
    """Pack `lengths`, longest first, into bins; returns the bin of each, numbered in order of opening.

    A sequence goes to the bin with the least room that holds it (the earliest among equals), or opens
    one of `ceil(length / capacity_tokens) * capacity_tokens` tokens: the room of its least degree.
    None if more than `max_bins` would open.

    >>> best_fit_decreasing([9, 4, 3, 2, 1], capacity_tokens=5)
    [0, 1, 2, 2, 0]
    """
    from rayfcp.plan.groups.kernels.cut import best_fit

    most = len(lengths) if max_bins is None else max_bins
    owners: list[int] = best_fit(np.array(lengths, np.float64), float(capacity_tokens), most).tolist()
    return owners if len(owners) == len(lengths) else None


def bins_of(owners: Sequence[int]) -> list[list[int]]:
    """Positions in each bin, ascending.

    >>> bins_of([0, 1, 2, 2, 0])
    [[0, 4], [1], [2, 3]]
    """
    bins: list[list[int]] = [[] for _ in range(max(owners, default=-1) + 1)]
    for position, owner in enumerate(owners):
        bins[owner].append(position)
    return bins


def exchange_degrees(cost: CostModel, *, num_ranks: int, primitives: Collection[str]) -> list[int]:
    """Degrees above 1 that Ulysses groups may have, which share out the model's heads; none where plans have no such
    groups."""
    if Primitive.ULYSSES.value not in primitives:
        return []
    degrees = np.arange(2, num_ranks + 1)
    found: list[int] = degrees[np.isfinite(cost.terms(degrees, primitive=Primitive.ULYSSES)[0].moved_s)].tolist()
    return found


HIDES = 2.0
"""Computation divided by traffic of shards above which it hides the messages of groups, too."""


def beside_shards(batch: Columns, *, cluster: ClusterSpec, cost: CostModel, constraints: HostConstraints) -> CostModel:
    """Return the cost model of groups beside their shards if these may take longer than what ranks compute, else
    `cost`.

    A group does not know whether it comes last in a step. All are as if they did where one microbatch is enough.
    """
    fewest = constraints.least_microbatches(
        -(-sum(batch.num_tokens) // (cluster.num_ranks * cluster.max_tokens_per_rank))
    )
    beside, share = cost.in_step(last=fewest == 1), sum(batch.compute_s) / cluster.num_ranks / fewest
    forward_s = share * cost.linear_forward
    if forward_s > HIDES * beside.beside_forward_s and share - forward_s > HIDES * beside.beside_backward_s:
        return cost
    return beside


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A group whose ranks have no names yet: sequences (positions in the columns of a batch) on `degree` of the ranks
    `among` (none: of all). In a microbatch these are the same for two groups, or have none in common."""

    members: tuple[int, ...]
    degree: int
    primitive: Primitive = Primitive.RING
    among: tuple[int, ...] = ()


def members_of(draft: Draft, parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the positions of the sequences of a draft of units, whose parts `united` gives."""
    return tuple(sorted(at for unit in draft.members for at in parts[unit]))


def assemble(
    microbatches: Sequence[Sequence[Draft]],
    *,
    batch: Columns,
    cluster: ClusterSpec,
    cost: CostModel,
    placement: Placement = "nodes",
) -> tuple[MicrobatchPlan, ...]:
    """Name the ranks, largest groups first, price the groups where they lie, and order the microbatches.

    Of the ranks of a node the fastest are named first; where speeds differ, the slowest groups of a node have the
    fastest of its ranks if that is better. The longest microbatch comes last, where the step's gradient
    reduction hides behind it. Microbatches are priced beside their shards, `group_s` without. The sum of `predicted_s`
    is the step's predicted time. With another `placement` (`HostConstraints`), groups have consecutive ranks: the
    largest from 0 on, or node by node if that is better and they need not be aligned.
    """
    loads = _Loads.of(microbatches, batch=batch)
    nodes = ranks_of_nodes(cluster, ranks_per_node=cost.ranks_per_node)
    ordered = _largest_first(microbatches, seconds=loads.alike_s(cost, nodes=nodes))
    if placement == "nodes":
        ways = _by_node(ordered, loads, cluster=cluster, cost=cost, nodes=nodes)
    else:
        ways = _consecutive(ordered, drafts=loads.drafts, nodes=nodes, aligned=placement == "aligned")
        ways += _windows(ordered, loads, cluster=cluster, cost=cost, aligned=placement == "aligned")
    return _priced(ordered, ways, loads, cluster=cluster, cost=cost, ids=batch.ids)


def _priced(
    ordered: Sequence[Sequence[int]],
    ways: Sequence[Sequence[tuple[int, ...]]],
    loads: "_Loads",
    *,
    cluster: ClusterSpec,
    cost: CostModel,
    ids: Sequence[int],
) -> tuple[MicrobatchPlan, ...]:
    """Microbatches of drafts with the better of `ways` to name their ranks, the longest one last."""
    nodes, idle_s = ranks_of_nodes(cluster, ranks_per_node=cost.ranks_per_node), idle_passes_s(cost, cluster=cluster)
    in_step = cost.in_step(last=len(ordered) == 1)
    alone = [loads.named_s(ranks, cluster=cluster, cost=cost, nodes=nodes) for ranks in ways]
    beside = alone
    if in_step is not cost:
        beside = [loads.named_s(ranks, cluster=cluster, cost=in_step, nodes=nodes) for ranks in ways]

    def makespan_s(way: int, passes_s: Floats, numbers: Sequence[int], *, last: bool) -> float:
        filled_s = loads.filled_s(ways[way], numbers, cost=cost, nodes=nodes, last=last)
        return cost.makespan_s(np.column_stack((passes_s[:, list(numbers)], idle_s)), filled_s=filled_s)

    timed = []
    for numbers in ordered:
        seconds = [makespan_s(way, passes_s, numbers, last=len(ordered) == 1) for way, passes_s in enumerate(beside)]
        best = seconds.index(min(seconds))
        first = loads.drafts[numbers[0]].members
        timed.append((seconds[best], tuple(ids[at] for at in first), numbers, best))
    timed.sort(key=lambda each: each[:2])
    found = []
    for index, (least_s, _, numbers, best) in enumerate(timed):
        last, span_s = index == len(timed) - 1, least_s
        if last and index:
            in_last = loads.named_s(ways[best], cluster=cluster, cost=cost.in_step(last=True), nodes=nodes)
            span_s = makespan_s(best, in_last, numbers, last=True)
        drafts = [(ways[best][number], loads.drafts[number]) for number in numbers]
        groups = tuple(_group(*each, ids=ids) for each in drafts)
        group_s = tuple(alone[best][:, list(numbers)].sum(axis=0).tolist())
        predicted_s = cost.microbatch_s(span_s, last=last)
        found.append(MicrobatchPlan(groups=groups, group_s=group_s, predicted_s=predicted_s))
    return tuple(found)


def _group(ranks: tuple[int, ...], draft: Draft, *, ids: Sequence[int]) -> Group:
    return Group(ranks=ranks, sequences=tuple([ids[at] for at in draft.members]), primitive=draft.primitive)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loads:
    """Drafts of all microbatches in one row, what each holds, and the number of its microbatch."""

    drafts: list[Draft]
    homes: Ints
    pairs: Floats
    tokens: Floats
    sequences: Floats
    degrees: Floats

    @classmethod
    def of(cls, microbatches: Sequence[Sequence[Draft]], *, batch: Columns) -> "_Loads":
        drafts = list(itertools.chain.from_iterable(microbatches))
        members = np.fromiter(itertools.chain.from_iterable([draft.members for draft in drafts]), np.int64)
        owners = np.repeat(np.arange(len(drafts)), [len(draft.members) for draft in drafts])
        return cls(
            drafts=drafts,
            homes=np.repeat(np.arange(len(microbatches)), [len(each) for each in microbatches]),
            pairs=np.bincount(owners, np.array(batch.pairs, np.float64)[members]).astype(np.float64),
            tokens=np.bincount(owners, np.array(batch.num_tokens, np.float64)[members]).astype(np.float64),
            sequences=np.bincount(owners, np.array(batch.counts, np.float64)[members]).astype(np.float64),
            degrees=np.array([draft.degree for draft in drafts], np.float64),
        )

    def only(self, number: int, count: int) -> "_Loads":
        """`count` times the draft of that number, each in a microbatch of its own."""
        columns = (self.pairs, self.tokens, self.sequences, self.degrees)
        pairs, tokens, sequences, degrees = (np.full(count, column[number]) for column in columns)
        drafts = [self.drafts[number]] * count
        homes = np.arange(count)
        return _Loads(drafts=drafts, homes=homes, pairs=pairs, tokens=tokens, sequences=sequences, degrees=degrees)

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
        """[pass, draft]: `CostModel.passes_s` on these ranks, beside the other groups of the microbatch."""
        node_of_rank = _node_of_rank(nodes)
        torn = np.array([len({node_of_rank[rank] for rank in held}) > 1 for held in ranks])
        moved = self.tokens.copy()
        by_heads = torn & np.array([draft.primitive is Primitive.ULYSSES for draft in self.drafts])
        if cost.uplink_ranks or by_heads.any():
            for home in np.unique(self.homes[torn]):
                here = np.flatnonzero(torn & (self.homes == home)).tolist()
                moved[here] = queued_tokens(
                    cost,
                    self.tokens[here],
                    ranks=[ranks[at] for at in here],
                    primitives=[self.drafts[at].primitive for at in here],
                    nodes=node_of_rank,
                )
        return self._passes_s(cost, crosses=torn, speeds=group_speeds(ranks, cluster=cluster), moved=moved)

    def filled_s(
        self,
        ranks: Sequence[tuple[int, ...]],
        numbers: Sequence[int],
        *,
        cost: CostModel,
        nodes: Sequence[Sequence[int]],
        last: bool,
    ) -> float:
        """Seconds in which the busiest uplink is filled while these drafts, a microbatch, are on these ranks; `last`:
        of the step."""
        if not cost.uplink_ranks:
            return 0.0
        return filled_s(
            cost.in_step(last=last),
            self.tokens[list(numbers)],
            ranks=[ranks[number] for number in numbers],
            primitives=[self.drafts[number].primitive for number in numbers],
            nodes=_node_of_rank(nodes),
        )

    def _passes_s(
        self, cost: CostModel, *, crosses: npt.NDArray[np.bool_], speeds: Floats, moved: Floats | None = None
    ) -> Floats:
        seconds: Floats = np.zeros((3, len(self.drafts)))
        primitives = [draft.primitive for draft in self.drafts]
        for primitive in sorted(set(primitives)):
            at = np.array([each is primitive for each in primitives])
            seconds[:, at] = cost.passes_s(
                self.pairs[at],
                self.tokens[at],
                degree=self.degrees[at],
                primitive=primitive,
                crosses=crosses[at],
                speed=speeds[at],
                num_sequences=self.sequences[at],
                moved_tokens=None if moved is None else moved[at],
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


def _by_node(
    ordered: Sequence[Sequence[int]],
    loads: _Loads,
    *,
    cluster: ClusterSpec,
    cost: CostModel,
    nodes: Sequence[Sequence[int]],
) -> list[list[tuple[int, ...]]]:
    """Ranks of each draft, by its number: on as few nodes as possible; where speeds differ, in two ways."""
    ways = [_named(ordered, drafts=loads.drafts, nodes=fastest_first(nodes, cluster=cluster))]
    if cluster.speed_of_rank:
        slow_s = loads.alike_s(cost, nodes=nodes, speed=min(cluster.speed_of_rank))
        ways.append(_slowest_first(ways[0], ordered, slow_s=slow_s, cluster=cluster, nodes=nodes))
    return ways


def _named(
    ordered: Sequence[Sequence[int]], *, drafts: Sequence[Draft], nodes: Sequence[Sequence[int]]
) -> list[tuple[int, ...]]:
    """Ranks of each draft, by its number, on as few nodes as possible."""
    ranks: list[tuple[int, ...]] = [()] * len(drafts)
    for numbers in ordered:
        for among in dict.fromkeys(drafts[number].among for number in numbers):
            here = [number for number in numbers if drafts[number].among == among]
            within = [[rank for rank in held if rank in among] for held in nodes] if among else nodes
            by_heads = [drafts[number].primitive is Primitive.ULYSSES for number in here]
            placed = place_groups([drafts[number].degree for number in here], within, by_heads=by_heads)
            for number, held in zip(here, placed, strict=True):
                ranks[number] = held
    return ranks


def _consecutive(
    ordered: Sequence[Sequence[int]], *, drafts: Sequence[Draft], nodes: Sequence[Sequence[int]], aligned: bool
) -> list[list[tuple[int, ...]]]:
    """Ranks of each draft, by its number, in each way to give groups consecutive ones."""
    ways = [_in_a_row(ordered, drafts=drafts)]
    return ways if aligned else [*ways, _in_a_row_by_node(ordered, drafts=drafts, nodes=nodes)]


def _in_a_row(ordered: Sequence[Sequence[int]], *, drafts: Sequence[Draft]) -> list[tuple[int, ...]]:
    """Ranks of each draft, by its number. Where each degree divides the larger ones, all groups are aligned."""
    ranks: list[tuple[int, ...]] = [()] * len(drafts)
    for numbers in ordered:
        first = 0
        for number in numbers:
            ranks[number] = tuple(range(first, first + drafts[number].degree))
            first += drafts[number].degree
    return ranks


def _in_a_row_by_node(
    ordered: Sequence[Sequence[int]], *, drafts: Sequence[Draft], nodes: Sequence[Sequence[int]]
) -> list[tuple[int, ...]]:
    """Ranks of each draft, by its number, in the order of those that `_named` gives them. Where ranks are left over, a
    group begins no earlier than these, so that what fits in a node lies in one."""
    named = _named(ordered, drafts=drafts, nodes=nodes)
    ranks: list[tuple[int, ...]] = [()] * len(drafts)
    for numbers in ordered:
        first, free = 0, sum(map(len, nodes)) - sum(drafts[number].degree for number in numbers)
        for number in sorted(numbers, key=lambda number: min(named[number])):
            skipped = min(max(min(named[number]) - first, 0), free)
            first, free = first + skipped, free - skipped
            ranks[number] = tuple(range(first, first + drafts[number].degree))
            first += drafts[number].degree
    return ranks


def _windows(
    ordered: Sequence[Sequence[int]], loads: _Loads, *, cluster: ClusterSpec, cost: CostModel, aligned: bool
) -> list[list[tuple[int, ...]]]:
    """Ranks of each draft, by its number, where speeds differ or nodes interleave: the largest and slowest groups
    choose first, each the consecutive ranks on which it is fastest of those that leave room for the other groups."""
    nodes = ranks_of_nodes(cluster, ranks_per_node=cost.ranks_per_node)
    if not cluster.speed_of_rank and all(held[-1] - held[0] < len(held) for held in nodes):
        return []
    ranks: list[tuple[int, ...]] = [()] * len(loads.drafts)
    for numbers in ordered:
        free = [True] * cluster.num_ranks
        for turn, number in enumerate(numbers):
            degree = loads.drafts[number].degree
            others = [loads.drafts[each].degree for each in numbers[turn + 1 :]]
            starts = [at for at in _starts(free, degree, aligned=aligned) if _room(free, at, degree, others, aligned)]
            windows = [tuple(range(at, at + degree)) for at in starts]
            seconds = loads.only(number, len(windows)).named_s(windows, cluster=cluster, cost=cost, nodes=nodes)
            ranks[number] = windows[int(seconds.sum(axis=0).argmin())]
            free[ranks[number][0] : ranks[number][-1] + 1] = [False] * degree
    return [ranks]


def _starts(free: Sequence[bool], degree: int, *, aligned: bool) -> list[int]:
    """First ranks of all free windows of `degree` ranks."""
    step = degree if aligned else 1
    return [at for at in range(0, len(free) - degree + 1, step) if all(free[at : at + degree])]


def _room(free: Sequence[bool], start: int, degree: int, others: Sequence[int], aligned: bool) -> bool:
    """Whether groups of these degrees, largest first, fit beside a group at `start`."""
    left = [ok and not start <= rank < start + degree for rank, ok in enumerate(free)]
    for other in others:
        starts = _starts(left, other, aligned=aligned)
        if not starts:
            return False
        left[starts[0] : starts[0] + other] = [False] * other
    return True


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
