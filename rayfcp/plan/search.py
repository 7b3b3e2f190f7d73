"""Search over cuts into microbatches and over the capacity of bins, in two passes, counted in work."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rayfcp.plan.cost import CostModel
from rayfcp.plan.degrees import Table, least_makespan
from rayfcp.plan.microbatches import Columns, cuts
from rayfcp.plan.packing import best_fit_decreasing, bins_of
from rayfcp.values import ClusterSpec

# capacity of a bin in multiples of the microbatch's mean tokens per rank, cut at the memory bound
FIRST_FACTORS = (1.25, math.inf)  # infinite: the memory bound itself
MORE_FACTORS = (1.0, 1.05, 1.12, 1.5, 3.0)
REFINED_CUTS = 2  # that look best with the first capacities get the others too; so does the first cut
GOOD_ENOUGH = 1.002  # of a microbatch's own lower bound: no further capacity is tried
MAX_WORK = 30_000  # sequences packed in the first pass, a packing counting as 100 more; then no more cuts


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """One microbatch: positions in the batch, the group of each, T(group, degree), the least makespan."""

    members: list[int]
    owners: list[int]
    table: Table
    makespan_s: float

    @property
    def groups(self) -> list[list[int]]:
        """Positions in the batch, group by group."""
        return [[self.members[at] for at in group] for group in bins_of(self.owners)]


class Search:
    """The cheapest packings of one batch. `num_cuts` and `num_packings` count what was tried."""

    def __init__(self, batch: Columns, *, cluster: ClusterSpec, cost: CostModel) -> None:
        self.num_cuts = self.num_packings = 0
        self._batch, self._cluster, self._cost = batch, cluster, cost
        self._degrees = np.arange(1, cluster.num_ranks + 1)
        self._rooms = self._degrees * cluster.max_tokens_per_rank
        self._tokens = np.array(batch.num_tokens, np.float64)
        self._cells = np.array(batch.cells, np.float64)
        self._work = 0

    def run(self, *, max_more: int) -> list[Packing]:
        """One packing per microbatch of the cheapest cut."""
        found: list[tuple[float, int, list[Packing]]] = []
        for cut in cuts(self._batch, cluster=self._cluster, max_more=max_more):
            if found and self._work > MAX_WORK:
                break
            if found and self._cost.batch_s([self._floor_s(members) for members in cut]) >= min(found)[0]:
                continue
            packings = [self._first(members) for members in cut]
            found.append((self._total_s(packings), self.num_cuts, packings))
            self.num_cuts += 1
        refined = []
        ranked = [number for _, number, _ in sorted(found)[:REFINED_CUTS]]
        for number in sorted({0, *ranked}):
            packings = found[number][2]
            better = [self._improve(packing, factors=MORE_FACTORS) for packing in packings]
            refined.append((self._total_s(better), number, better))
        return min(refined)[2]

    def _total_s(self, packings: Sequence[Packing]) -> float:
        return self._cost.batch_s([packing.makespan_s for packing in packings])

    def _floor_s(self, members: Sequence[int]) -> float:
        """No plan of these sequences in one microbatch takes less."""
        return sum(self._batch.compute_s[at] for at in members) / self._cluster.num_ranks + self._cost.fixed_s

    def _first(self, members: list[int]) -> Packing:
        """The best of few. One ring over all ranks comes last: it fits whenever the microbatch does, and
        moves the most."""
        worst = Packing(members=members, owners=[], table=np.empty((0, 0)), makespan_s=math.inf)
        packing = self._improve(worst, factors=FIRST_FACTORS)
        if packing.makespan_s <= self._enough_s(members):
            return packing
        ring = self._packing(members, [0] * len(members), weights=self._weights(members))
        return min(packing, ring, key=lambda each: each.makespan_s)

    def _improve(self, packing: Packing, *, factors: Iterable[float]) -> Packing:
        """The best of a packing and those with other capacities, from small to large."""
        members, num_ranks = packing.members, self._cluster.num_ranks
        weights = self._weights(members)
        lengths = [self._batch.num_tokens[at] for at in members]
        mean_tokens, largest = sum(lengths) / num_ranks, self._cluster.max_tokens_per_rank
        for capacity in sorted({int(min(mean_tokens * factor + 1, largest)) for factor in factors}):
            if packing.makespan_s <= self._enough_s(members):
                break
            owners = best_fit_decreasing(lengths, capacity_tokens=capacity, max_bins=num_ranks)
            self._work += len(members) + 100
            self.num_packings += 1
            if owners is not None:
                other = self._packing(members, owners, weights=weights)
                packing = min(packing, other, key=lambda each: each.makespan_s)
        return packing

    def _enough_s(self, members: Sequence[int]) -> float:
        return self._floor_s(members) * GOOD_ENOUGH

    def _weights(self, members: list[int]) -> tuple[Table, Table]:
        return self._tokens[members], self._cells[members]

    def _packing(self, members: list[int], owners: list[int], *, weights: tuple[Table, Table]) -> Packing:
        """T(group, degree) is infinite where memory forbids the degree."""
        group = np.array(owners)
        tokens, cells = (np.bincount(group, weight)[:, None] for weight in weights)
        table = self._cost.group_s(cells, tokens, degree=self._degrees)
        table[tokens > self._rooms] = np.inf
        return Packing(members=members, owners=owners, table=table, makespan_s=least_makespan(table))
