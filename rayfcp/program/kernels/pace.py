"""Attends spread over phases, as `rayfcp.values.Pacing` defines them: an equal share of pairs in each, first on keys
that arrived, then on own ones. Ranks whose loads are balanced then go through the rounds at one pace, and none waits
for another that has more to do in one phase (`rayfcp.cost.kernels.flow` predicts the same).
"""

from typing import NamedTuple

import numpy as np

from rayfcp.cost.compiled import compiled, inlined, inner_with_arrays
from rayfcp.program.instructions import FLIPPED, WHOLE
from rayfcp.values.arrays import Ints
from rayfcp.values.plan import phase_share

TILE = 128
"""Queries: attends are cut at multiples of this, and are not cut shorter."""

_share = inlined(phase_share)


@inlined
def _pairs(row: Ints) -> int:
    queries, keys = row[1] - row[0], row[4] - row[3]
    return int(queries * keys if row[5] == WHOLE else queries * (queries + 1) // 2)


@inner_with_arrays
def _cut(row: Ints, pairs: int, rest: Ints) -> int:
    """Shorten `row` to about `pairs`, and write what is left of it to `rest`, the next one last; returns the number of
    rows there, -1 if all of the row is left.

    An attend is cut by its queries; a causal square of n tokens into a smaller one of the first queries, those of the
    others on the first keys, and the square of the rest; a flipped one into a smaller one of the first queries, these
    on the last keys, and the square of the rest.
    """
    kind, pairs = row[5], max(pairs, 0)
    queries = pairs // (row[4] - row[3]) if kind == WHOLE else int((2 * pairs) ** 0.5)
    queries = (queries + TILE // 2) // TILE * TILE
    if queries + TILE > row[1] - row[0]:
        if 2 * pairs >= _pairs(row):
            return 0
        queries = 0
    if queries == 0:
        return -1
    at, key_at = row[0] + queries, row[3] + queries
    rest[0], rest[1] = row, row
    rest[0, 0] = at
    row[1] = at
    if kind == WHOLE:
        return 1
    rest[0, 3] = key_at
    rest[1, 5] = WHOLE
    if kind == FLIPPED:
        rest[1, 1], rest[1, 3] = at, key_at
    else:
        rest[1, 0], rest[1, 4] = at, key_at
    row[4] = key_at
    return 2


class _Queue(NamedTuple):
    """Rows `at[0]` to `at[1]` that are still to come, and parts of the one before them, the next last: `at[2]` of them,
    possible and due in phases `at[3]` and `at[4]`."""

    at: Ints
    parts: Ints


@inner_with_arrays
def _next(queue: _Queue, columns: Ints, ready: Ints, due: Ints, phase: int) -> bool:
    """Whether there is a row, or part of one, that is possible in a phase; it is a part then."""
    at = queue.at
    if at[2] > 0:
        return True
    if at[0] == at[1] or ready[at[0]] > phase:
        return False
    queue.parts[0] = columns[at[0]]
    at[2], at[3], at[4] = 1, ready[at[0]], due[at[0]]
    at[0] += 1
    return True


@inner_with_arrays
def _take(queue: _Queue, phase: int, left: float, row: Ints, rest: Ints) -> bool:
    """Take the next part into `row`, or as much of it as fits; False if none does."""
    at = queue.at
    row[:] = queue.parts[at[2] - 1]
    count = 0 if phase >= at[4] else _cut(row, int(left), rest)
    if count < 0:
        return False
    at[2] -= 1
    for part in range(count):
        queue.parts[at[2]] = rest[part]
        at[2] += 1
    return True


@compiled
def pace(columns: Ints, ready: Ints, due: Ints, first: Ints, num_phases: int) -> tuple[Ints, Ints]:
    """The attends of each unit in each phase, and where each unit's phases begin among them, `units x phases + 1`.

    Unit u has the rows `first[u]` to `first[u + 1]` of `columns` (as of `Attends`): its own keys, slot 0, then others
    in the order in which they come. A row is possible from phase `ready` on, all of it in phase `due` at the latest.
    Each phase gets its equal share of the pairs, and more where attends are due.
    """
    num_units = len(first) - 1
    found = np.empty((len(columns) + num_units * (6 * num_phases + 8), 6), np.int64)
    bounds = np.zeros(num_units * num_phases + 1, np.int64)
    arrived = _Queue(np.zeros(5, np.int64), np.empty((8, 6), np.int64))
    own = _Queue(np.zeros(5, np.int64), np.empty((8, 6), np.int64))
    row, rest = np.empty(6, np.int64), np.empty((2, 6), np.int64)
    size = 0
    for unit in range(num_units):
        split, total, done = first[unit], 0, 0
        for number in range(first[unit], first[unit + 1]):
            split += columns[number, 2] == 0
            total += _pairs(columns[number])
        arrived.at[0], arrived.at[1], arrived.at[2] = split, first[unit + 1], 0
        own.at[0], own.at[1], own.at[2] = first[unit], split, 0
        for phase in range(num_phases):
            left = _share(total, phase, num_phases, done)
            for queue in (arrived, own):
                while _next(queue, columns, ready, due, phase) and _take(queue, phase, left, row, rest):
                    found[size] = row
                    size += 1
                    done += _pairs(row)
                    left -= _pairs(row)
            bounds[unit * num_phases + phase + 1] = size
    return found[:size].copy(), bounds
