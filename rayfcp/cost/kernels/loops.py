"""Loops that kernels share. Numba compiles its own `max`, `argmax` and `searchsorted` for every type that they could
have, which takes ten times as long."""

from rayfcp.cost.compiled import inner
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
