"""A global batch into microbatches: how many, and which sequences go together."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace

import numpy as np

from rayfcp.plan.cost import CostModel
from rayfcp.plan.packing import best_fit_decreasing, bins_of
from rayfcp.values import ClusterSpec, SequenceSpec

Cut = list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """A batch as columns, most tokens first, ids ascending among equals: position p is sequence `ids[p]`."""

    ids: list[int]
    num_tokens: list[int]
    cells: list[int]
    compute_s: list[float]
    alone_s: list[float]


def columns_of(sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel) -> Columns:
    """The batch in the order in which all planners walk it."""
    ordered = sorted(sequences, key=lambda sequence: (-sequence.num_tokens, sequence.id))
    cells = [sequence.attention_cells for sequence in ordered]
    num_tokens = [sequence.num_tokens for sequence in ordered]
    return Columns(
        ids=[sequence.id for sequence in ordered],
        num_tokens=num_tokens,
        cells=cells,
        compute_s=[cost.compute_s(each, tokens) for each, tokens in zip(cells, num_tokens, strict=True)],
        alone_s=_alone_s(cells, num_tokens, cluster=cluster, cost=cost),
    )


def _alone_s(cells: list[int], num_tokens: list[int], *, cluster: ClusterSpec, cost: CostModel) -> list[float]:
    """Seconds of each sequence alone at its best degree in memory, without the fixed cost."""
    degrees = np.arange(1, cluster.num_ranks + 1)
    tokens = np.array(num_tokens)[:, None]
    seconds = cost.group_s(np.array(cells, np.float64)[:, None], tokens, degree=degrees)
    seconds[tokens > degrees * cluster.max_tokens_per_rank] = np.inf
    alone: list[float] = (seconds.min(axis=1) - cost.fixed_s).tolist()
    return alone


def cuts(batch: Columns, *, cluster: ClusterSpec, max_more: int) -> Iterator[Cut]:
    """Candidate cuts, fewest microbatches first; members are positions in `batch`, longest first.

    Each count from the least that memory could permit to `max_more` above what best-fit decreasing
    needs is cut by longest processing time first; counts at which that does not fit are passed over.
    If none fits, the cut of best-fit decreasing comes, which always does.
    """
    counts, packed = counts_of(batch, cluster=cluster, max_more=max_more)
    found = False
    for count in counts:
        for cut in cuts_by_time(batch, count=count, cluster=cluster):
            found = True
            yield cut
    if not found:
        yield packed


def counts_of(batch: Columns, *, cluster: ClusterSpec, max_more: int) -> tuple[range, Cut]:
    """Counts of microbatches worth a try, and the cut of best-fit decreasing."""
    room = cluster.num_ranks * cluster.max_tokens_per_rank
    fewest = -(-sum(batch.num_tokens) // room)
    packed = bins_of(best_fit_decreasing(batch.num_tokens, capacity_tokens=room) or [])
    return range(fewest, min(len(packed) + max_more, len(batch.ids)) + 1), packed


def cuts_by_time(batch: Columns, *, count: int, cluster: ClusterSpec, fill: float = 1.0) -> Iterator[Cut]:
    """At most `count` microbatches, by longest processing time first; none if that does not fit in a
    `fill` of the memory of all ranks (the longest sequence may take all of it)."""
    room = cluster.num_ranks * cluster.max_tokens_per_rank
    room = min(room, max(int(fill * room), batch.num_tokens[0]))
    order = sorted(range(len(batch.ids)), key=lambda at: (-batch.compute_s[at], at))
    mean_s = sum(batch.compute_s) / cluster.num_ranks / count
    for spare_from_s in (mean_s, math.inf) if max(batch.alone_s) > mean_s else (math.inf,):
        cut = _longest_first(
            batch, order, count=count, spare_from_s=spare_from_s, room=room, num_ranks=cluster.num_ranks
        )
        if cut is not None:
            yield cut


def cut_by_length(batch: Columns, *, count: int, cluster: ClusterSpec) -> Cut | None:
    """`count` runs of sequences of like length with about equal tokens; None if they do not fit."""
    room = cluster.num_ranks * cluster.max_tokens_per_rank
    share = sum(batch.num_tokens) / count
    parts: Cut = [[]]
    held = 0
    for at, tokens in enumerate(batch.num_tokens):
        if parts[-1] and (held + tokens > room or held + tokens / 2 > share):
            parts.append([])
            held = 0
        parts[-1].append(at)
        held += tokens
    return parts if len(parts) <= count + 1 else None


def _longest_first(
    batch: Columns, order: list[int], *, count: int, spare_from_s: float, room: int, num_ranks: int
) -> Cut | None:
    """Each sequence to the microbatch with the least time that has room; None if one fits nowhere.

    A microbatch whose longest sequence takes more than the mean even alone has ranks to spare: the
    excess is taken off its time, so that it fills up first; others may stay empty and are left out.
    """
    parts: Cut = [[] for _ in range(count)]
    rooms = [room] * count
    excess_s = [0.0] * count
    times = [(0.0, index) for index in range(count)]
    for at in order:
        tokens = batch.num_tokens[at]
        passed = []
        while times and rooms[times[0][1]] < tokens:
            passed.append(heappop(times))
        if not times:
            return None
        time_s, index = times[0]
        parts[index].append(at)
        rooms[index] -= tokens
        new_s = max(excess_s[index], batch.alone_s[at] - spare_from_s)
        time_s += batch.compute_s[at] / num_ranks + excess_s[index] - new_s
        excess_s[index] = new_s
        heapreplace(times, (time_s, index))
        for each in passed:
            heappush(times, each)
    return [sorted(part) for part in parts if part]
