"""Images to ranks, longest first (Graham's LPT); of equal images, as many as possible to the ranks of their tokens."""

from typing import NamedTuple

import numpy as np

from rayfcp.cost.compiled import compiled, inlined, inner_with_arrays
from rayfcp.values.arrays import Floats, Ints

TIE = 1e-12
"""Relative difference of loads that counts as none."""


class ImageItems(NamedTuple):
    """Longest first, of equal ones in the order of their tokens: seconds on a rank of speed 1, patches, the rank that
    holds the first token. Equal images have one number in `kind`, kinds ascend."""

    seconds: Floats
    patches: Floats
    holder: Ints
    kind: Ints


@compiled
def longest_first(images: ImageItems, speed: Floats, max_patches: Floats) -> Ints:
    """The rank of each image; -1 for those that fit on no rank. `speed` and `max_patches`: of each rank.

    An image goes to the rank with memory for it that is done with it first, among equals to the one that holds its
    tokens, else to the first. Equal images then change places, so that each rank keeps those whose tokens it holds,
    and gets the remaining ones in long runs.
    """
    loads, left, slowness = np.zeros(len(speed)), max_patches.copy(), 1.0 / speed
    found = np.full(len(images.seconds), -1)
    for at in range(len(found)):
        found[at] = best = _earliest(images, slowness, loads, left, at)
        if best >= 0:
            loads[best] += images.seconds[at]
            left[best] -= images.patches[at]
    first = 0
    while first < len(found):
        stop = first + 1
        while stop < len(found) and images.kind[stop] == images.kind[first]:
            stop += 1
        _exchange(found[first:stop], images.holder[first:stop], len(loads))
        first = stop
    return found


@inlined
def _earliest(images: ImageItems, slowness: Floats, loads: Floats, left: Floats, at: int) -> int:
    best, best_s, below_s = -1, np.inf, np.inf
    seconds, patches = images.seconds[at], images.patches[at]
    for rank in range(len(loads)):
        end_s = (loads[rank] + seconds) * slowness[rank]
        if end_s < below_s and left[rank] >= patches:
            best, best_s, below_s = rank, end_s, end_s * (1 - TIE)
    holder = images.holder[at]
    if best >= 0 and left[holder] >= patches:
        end_s = (loads[holder] + seconds) * slowness[holder]
        if end_s <= best_s * (1 + TIE):
            best = holder
    return best


@inner_with_arrays
def _exchange(found: Ints, holder: Ints, num_ranks: int) -> None:
    """Reassign equal images, as many to each rank as before."""
    counts = np.zeros(num_ranks + 1, np.int64)  # the last one: of those without a rank
    for rank in found:
        counts[rank] += 1
    taken = np.zeros(len(found), np.bool_)
    for at in range(len(found)):
        if counts[holder[at]] > 0:
            counts[holder[at]] -= 1
            found[at], taken[at] = holder[at], True
    rank = 0
    for at in range(len(found)):
        if not taken[at]:
            while rank < num_ranks and counts[rank] == 0:
                rank += 1
            found[at] = rank if rank < num_ranks else -1
            if rank < num_ranks:
                counts[rank] -= 1
