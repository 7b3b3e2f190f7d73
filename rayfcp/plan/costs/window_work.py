"""What layers with windows see of blocks that travel: cells, and tokens of which somebody sees something."""

import numpy as np
import numpy.typing as npt

from rayfcp.values import Windows

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

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


def _cells_before(row: Ints, low: Ints, high: Ints, reach: int) -> Floats:
    """Cells of the queries from `high` to `row` with keys `[low, high)` where each sees `reach` keys, itself included.

    The first queries see all of these, later ones a key less each.
    """
    all_of = np.clip(np.minimum(row, low + reach) - high, 0, None)
    begin = np.maximum(low + reach, high)
    fewer = np.clip(np.minimum(row, high + reach - 1) - begin, 0, None).astype(np.float64)
    most = high - (begin - reach + 1)
    return np.asarray(all_of * (high - low) + fewer * most - fewer * (fewer - 1) / 2, np.float64)
