"""Many attends as one table of numbers, for a ring over 64 ranks has millions of them; and ranges of rows."""

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from rayfcp.program.instructions import Attend, Range

Column = npt.NDArray[np.int64]

WHOLE, CAUSAL, FLIPPED = range(3)
"""The pairs of an attend's rectangle that are computed: all, those of `Attend.causal`, those of `Attend.flipped`."""


class Attends(Sequence[Attend]):
    """An immutable sequence of attends, stored as a table `[attends, 6]`; equal to any sequence of the same.

    Columns: query start, query stop, slot, key start, key stop, kind (`WHOLE`, `CAUSAL` or `FLIPPED`).

    >>> attend = Attend(query=(0, 3), slot=0, key=(0, 3), causal=True)
    >>> table = Attends.of([attend])
    >>> table == (attend,), table[0].num_pairs, table.num_pairs
    (True, 6, 6)
    """

    __slots__ = ("columns",)

    def __init__(self, columns: Column) -> None:
        self.columns = columns
        columns.flags.writeable = False

    @classmethod
    def of(cls, attends: Iterable[Attend]) -> "Attends":
        """The table of these attends."""
        if isinstance(attends, cls):
            return attends
        rows = [(*each.query, each.slot, *each.key, _kind(each)) for each in attends]
        return cls(np.array(rows, np.int64).reshape(-1, 6))

    @property
    def num_pairs(self) -> int:
        """(query, key) pairs of all attends."""
        queries, keys = self.lengths
        square = self.columns[:, 5] != WHOLE
        return int(np.where(square, queries * (queries + 1) // 2, queries * keys).sum())

    @property
    def lengths(self) -> tuple[Column, Column]:
        """Queries and keys of each attend."""
        return self.columns[:, 1] - self.columns[:, 0], self.columns[:, 4] - self.columns[:, 3]

    def __len__(self) -> int:
        return len(self.columns)

    @overload
    def __getitem__(self, index: int) -> Attend: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Attend, ...]: ...
    def __getitem__(self, index: int | slice) -> Attend | tuple[Attend, ...]:
        if isinstance(index, slice):
            return tuple(_attend(row) for row in self.columns[index].tolist())
        return _attend(self.columns[index].tolist())

    def __iter__(self) -> Iterator[Attend]:
        return map(_attend, self.columns.tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Attends):
            return np.array_equal(self.columns, other.columns)
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(Attend.__eq__, self, other))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Attends({list(self)})"

    def __reduce__(self) -> tuple[type["Attends"], tuple[Column]]:
        return Attends, (self.columns,)


def _kind(attend: Attend) -> int:
    return FLIPPED if attend.flipped else int(attend.causal)


def _attend(row: list[int]) -> Attend:
    kind = row[5]
    return Attend(
        query=(row[0], row[1]), slot=row[2], key=(row[3], row[4]), causal=kind != WHOLE, flipped=kind == FLIPPED
    )


def expanded(counts: Column) -> tuple[Column, Column]:
    """Item i `counts[i]` times, and the number of each time.

    >>> expanded(np.array([2, 1]))
    (array([0, 0, 1]), array([0, 1, 0]))
    """
    at = np.repeat(np.arange(len(counts)), counts)
    return at, np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)


def merged(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """Ranges in the same order with neighbours that touch joined.

    >>> merged([(0, 2), (2, 5), (7, 9)])
    ((0, 5), (7, 9))
    """
    joined: list[Range] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def union(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Ascending ranges that hold what these hold.

    >>> union({(4, 6), (0, 3), (2, 4), (8, 9)})
    ((0, 6), (8, 9))
    """
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return tuple(found)
