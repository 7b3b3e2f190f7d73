"""Ranges of degrees that share a colour."""

EDGES = (1, 2, 3, 5, 9, 17)
"""First degrees of the ranges."""


def degree_bands(num_ranks: int) -> list[tuple[str, int, int]]:
    """At most six ranges `[low, high)` of degrees that cover 1 to `num_ranks`, with their names.

    >>> degree_bands(8)
    [('1', 1, 2), ('2', 2, 3), ('3-4', 3, 5), ('5-8', 5, 9)]
    """
    bands = []
    for low, above in zip(EDGES, (*EDGES[1:], num_ranks + 1), strict=True):
        if low <= num_ranks:
            high = max(min(above, num_ranks + 1), low + 1)
            bands.append((str(low) if high == low + 1 else f"{low}-{high - 1}", low, high))
    return bands


def band_of(degree: int) -> int:
    """Which range a degree falls into, from 0.

    >>> [band_of(degree) for degree in (1, 2, 4, 8, 16, 300)]
    [0, 1, 2, 3, 4, 5]
    """
    return sum(degree >= edge for edge in EDGES) - 1
