"""Joint search: microbatch count, cut, groups and degrees together, for the least seconds of the batch."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from rayfcp.plan.cost import CostModel
from rayfcp.plan.exchange import Exchange
from rayfcp.plan.grouping import Grouping, Pricer
from rayfcp.plan.microbatches import Columns, Cut, counts_of, cut_by_length, cuts_by_time
from rayfcp.plan.walk import Walk
from rayfcp.values import ClusterSpec

# Walks: the target in multiples of the microbatch's floor, and the degree of the groups that are opened at once.
# Of plans that take equally long the first found stays: groups of one rank, which send nothing, come early.
FIRST_WALKS = ((1.0, 1), (1.02, 0))
FIRST_WALKS_TIGHT = ((1.0, 8), (1.02, 0))
MORE_WALKS = ((1.0, 2), (1.0, 4), (1.06, 0), (1.0, 0), (1.0, 1), (1.02, 16), (1.0, 8), (1.15, 0), (1.3, 0), (1.6, 0))
TIGHT = 0.8  # of the memory of all ranks is in use: groups that pool it come first
ROOMY = 0.95  # of it: more in a microbatch can seldom be packed well
FIRST_ENOUGH = 1.02  # of its floor: the microbatch gets no more first walks
FIRST_LIMIT = 1.15  # of its floor: beyond, first walks are given up
GOOD_ENOUGH = 1.001  # of its floor: it gets no more walks at all
LIMIT = 1.1  # of the makespan to beat: a group that takes so long ends the walk; less may be mended by exact degrees
REFINED_CUTS = 2
FIRST_SHARE = 0.5  # of the budget goes to finding cuts
USUAL_SEQUENCES = 512  # a larger batch has more moves in proportion
SCANNED_PER_MOVE = 8  # looking at so many groups takes as long as a move


class JointSearch:
    """The cheapest plan of one batch that a budget of moves finds; a move is one sequence put in a group.

    Each cut into microbatches has a floor: no plan of it takes less. Cuts whose floor is no better than
    what was found are passed over; each other cut is packed by walks (`rayfcp.plan.walk`), the best two
    by more of them, the best one is improved by moves and swaps (`rayfcp.plan.exchange`). The first cut
    that memory permits is packed whatever the budget.
    """

    def __init__(self, batch: Columns, *, cluster: ClusterSpec, cost: CostModel, max_moves: int) -> None:
        self.num_cuts = self.num_moves = 0
        max_moves = max_moves * max(len(batch.ids), USUAL_SEQUENCES) // USUAL_SEQUENCES
        self._batch, self._cluster, self._cost, self._max_moves = batch, cluster, cost, max_moves
        self._pricer = Pricer(batch, cluster=cluster, cost=cost)
        self._compute_s = np.array(batch.compute_s)
        self._alone_s = np.array(batch.alone_s) + cost.fixed_s

    @property
    def bound_s(self) -> float:
        """No plan of the batch takes less."""
        return max(self._least_s(1), float(self._alone_s.max()))

    def run(self, *, max_more: int) -> list[Grouping]:
        """One grouping per microbatch."""
        found: list[tuple[float, int, list[Grouping]]] = []
        for cut in self._cuts(max_more):
            if found and self.num_moves > FIRST_SHARE * self._max_moves:
                break
            floors = [self._floor_s(members) for members in cut]
            least_s = min(found)[0] if found else math.inf
            self.num_moves += len(self._batch.ids) // 2
            if self._cost.batch_s(floors) < least_s:
                groupings = self._pack(cut, floors, least_s=least_s)
                if len(groupings) == len(cut):
                    found.append((self._total_s(groupings), self.num_cuts, groupings))
                self.num_cuts += 1
        refined = [
            (self._total_s(better), number, better)
            for _, number, groupings in sorted(found)[:REFINED_CUTS]
            for better in [self._refine(groupings)]
        ]
        best = min(refined)[2]
        if min(refined)[0] <= GOOD_ENOUGH * self.bound_s:
            return best
        exchange = Exchange(best, pricer=self._pricer, cost=self._cost)
        best = exchange.run(max_moves=self._max_moves - self.num_moves)
        self.num_moves += exchange.num_moves
        return best

    def _pack(self, cut: Cut, floors: list[float], *, least_s: float) -> list[Grouping]:
        """A grouping for each microbatch, or fewer: it stops when the cut cannot take less than `least_s`."""
        groupings: list[Grouping] = []
        for index, members in enumerate(cut):
            spans = [grouping.makespan_s for grouping in groupings] + floors[index:]
            spare_s = least_s - self._cost.batch_s(spans)
            groupings.append(self._first(members, floors[index], enough_s=floors[index] + spare_s))
            spans = [grouping.makespan_s for grouping in groupings] + floors[index + 1 :]
            if self._cost.batch_s(spans) >= least_s:
                break
        return groupings

    def _cuts(self, max_more: int) -> Iterator[Cut]:
        """By time, and by length: where memory binds, sequences of like length waste none of it.

        Counts that leave some memory free come first: where little is left, packing takes long and often fails.
        """
        counts, packed = counts_of(self._batch, cluster=self._cluster, max_more=max_more)
        roomy = [count for count in counts if self._tight(sum(self._batch.num_tokens) / count) <= ROOMY]
        for count in [*roomy, *(count for count in counts if count not in roomy)]:
            fill = ROOMY if count in roomy else 1.0
            yield from cuts_by_time(self._batch, count=count, cluster=self._cluster, fill=fill)
            by_length = cut_by_length(self._batch, count=count, cluster=self._cluster) if count > 1 else None
            if by_length is not None:
                yield by_length
        yield packed

    def _tight(self, num_tokens: float) -> float:
        """Share of all memory that a microbatch takes."""
        return num_tokens / (self._cluster.num_ranks * self._cluster.max_tokens_per_rank)

    def _total_s(self, groupings: Sequence[Grouping]) -> float:
        return self._cost.batch_s([grouping.makespan_s for grouping in groupings])

    def _least_s(self, count: int) -> float:
        """No plan of so many microbatches takes less."""
        work_s = float(self._compute_s.sum()) / self._cluster.num_ranks
        return work_s + count * (self._cost.fixed_s + self._cost.exposed_s)

    def _floor_s(self, members: Sequence[int]) -> float:
        """A makespan of these sequences in one microbatch below which no plan can get, or gains nothing:
        sharded traffic takes as long."""
        held = list(members)
        shared_s = float(self._compute_s[held].sum()) / self._cluster.num_ranks + self._cost.fixed_s
        return max(shared_s, float(self._alone_s[held].max()), self._cost.shard_s)

    def _first(self, members: Sequence[int], floor_s: float, *, enough_s: float) -> Grouping:
        """One ring over all ranks, which fits whenever the microbatch does, or what few walks find."""
        tight = self._tight(float(self._pricer.tokens[list(members)].sum())) > TIGHT
        grouping = self._pricer.price(members, [0] * len(members))
        for factor, pool in FIRST_WALKS_TIGHT if tight else FIRST_WALKS:
            if grouping.makespan_s <= FIRST_ENOUGH * floor_s:
                break
            limit_s = LIMIT * min(grouping.makespan_s, enough_s, FIRST_LIMIT * floor_s)
            grouping = self._better(grouping, members, target_s=factor * floor_s, pool=pool, limit_s=limit_s)
        return grouping

    def _refine(self, groupings: Sequence[Grouping]) -> list[Grouping]:
        """More walks, for the microbatch that loses most first."""
        better = list(groupings)
        floors = [self._floor_s([at for group in each.groups for at in group]) for each in groupings]
        for index in sorted(range(len(better)), key=lambda at: (floors[at] - better[at].makespan_s, at)):
            if self.num_moves > self._max_moves:
                break
            members = sorted(at for group in better[index].groups for at in group)
            for factor, pool in MORE_WALKS:
                if better[index].makespan_s <= GOOD_ENOUGH * floors[index] or self.num_moves > self._max_moves:
                    break
                limit_s = LIMIT * better[index].makespan_s
                better[index] = self._better(
                    better[index], members, target_s=factor * floors[index], pool=pool, limit_s=limit_s
                )
        return better

    def _better(
        self, grouping: Grouping, members: Sequence[int], *, target_s: float, pool: int, limit_s: float
    ) -> Grouping:
        if pool > self._cluster.num_ranks:
            return grouping
        other = self._walk(members, target_s=target_s, pool=pool, limit_s=limit_s)
        return grouping if other is None or other.makespan_s >= grouping.makespan_s else other

    def _walk(self, members: Sequence[int], *, target_s: float, pool: int, limit_s: float) -> Grouping | None:
        held = list(members)
        alone_s = self._pricer.alone_s[held]
        meets = alone_s <= target_s * (1 + 1e-9)
        least = np.where(meets.any(axis=1), meets.argmax(axis=1), alone_s.argmin(axis=1)) + 1
        walk = Walk(cluster=self._cluster, cost=self._cost, target_s=target_s, limit_s=limit_s)
        done = walk.run(
            self._pricer.tokens[held].tolist(), self._pricer.cells[held].tolist(), least=least.tolist(), pool=pool
        )
        self.num_moves += len(walk.owners) + walk.num_scanned // SCANNED_PER_MOVE
        return self._pricer.price(members, walk.owners) if done else None
