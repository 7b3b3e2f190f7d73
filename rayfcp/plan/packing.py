"""Stage 1: sequences into atomic groups by best-fit decreasing (Flexible Context Parallelism, section 4.4)."""

from collections.abc import Sequence

import numpy as np


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
    from rayfcp.plan.joint.kernels.cut import Bins, best_fit  # compiled: loaded on use

    bins = Bins(float(capacity_tokens), len(lengths) if max_bins is None else max_bins)
    owners: list[int] = best_fit(np.array(lengths, np.float64), bins).tolist()
    return owners if len(owners) == len(lengths) else None


def bins_of(owners: Sequence[int]) -> list[list[int]]:
    """Positions in each bin, ascending.

    >>> bins_of([0, 1, 2, 2, 0])
    [[0, 4], [1], [2, 3]]
    """
    bins: list[list[int]] = [[] for _ in range(max(owners, default=-1) + 1)]
    for position, owner in enumerate(owners):
        bins[owner].append(position)
    return bins
