"""Where the images of a row are among its tokens."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rayfcp.data.rows import BadReason, BadRowError, RowRanges
from rayfcp.data.shards import ShardReader
from rayfcp.values import Images

Integers = npt.NDArray[np.int64]
Range = tuple[int, int]

RUN_FIELDS = ("start", "num_tokens", "num_patches", "count", "stride")
"""Fields of `Images` that a shard stores."""


class MediaItem(NamedTuple):
    """An image or a video of a row: `units` encoder images of `height` x `width` patches each, whose tokens lie in
    `[start, stop)`. Its bytes are the next `parts` of the row: the image's, or those of its frames."""

    is_video: int
    units: int
    height: int
    width: int
    start: int
    stop: int
    parts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaGrid:
    """An image or a video before its tokens have a place: `units` encoder images of `unit_tokens` tokens each."""

    is_video: bool
    units: int
    height: int
    width: int
    unit_tokens: int
    parts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowImages:
    """The images of a row: int64 `items` `[items, 7]` (`MediaItem`) and `runs` `[runs, 5]` (`RUN_FIELDS`), and `parts`,
    the files that the items are made of."""

    items: Integers
    runs: Integers
    parts: tuple[bytes, ...]


def place(
    tokens: npt.NDArray[np.int32], grids: Sequence[MediaGrid], *, marks: Iterable[int], apart: bool
) -> list[Integers]:
    """First token of each unit of each item: the marks are assigned to the units in order, one run of marks each.
    `apart`: units have other tokens between them.

    Raises:
        BadRowError: More marks or fewer than the items need, or other tokens among those of one image.
    """
    places = np.flatnonzero(np.isin(tokens, list(marks)))
    needed = sum(grid.units * grid.unit_tokens for grid in grids)
    if places.size != needed:
        raise BadRowError(BadReason.MARKERS_MISMATCH, f"{places.size} tokens of images, {needed} are needed")
    found, taken, last_stop = [], 0, -1
    for grid in grids:
        own = places[taken : taken + grid.units * grid.unit_tokens].reshape(grid.units, grid.unit_tokens)
        taken += own.size
        starts = own[:, 0].astype(np.int64)
        stops = own[:, -1] + 1
        before = np.concatenate([[last_stop], stops[:-1]])
        if (stops - starts != grid.unit_tokens).any() or (apart and (starts <= before).any()):
            raise BadRowError(BadReason.MARKERS_MISMATCH, "tokens of images that do not lie apart")
        last_stop = int(stops[-1])
        found.append(starts)
    return found


def runs_of(starts: Integers, *, num_tokens: int, num_patches: int) -> Iterator[Images]:
    """Equal images that begin at `starts`, ascending, as runs of one stride each.

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
        count = stop - at
        start, stride = int(starts[at]), stride if count > 1 else 0
        yield Images(start=start, num_tokens=num_tokens, num_patches=num_patches, count=count, stride=stride)
        at = stop


def items_of(numbers: Integers) -> list[MediaItem]:
    """Items from their stored integers."""
    return [MediaItem(*map(int, item)) for item in numbers.reshape(-1, len(MediaItem._fields))]


def clear_pieces(length: int, spans: Sequence[Range], *, max_seqlen: int, split: bool) -> tuple[list[Range], int]:
    """First piece of a row of at most `max_seqlen` tokens, or (`split`) consecutive ones, each as long as possible,
    that cut none of `spans`, ascending and disjoint; and how many tokens they cover. Pieces of one token are left out.

    >>> clear_pieces(20, [(6, 9), (14, 16)], max_seqlen=8, split=True)
    ([(0, 6), (6, 14), (14, 20)], 20)
    >>> clear_pieces(20, [(6, 15)], max_seqlen=8, split=True), clear_pieces(20, [(0, 9)], max_seqlen=8, split=False)
    (([(0, 6)], 6), ([], 0))
    """
    pieces: list[Range] = []
    start = 0
    while start < length and (split or not start):
        stop = min(start + max_seqlen, length)
        stop = next((first for first, last in spans if first < stop < last), stop)
        if stop <= start:
            break
        if stop - start > 1:
            pieces.append((start, stop))
        start = stop
    return pieces, start


class ImageIndex:
    """Images of all rows of prepared shards, without their pixels."""

    def __init__(self, readers: Sequence[ShardReader]) -> None:
        self._items, self._runs = [], []
        for reader in readers:
            batches = reader.record_batches(("items", "runs"))
            self._items.append(pa.concat_arrays([batch.column("items") for batch in batches]))
            self._runs.append(pa.concat_arrays([batch.column("runs") for batch in batches]))

    @property
    def has_any(self) -> bool:
        return any(len(runs.values) for runs in self._runs)

    def images(self, shard: int, row: int, *, start: int, stop: int) -> tuple[Images, ...]:
        """Runs within tokens `[start, stop)` of the row, counted from `start`."""
        runs = self._runs[shard][row].values.to_numpy().reshape(-1, len(RUN_FIELDS))
        own = runs[(start <= runs[:, 0]) & (runs[:, 0] < stop)] - np.array([start, 0, 0, 0, 0])
        return tuple(Images(**dict(zip(RUN_FIELDS, run, strict=True))) for run in own.tolist())

    def around_images(
        self, shard: int, ranges: RowRanges, *, long_rows: Integers, lengths: Any, max_seqlen: int, split: bool
    ) -> tuple[RowRanges, int]:
        """Return `ranges`, recomputed for those of `long_rows` that have images so that no image or video is cut, and
        the number of tokens lost because an item is longer than a sample may be: the item and the rest of its row, or
        the whole row if nothing of it is left. `lengths`: tokens by row."""
        found: list[tuple[int, int, int]] = []
        again, num_lost = [], 0
        for row in long_rows.tolist():
            spans = [(item.start, item.stop) for item in items_of(self._items[shard][row].values.to_numpy())]
            if spans:
                length = int(lengths[row])
                pieces, covered = clear_pieces(length, spans, max_seqlen=max_seqlen, split=split)
                found += [(row, *piece) for piece in pieces]
                again.append(row)
                num_lost += length - covered if split else 0 if pieces else length
        kept = ~np.isin(ranges.rows, again)
        old = np.stack([ranges.rows[kept], ranges.starts[kept], ranges.stops[kept]], axis=1)
        both = np.concatenate([old, np.array(found, dtype=np.int64).reshape(-1, 3)])
        rows, starts, stops = both[np.lexsort((both[:, 1], both[:, 0]))].T
        return RowRanges(rows=rows, starts=starts, stops=stops), num_lost
