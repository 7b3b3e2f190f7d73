"""The queue of events: a heap of one moment for each rank."""

from collections.abc import Callable
from typing import TypeVar, cast

import numba

from rayfcp.simulate.arrays import State

F = TypeVar("F", bound=Callable[..., object])


def inlined(function: F) -> F:
    """Part of what calls it: handing over this many arrays takes longer than most functions here."""
    return cast(F, numba.njit(inline="always", error_model="numpy")(function))


@inlined
def push(s: State, event: tuple[float, int]) -> None:
    """(seconds, rank): the rank goes on then; equal times go by rank."""
    at_s, rank = event
    child = s.heap_size[0]
    s.heap_size[0] += 1
    while child > 0:
        parent = (child - 1) // 2
        above = s.heap_s[parent]
        if above < at_s or (above == at_s and s.heap_rank[parent] < rank):
            break
        s.heap_s[child], s.heap_rank[child] = above, s.heap_rank[parent]
        child = parent
    s.heap_s[child], s.heap_rank[child] = at_s, rank


@inlined
def pop(s: State) -> None:
    """Take the first event away."""
    size = s.heap_size[0] - 1
    s.heap_size[0] = size
    at_s, rank = s.heap_s[size], s.heap_rank[size]
    hole = 0
    while 2 * hole + 1 < size:
        child = 2 * hole + 1
        right = child + 1
        if right < size and (
            s.heap_s[right] < s.heap_s[child]
            or (s.heap_s[right] == s.heap_s[child] and s.heap_rank[right] < s.heap_rank[child])
        ):
            child = right
        if at_s < s.heap_s[child] or (at_s == s.heap_s[child] and rank < s.heap_rank[child]):
            break
        s.heap_s[hole], s.heap_rank[hole] = s.heap_s[child], s.heap_rank[child]
        hole = child
    s.heap_s[hole], s.heap_rank[hole] = at_s, rank
