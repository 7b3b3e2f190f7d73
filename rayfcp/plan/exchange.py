"""Local search: sequences move between groups and microbatches, or change places, while that helps."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from rayfcp.plan.cost import CostModel
from rayfcp.plan.degrees import Table, least_makespan
from rayfcp.plan.grouping import Grouping, Pricer

TRIAL_MOVES = 40  # a trial prices up to two microbatches anew, which takes as long as so many moves of a walk
ENOUGH = 1e-9  # of the batch's time: less is no gain

Members = tuple[int, ...]
Place = tuple[int, int]  # microbatch, group in it; one past the last is a new one
Change = Mapping[Place, Members]


class Exchange:
    """Hill climbing by exact trials: each gives out all ranks anew in the microbatches that it touches.

    A trial moves a sequence to another group of any microbatch or to a new group or microbatch, lets two
    sequences of different length change places, or unites two groups of a microbatch. `num_moves` is what
    the trials cost.
    """

    def __init__(self, groupings: Sequence[Grouping], *, pricer: Pricer, cost: CostModel) -> None:
        self.num_moves = 0
        self._pricer, self._cost = pricer, cost
        self._best: list[list[Members]] = [[tuple(group) for group in each.groups] for each in groupings]
        self._spans = [each.makespan_s for each in groupings]
        self._rows = {
            tuple(group): row for each in groupings for group, row in zip(each.groups, each.table, strict=True)
        }

    def run(self, *, max_moves: int) -> list[Grouping]:
        """The groupings after trials within the budget, until none helps; never worse."""
        while any(self._try(change) for change in self._changes(max_moves)):
            pass
        return [
            Grouping(groups=[list(group) for group in groups], table=self._table(groups), makespan_s=span)
            for groups, span in zip(self._best, self._spans, strict=True)
        ]

    def _changes(self, max_moves: int) -> Iterator[Change]:
        """All single changes, those of the groups that decide a makespan first, until the budget is spent."""
        places = [(index, group) for index, groups in enumerate(self._best) for group in range(len(groups))]
        opens = [(index, len(groups)) for index, groups in enumerate(self._best)] + [(len(self._best), 0)]
        for source in sorted(places, key=lambda place: (-self._load(place), place)):
            for target in [*places, *opens]:
                if target == source:
                    continue
                for change in self._between(source, target):
                    if self.num_moves + TRIAL_MOVES > max_moves:
                        return
                    self.num_moves += TRIAL_MOVES
                    yield change

    def _load(self, place: Place) -> float:
        """How close a group is to decide its microbatch: its share of the makespan at its share of ranks."""
        index, group = place
        row = self._rows[self._best[index][group]]
        fits = np.flatnonzero(row <= self._spans[index] * (1 + ENOUGH))
        return float(row[fits[0]] / self._spans[index]) if len(fits) and self._spans[index] > 0 else 0.0

    def _between(self, source: Place, target: Place) -> Iterator[Change]:
        held = self._best[source[0]][source[1]]
        groups = self._best[target[0]] if target[0] < len(self._best) else []
        there = groups[target[1]] if target[1] < len(groups) else ()
        if there and source[0] == target[0] and source < target:
            yield {source: _joined(held, there), target: ()}
        tokens, cells = self._pricer.tokens, self._pricer.cells
        for at in held:
            without = tuple(each for each in held if each != at)
            if without or there:
                yield {source: without, target: _joined(there, (at,))}
            for other in there if source < target else ():
                if tokens[at] != tokens[other] or cells[at] != cells[other]:
                    rest = tuple(each for each in there if each != other)
                    yield {source: _joined(without, (other,)), target: _joined(rest, (at,))}

    def _try(self, change: Change) -> bool:
        """Keep the change if the batch takes less time."""
        after = {index: list(self._best[index]) for index, _ in change if index < len(self._best)}
        for (index, group), members in change.items():
            groups = after.setdefault(index, [])
            if group < len(groups):
                groups[group] = members
            else:
                groups.append(members)
        after = {index: [members for members in groups if members] for index, groups in after.items()}
        spans = dict(enumerate(self._spans)) | {
            index: least_makespan(self._table(groups)) for index, groups in after.items() if groups
        }
        kept = [index for index in sorted(spans) if after.get(index, True)]
        if self._cost.batch_s([spans[index] for index in kept]) >= self._cost.batch_s(self._spans) * (1 - ENOUGH):
            return False
        best = dict(enumerate(self._best)) | after
        self._best = [best[index] for index in kept]
        self._spans = [spans[index] for index in kept]
        return True

    def _table(self, groups: Sequence[Members]) -> Table:
        for members in groups:
            if members not in self._rows:
                self._rows[members] = self._pricer.row(members)
        return np.stack([self._rows[members] for members in groups])


def _joined(one: Members, other: Members) -> Members:
    return tuple(sorted((*one, *other)))
