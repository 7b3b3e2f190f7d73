"""Loops that kernels share. Numba compiles its own `max`, `argmax` and `searchsorted` for every type that they could
have, which takes ten times as long."""

import numpy as np

from rayfcp.cost.compiled import inner, inner_with_arrays
from rayfcp.values.arrays import Floats, Ints


@inner
def argmax(values: Floats | Ints) -> int:
    """Position of the largest value, the first among equals."""
    best = 0
    for at in range(1, len(values)):
        if values[at] > values[best]:
            best = at
    return best


@inner
def first_at_least(values: Floats | Ints, size: int, least: float) -> int:
    """Position of the first of `size` rising values that is at least `least`; `size` if none is."""
    low, high = 0, size
    while low < high:
        middle = (low + high) // 2
        if values[middle] < least:
            low = middle + 1
        else:
            high = middle
    return low


@inner_with_arrays
def descending(values: Floats) -> Ints:
    """Positions of the values, the largest first, equal ones in their order: a merge sort."""
    size, width = len(values), 1
    order, merged = np.arange(size), np.empty(size, np.int64)
    while width < size:
        for start in range(0, size, 2 * width):
            middle, stop = min(start + width, size), min(start + 2 * width, size)
            left, right = start, middle
            for at in range(start, stop):
                if left < middle and (right == stop or values[order[left]] >= values[order[right]]):
                    merged[at] = order[left]
                    left += 1
                else:
                    merged[at] = order[right]
                    right += 1
        order, merged = merged, order
        width *= 2
    return order
