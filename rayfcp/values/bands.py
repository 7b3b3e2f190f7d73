"""Which keys the rows of a mask see: bands whose two edges stand still or slide with the row."""

from dataclasses import dataclass

Windows = tuple[tuple[int, int], ...]
"""Kinds of a model's layers, ascending: (how many keys a query sees, itself included; how many layers). A window of 0:
all keys before it. Nothing at all: no layer has a window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Where the keys of a row begin or end: at key `at`, or where it `slides`, for row q at key q + `at`."""

    at: int
    slides: bool = False

    def of(self, row: int) -> int:
        return self.at + row if self.slides else self.at


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Rows `[start, stop)` of a sequence see keys `[low, high)`, as far as the sequence has them. Edges that both
    slide are at least one key apart; those of one row may cross (it then sees nothing)."""

    start: int
    stop: int
    low: Edge
    high: Edge


def window_cells(num_tokens: int, window: int) -> int:
    """(query, key) cells of a causal sequence whose queries see `window` keys at most, themselves included.

    >>> [window_cells(5, window) for window in (1, 2, 5, 9)]
    [5, 9, 15, 15]
    """
    inside = min(num_tokens, window)
    return inside * (inside + 1) // 2 + (num_tokens - inside) * inside
