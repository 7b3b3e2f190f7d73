"""Groups of one microbatch with their price at every degree."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rayfcp.plan.cost import CostModel
from rayfcp.plan.degrees import Table, least_makespan
from rayfcp.plan.microbatches import Columns
from rayfcp.values import ClusterSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """Members of each group (positions in the batch), T(group, degree), the least makespan on N ranks."""

    groups: list[list[int]]
    table: Table
    makespan_s: float


class Pricer:
    """Prices groups of one batch. `alone_s[p, d - 1]` is sequence p alone on d ranks, infinite where memory
    forbids it."""

    def __init__(self, batch: Columns, *, cluster: ClusterSpec, cost: CostModel) -> None:
        self.tokens = np.array(batch.num_tokens, np.float64)
        self.cells = np.array(batch.cells, np.float64)
        self._cost = cost
        self._degrees = np.arange(1, cluster.num_ranks + 1)
        self._rooms = self._degrees * cluster.max_tokens_per_rank
        self.alone_s = self._table(self.tokens, self.cells)

    def price(self, members: Sequence[int], owners: Sequence[int]) -> Grouping:
        """The groups that `owners` names, member by member; numbers that no member has are passed over."""
        first: dict[int, int] = {}
        numbers = [first.setdefault(owner, len(first)) for owner in owners]
        groups: list[list[int]] = [[] for _ in first]
        for at, number in zip(members, numbers, strict=True):
            groups[number].append(at)
        held = list(members)
        tokens, cells = (np.bincount(numbers, each[held]).astype(np.float64) for each in (self.tokens, self.cells))
        table = self._table(tokens, cells)
        return Grouping(groups=groups, table=table, makespan_s=least_makespan(table))

    def row(self, members: Sequence[int]) -> Table:
        """T(group, 1..N) of one group."""
        held = list(members)
        tokens, cells = self.tokens[held].sum(keepdims=True), self.cells[held].sum(keepdims=True)
        row: Table = self._table(tokens, cells)[0]
        return row

    def _table(self, tokens: Table, cells: Table) -> Table:
        table = self._cost.group_s(cells[:, None], tokens[:, None], degree=self._degrees)
        table[tokens[:, None] > self._rooms] = np.inf
        return table
