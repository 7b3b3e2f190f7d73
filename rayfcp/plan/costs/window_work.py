"""What layers with windows see of blocks that travel: cells, and tokens of which somebody sees something."""

import numpy as np
import numpy.typing as npt

from rayfcp.values import Windows

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

RING_TOKENS = 8192
"""Tokens of a sequence that a rank of a ring is taken to hold."""

NOWHERE = 2**40
"""Beyond any position."""


def seen_through(
    windows: Windows, keys: tuple[Ints, Ints], *, length: Ints, queries: tuple[Ints, Ints], pair: Ints
) -> tuple[Floats, Floats]:
    """Of each block of keys, in the mean over layers: the cells that later queries of one rank compute with it, and how
    many of its tokens travel there: those that these see, all in layers whose window does not cut its sequence, of
    `length` tokens.

    `keys`: start and stop of blocks; `queries`: of runs of queries that come after the block of number `pair`.
    """
    start, stop = keys
    layers = sum(count for _, count in windows)
    cells, tokens = np.zeros(len(start)), np.zeros(len(start))
    for window, count in windows:
        reach = window or NOWHERE
        low, high = start[pair], stop[pair]
        here = _cells_before(queries[1], low, high, reach) - _cells_before(queries[0], low, high, reach)
        cells += count * np.bincount(pair, here, minlength=len(start))
        first = np.full(len(start), NOWHERE)
        np.minimum.at(first, pair, queries[0])
        seen = np.maximum(stop - np.maximum(start, first - reach + 1), 0)
        tokens += count * np.where(reach < length, seen, stop - start)
    return cells / layers, tokens / layers


def seen_in_rings(windows: Windows, ranks: Floats) -> Floats:
    """Of what would travel in rings of so many ranks without windows, what does, in the mean over layers.

    Where each rank has two slices of a sequence, `RING_TOKENS` together, it gets of each slice's predecessors what the
    window reaches, instead of the slices of all others. That is close where rings hold about one sequence that long;
    what a layout's transfers carry is counted instead (`seen_through`), and so is what programs send.

    >>> seen_in_rings(((0, 1), (1024, 1)), np.array([1.0, 2.0, 5.0]))
    array([1.     , 0.625  , 0.53125])
    """
    found = np.zeros_like(ranks)
    for window, count in windows:
        reached = 2 * window / (np.maximum(ranks - 1, 1) * RING_TOKENS)
        found += count * np.where((window == 0) | (ranks <= 1), 1.0, np.minimum(reached, 1.0))
    return found / sum(count for _, count in windows) if windows else np.ones_like(ranks)


def _cells_before(row: Ints, low: Ints, high: Ints, reach: int) -> Floats:
    """Cells of the queries from `high` to `row` with keys `[low, high)` where each sees `reach` keys, itself included.

    The first queries see all of these, later ones a key less each.
    """
    all_of = np.clip(np.minimum(row, low + reach) - high, 0, None)
    begin = np.maximum(low + reach, high)
    fewer = np.clip(np.minimum(row, high + reach - 1) - begin, 0, None).astype(np.float64)
    most = high - (begin - reach + 1)
    return np.asarray(all_of * (high - low) + fewer * most - fewer * (fewer - 1) / 2, np.float64)
