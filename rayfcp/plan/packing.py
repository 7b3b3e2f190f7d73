"""Stage 1: sequences into atomic groups by best-fit decreasing (Flexible Context Parallelism, section 4.4)."""

from bisect import bisect_left, insort
from collections.abc import Sequence

_INDEX_BITS = 32  # a bin's key is (room, index) in one integer: compared and moved as one
_INDEX_MASK = (1 << _INDEX_BITS) - 1


def best_fit_decreasing(
    lengths: Sequence[int], *, capacity_tokens: int, max_bins: int | None = None
) -> list[int] | None:
    """Pack `lengths`, longest first, into bins; returns the bin of each, numbered in order of opening.

    A sequence goes to the bin with the least room that holds it (the earliest among equals), or opens
    one of `ceil(length / capacity_tokens) * capacity_tokens` tokens: the room of its least degree.
    None if more than `max_bins` would open.

    >>> best_fit_decreasing([9, 4, 3, 2, 1], capacity_tokens=5)
    [0, 1, 2, 2, 0]
    """
    owners: list[int] = []
    rooms: list[int] = []
    num_bins = 0
    shortest = (lengths[-1] if lengths else 0) << _INDEX_BITS
    for length in lengths:
        need = length << _INDEX_BITS
        at = bisect_left(rooms, need)
        if at < len(rooms):
            key = rooms.pop(at)
        else:
            if num_bins == max_bins:
                return None
            key = (-(-length // capacity_tokens) * capacity_tokens << _INDEX_BITS) | num_bins
            num_bins += 1
        owners.append(key & _INDEX_MASK)
        key -= need
        if key >= shortest:  # a bin without room for the shortest is full
            insort(rooms, key)
    return owners


def bins_of(owners: Sequence[int]) -> list[list[int]]:
    """Positions in each bin, ascending.

    >>> bins_of([0, 1, 2, 2, 0])
    [[0, 4], [1], [2, 3]]
    """
    bins: list[list[int]] = [[] for _ in range(max(owners, default=-1) + 1)]
    for position, owner in enumerate(owners):
        bins[owner].append(position)
    return bins
