"""Many attends as one table of numbers: a ring over 64 ranks has millions of them."""

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from rayfcp.program.instructions import Attend

Column = npt.NDArray[np.int64]

WHOLE, CAUSAL, FLIPPED = range(3)
"""What an attend computes of its rectangle: all cells, those of `Attend.causal`, those of `Attend.flipped`."""


class Attends(Sequence[Attend]):
    """An immutable sequence of attends, stored as a table `[attends, 6]`; equal to any sequence of the same.

    Columns: query start, query stop, slot, key start, key stop, kind (`WHOLE`, `CAUSAL` or `FLIPPED`).

    >>> attend = Attend(query=(0, 3), slot=0, key=(0, 3), causal=True)
    >>> table = Attends.of([attend])
    >>> table == (attend,), table[0].num_cells, table.num_cells
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
    def num_cells(self) -> int:
        """(query, key) cells of all attends."""
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
