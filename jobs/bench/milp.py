"""A linear program put together block by block, for the scripts of bounds."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from rayfcp.values.arrays import Floats, Ints


class Block(NamedTuple):
    """`rows` [rows, columns] times the variables are at most 0; `totals` [totals, columns]: what they add to the totals
    of all blocks; `cost` [columns]; `places`: the columns of an item."""

    rows: sparse.csc_matrix
    totals: sparse.csc_matrix
    cost: Floats
    places: dict[int, list[int]]


class Rows:
    """Rows and columns of one block as they come; variables are at least 0."""

    def __init__(self) -> None:
        self._entries: list[tuple[Ints, Ints, Floats]] = []
        self._rows = 0
        self.items: list[int] = []

    def columns(self, items: Ints) -> Ints:
        """New variables: how much there is of these items; -1: of none."""
        first = len(self.items)
        self.items += items.tolist()
        return np.arange(first, len(self.items))

    def add(self, *parts: tuple[Ints, Floats | float]) -> None:
        """A row: these sum to at most 0."""
        for columns, values in parts:
            row = np.full(len(columns), self._rows)
            self._entries.append((row, columns, np.broadcast_to(np.asarray(values, np.float64), row.shape)))
        self._rows += 1

    def block(self, once: sparse.csc_matrix, cost: Sequence[float]) -> Block:
        """`once` [totals, items]: what one of each item adds to the totals; `cost` of the first columns."""
        width, places = len(self.items), defaultdict(list)
        rows, columns, values = (np.concatenate(each) for each in zip(*self._entries, strict=True))
        counted = [(item, at) for at, item in enumerate(self.items) if item >= 0]
        for item, at in counted:
            places[item].append(at)
        chosen = sparse.csc_matrix(
            (np.ones(len(counted)), tuple(zip(*counted, strict=True)) or ((), ())), shape=(once.shape[1], width)
        )
        return Block(
            rows=sparse.csc_matrix((values, (rows, columns)), shape=(self._rows, width)),
            totals=sparse.csc_matrix(once @ chosen),
            cost=np.r_[cost, np.zeros(width - len(cost))],
            places=dict(places),
        )


def least(
    blocks: Sequence[Block], totals: Floats, *, none_of: Sequence[frozenset[int]], most: Sequence[tuple[Floats, float]]
) -> tuple[float, Floats]:
    """The least cost at these totals and the variables there, where block b has nothing of the items `none_of[b]`, and
    of every pair of `most` the values times the variables are at most so much. Infinite if nothing is permitted; 0 if
    the solver does not know."""
    starts = np.cumsum([0, *(len(block.cost) for block in blocks)])
    upper = np.full(starts[-1], np.inf)
    for block, start, items in zip(blocks, starts[:-1], none_of, strict=True):
        upper[[int(start) + at for item in items for at in block.places.get(item, ())]] = 0.0
    own = sparse.block_diag([block.rows for block in blocks], format="csr")
    for method in ("highs", "highs-ipm"):
        found = linprog(
            np.concatenate([block.cost for block in blocks]),
            A_ub=sparse.vstack([own, sparse.csr_matrix(np.array([values for values, _ in most]))], format="csr"),
            b_ub=np.r_[np.zeros(own.shape[0]), [bound for _, bound in most]],
            A_eq=sparse.hstack([block.totals for block in blocks], format="csr"),
            b_eq=totals,
            bounds=np.stack([np.zeros(len(upper)), upper], axis=1),
            method=method,
        )
        if found.status == 0:
            return float(found.fun), found.x
        if found.status == 2:
            return np.inf, np.zeros(len(upper))
    return 0.0, np.zeros(len(upper))
