"""Where the pictures of a row are among its tokens."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from rayfcp.data.rows import BadReason, BadRowError
from rayfcp.values import Pictures

Integers = npt.NDArray[np.int64]


class Item(NamedTuple):
    """An image or a video of a row: `units` pictures, as the encoder sees them, of `height` x `width` patches each,
    whose tokens lie in `[start, stop)`. Its bytes are the next `parts` of the row: of the image, or of its frames."""

    is_video: int
    units: int
    height: int
    width: int
    start: int
    stop: int
    parts: int


RUN_FIELDS = ("start", "num_tokens", "num_patches", "count", "stride")
"""What a shard keeps of `Pictures`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """An image or a video before its tokens have a place; `unit_tokens` for each of its `units`."""

    is_video: bool
    units: int
    height: int
    width: int
    unit_tokens: int
    parts: int


def place(tokens: npt.NDArray[np.int32], grids: Sequence[Grid], *, marks: Iterable[int], apart: bool) -> list[Integers]:
    """The first token of each unit of each item, in order: the marks are shared out to them, one run of marks each.
    `apart`: units have other tokens between them.

    Raises:
        BadRowError: more marks or fewer than the items need, or other tokens among those of one picture.
    """
    places = np.flatnonzero(np.isin(tokens, list(marks)))
    needed = sum(grid.units * grid.unit_tokens for grid in grids)
    if places.size != needed:
        raise BadRowError(BadReason.MARKERS_MISMATCH, f"{places.size} tokens of pictures, {needed} are needed")
    found, taken, behind = [], 0, -1
    for grid in grids:
        own = places[taken : taken + grid.units * grid.unit_tokens].reshape(grid.units, grid.unit_tokens)
        taken += own.size
        starts = own[:, 0].astype(np.int64)
        stops = own[:, -1] + 1
        before = np.concatenate([[behind], stops[:-1]])
        if (stops - starts != grid.unit_tokens).any() or (apart and (starts <= before).any()):
            raise BadRowError(BadReason.MARKERS_MISMATCH, "tokens of pictures that do not lie apart")
        behind = int(stops[-1])
        found.append(starts)
    return found


def runs_of(starts: Integers, *, num_tokens: int, num_patches: int) -> Iterator[Pictures]:
    """Equal pictures that begin at `starts`, ascending, as runs of one stride each.

    >>> runs = runs_of(np.array([2, 9, 16, 24]), num_tokens=4, num_patches=16)
    >>> [(run.start, run.count, run.stride) for run in runs]
    [(2, 3, 7), (24, 1, 0)]
    """
    at = 0
    while at < starts.size:
        stop = at + 1
        stride = int(starts[stop] - starts[at]) if stop < starts.size else 0
        while stop < starts.size and starts[stop] - starts[stop - 1] == stride:
            stop += 1
        yield Pictures(
            start=int(starts[at]),
            num_tokens=num_tokens,
            num_patches=num_patches,
            count=stop - at,
            stride=stride if stop - at > 1 else 0,
        )
        at = stop


def items_of(numbers: Integers) -> list[Item]:
    """From the numbers of a row."""
    return [Item(*map(int, item)) for item in numbers.reshape(-1, len(Item._fields))]


def pictures_of(numbers: Integers, *, start: int, stop: int) -> tuple[Pictures, ...]:
    """Of the runs of a row, from their numbers, those within tokens `[start, stop)`, counted from `start`."""
    runs = numbers.reshape(-1, len(RUN_FIELDS))
    own = runs[(start <= runs[:, 0]) & (runs[:, 0] < stop)]
    own = own - np.array([start, 0, 0, 0, 0])
    return tuple(
        Pictures(start=first, num_tokens=tokens, num_patches=patches, count=count, stride=stride)
        for first, tokens, patches, count, stride in own.tolist()
    )


@dataclass(frozen=True, slots=True)
class Ragged:
    """Numbers of rows: row r has `values[offsets[r]:offsets[r + 1]]`."""

    offsets: Integers
    values: Integers

    @classmethod
    def of(cls, columns: Sequence[Any]) -> Self:
        """Of list columns, one after the other."""
        counts = [np.diff(column.offsets.to_numpy()) for column in columns]
        values = [
            column.values.to_numpy()[column.offsets[0].as_py() : column.offsets[-1].as_py()] for column in columns
        ]
        return cls(np.concatenate([[0], *counts]).cumsum().astype(np.int64), np.concatenate(values).astype(np.int64))

    def __getitem__(self, row: int) -> Integers:
        return self.values[self.offsets[row] : self.offsets[row + 1]]
