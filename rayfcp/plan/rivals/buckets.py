"""Sequences of like length as one, for models that cannot hold each (FlexSP, Wang et al., 2025, sequence bucketing)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """`members` are positions in the batch, longest first; `upper_tokens` is the length of the first."""

    members: tuple[int, ...]
    upper_tokens: int
    mean_tokens: float
    mean_cells: float


def buckets_of(
    num_tokens: Sequence[int], cells: Sequence[float], *, num_buckets: int, max_buckets: int, max_rounded_tokens: float
) -> list[Bucket]:
    """The `num_buckets` buckets that minimise the sum over sequences of their bucket's upper limit - their length.

    Exact, by dynamic programming over the sequences in order of length. More buckets, up to `max_buckets`, while
    lengths rounded up to the limits exceed `max_rounded_tokens` in sum. Full masks and causal ones share no bucket.
    Buckets come longest first, full masks before causal ones.

    >>> [each.members for each in buckets_of([9, 8, 3, 2], [45, 36, 6, 3], num_buckets=2, max_buckets=2,
    ...                                      max_rounded_tokens=99)]
    [(0, 1), (2, 3)]
    """
    lengths, areas = np.array(num_tokens, np.int64), np.array(cells, np.int64)
    full = areas > lengths * (lengths + 1) // 2
    order = np.lexsort((np.arange(len(lengths)), -lengths, ~full))
    lengths, areas, full = lengths[order], areas[order], full[order]
    starts, missed = _starts(lengths, full, most=min(max_buckets, len(lengths)))
    number = next(
        (
            index
            for index, wasted in enumerate(missed)
            if index + 1 >= min(num_buckets, len(missed)) and lengths.sum() + wasted <= max_rounded_tokens
        ),
        len(missed) - 1,
    )
    found: list[Bucket] = []
    stop = len(lengths)
    for layer in reversed(starts[: number + 1]):
        start = int(layer[stop])
        found.append(
            Bucket(
                members=tuple(order[start:stop].tolist()),
                upper_tokens=int(lengths[start]),
                mean_tokens=float(lengths[start:stop].mean()),
                mean_cells=float(areas[start:stop].mean()),
            )
        )
        stop = start
    return found[::-1]


def _starts(
    lengths: npt.NDArray[np.int64], full: npt.NDArray[np.bool_], *, most: int
) -> tuple[list[npt.NDArray[np.int64]], list[float]]:
    """By number of buckets less one: where the last bucket of the first i sequences starts, and what all miss."""
    count = len(lengths)
    total = np.concatenate(([0], np.cumsum(lengths)))
    least = np.full(count + 1, np.inf)
    least[0] = 0.0
    begin = np.searchsorted(~full, ~full)  # of the run of sequences with the same mask
    starts, missed = [], []
    for _ in range(most):
        following, start = np.full(count + 1, np.inf), np.zeros(count + 1, np.int64)
        for stop in range(1, count + 1):
            low = int(begin[stop - 1])
            at = np.arange(low, stop)
            wasted = least[low:stop] + lengths[low:stop] * (stop - at) - (total[stop] - total[low:stop])
            best = int(wasted.argmin())
            following[stop], start[stop] = wasted[best], low + best
        least = following
        starts.append(start)
        missed.append(float(least[count]))
    return starts, missed
