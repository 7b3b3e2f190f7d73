"""Attends over phases, as `rayfcp.values.Pacing` defines them: an equal share of pairs in each, first on keys that
arrived, then on own ones.

Ranks whose loads are balanced then go through the rounds at one pace, and none waits for another that has
more to do in one phase (`rayfcp.cost.kernels.flow` predicts the same).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rayfcp.program.columns import FLIPPED, WHOLE, Attends
from rayfcp.values.plan import phase_share

TILE = 128
"""Queries: attends are cut at multiples of this, and are not cut shorter."""

Row = tuple[int, int, int, int, int, int]
"""As in `Attends`: query start, query stop, slot, key start, key stop, kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """Attends on the keys of one transfer: possible from phase `first` on, all in phase `due` at the latest."""

    attends: Attends
    first: int
    due: int


def paced(brought: Sequence[Brought], own: Attends, *, num_phases: int) -> list[Attends]:
    """The attends of each phase; together exactly all of `brought`, which comes in order, and `own`.

    Each phase gets its equal share of the pairs, and more where attends are due.

    An attend that is larger than the rest of a phase is cut by its queries; a causal square of n tokens into
    a smaller one of the first queries, those of the others on the first keys, and the square of the rest; a flipped one
    into a smaller one of the first queries, these on the last keys, and the square of the rest.
    """
    total = own.num_pairs + sum(each.attends.num_pairs for each in brought)
    queue = _Queue(brought)
    rest = rows_of(own)[::-1]
    phases, done = [], 0
    for phase in range(num_phases):
        last = phase + 1 == num_phases
        taken, left = queue.take(phase, pairs=phase_share(total, phase, num_phases, done), last=last)
        taken += first_pairs(rest, pairs=math.inf if last else left)
        done += sum(map(pairs_of_row, taken))
        phases.append(Attends(np.array(taken, np.int64).reshape(-1, 6)))
    return phases


def first_pairs(rows: list[Row], *, pairs: float) -> list[Row]:
    """Take about the first `pairs` of `rows`, which are in reverse order."""
    taken: list[Row] = []
    while rows and pairs > 0:
        row = rows.pop()
        here, later = (row, ()) if pairs == math.inf else _cut(row, int(pairs))
        rows += later
        if here is None:
            break
        taken.append(here)
        pairs -= pairs_of_row(here)
    return taken


class _Queue:
    """Attends on keys that arrived, first come, first served."""

    def __init__(self, brought: Sequence[Brought]) -> None:
        self._rows = [(row, each.first, each.due) for each in brought for row in rows_of(each.attends)]
        self._rows.reverse()

    def take(self, phase: int, *, pairs: float, last: bool) -> tuple[list[Row], float]:
        """Attends of this phase, and the pairs that it has left."""
        taken: list[Row] = []
        left = pairs
        while self._rows and self._rows[-1][1] <= phase:
            row, first, due = self._rows.pop()
            here, later = (row, ()) if last or phase >= due else _cut(row, int(left))
            self._rows += [(each, first, due) for each in later]
            if here is None:
                break
            taken.append(here)
            left -= pairs_of_row(here)
        return taken, left


def rows_of(attends: Attends) -> list[Row]:
    """The rows of the table."""
    return [(row[0], row[1], row[2], row[3], row[4], row[5]) for row in attends.columns.tolist()]


def pairs_of_row(row: Row) -> int:
    """(query, key) pairs of an attend."""
    queries, keys = row[1] - row[0], row[4] - row[3]
    return queries * (queries + 1) // 2 if row[5] != WHOLE else queries * keys


def _cut(row: Row, pairs: int) -> tuple[Row | None, tuple[Row, ...]]:
    """About `pairs` of a row, and the rest, the next last."""
    start, stop, slot, key_start, key_stop, kind = row
    queries = int((2 * max(pairs, 0)) ** 0.5) if kind != WHOLE else max(pairs, 0) // (key_stop - key_start)
    queries = (queries + TILE // 2) // TILE * TILE
    if queries + TILE > stop - start:
        if 2 * max(pairs, 0) >= pairs_of_row(row):
            return row, ()
        queries = 0
    if queries == 0:
        return None, (row,)
    at, key_at = start + queries, key_start + queries
    if kind == WHOLE:
        return (start, at, slot, key_start, key_stop, WHOLE), ((at, stop, slot, key_start, key_stop, WHOLE),)
    rectangle = (at, stop, slot, key_start, key_at, WHOLE)
    if kind == FLIPPED:
        rectangle = (start, at, slot, key_at, key_stop, WHOLE)
    return (start, at, slot, key_start, key_at, kind), ((at, stop, slot, key_at, key_stop, kind), rectangle)
