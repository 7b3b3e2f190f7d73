"""Where the images of a row are among its tokens."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rayfcp.data.rows import IGNORED, BadReason, BadRowError, RowRanges
from rayfcp.data.shards import ShardReader
from rayfcp.values import Images

Integers = npt.NDArray[np.int64]
Range = tuple[int, int]

RUN_FIELDS = ("start", "num_tokens", "num_patches", "count", "stride")
"""Fields of `Images` that a shard stores."""


class MediaItem(NamedTuple):
    """An image or a video of a row: `units` encoder images of `height` x `width` patches each, whose tokens, and the
    marks that open and close it, lie in `[start, stop)`. Its bytes are the next `parts` of the row: the image's, or
    those of its frames."""

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


def clear_pieces(
    length: int, spans: Sequence[Range], *, max_seqlen: int, split: bool, whole: bool = False
) -> list[Range]:
    """Return the first piece of a row of at most `max_seqlen` tokens, or with `split` consecutive pieces, each as long
    as possible. No piece cuts any of `spans`, which are ascending and disjoint. Pieces end before a span that is longer
    than `max_seqlen`, and with `whole` before a piece that would lack an earlier span. Pieces of one token are left
    out.

    >>> clear_pieces(20, [(6, 9), (14, 16)], max_seqlen=8, split=True)
    [(0, 6), (6, 14), (14, 20)]
    >>> clear_pieces(20, [(6, 9), (14, 16)], max_seqlen=8, split=True, whole=True)
    [(0, 6), (6, 14)]
    >>> clear_pieces(20, [(6, 15)], max_seqlen=8, split=True), clear_pieces(20, [(0, 9)], max_seqlen=8, split=False)
    ([(0, 6)], [])
    """
    pieces: list[Range] = []
    start = 0
    while start < length and (split or not start) and not (whole and spans and spans[0][0] < start):
        stop = min(start + max_seqlen, length)
        stop = next((first for first, last in spans if first < stop < last), stop)
        if stop <= start:
            break
        if stop - start > 1:
            pieces.append((start, stop))
        start = stop
    return pieces


class ImageIndex:
    """Images of all rows of prepared shards, without their pixels."""

    def __init__(self, readers: Sequence[ShardReader]) -> None:
        self._readers, self._items, self._runs = readers, [], []
        for reader in readers:
            batches = reader.record_batches(("items", "runs"))
            self._items.append(pa.concat_arrays([batch.column("items") for batch in batches]))
            self._runs.append(pa.concat_arrays([batch.column("runs") for batch in batches]))

    @property
    def has_any(self) -> bool:
        return any(len(runs.values) for runs in self._runs)

    def counts(self, shard: int) -> Integers:
        """Number of images and videos of each row of a shard, `[rows]`."""
        counts: Integers = self._items[shard].value_lengths().to_numpy().astype(np.int64) // len(MediaItem._fields)
        return counts

    def images(self, shard: int, row: int, *, start: int, stop: int) -> tuple[Images, ...]:
        """Runs within tokens `[start, stop)` of the row, counted from `start`."""
        runs = self._runs[shard][row].values.to_numpy().reshape(-1, len(RUN_FIELDS))
        own = runs[(start <= runs[:, 0]) & (runs[:, 0] < stop)] - np.array([start, 0, 0, 0, 0])
        return tuple(Images(**dict(zip(RUN_FIELDS, run, strict=True))) for run in own.tolist())

    def longest(self, shard: int, row: int) -> int:
        """Tokens of the longest image or video of a row, with its marks."""
        return max(stop - start for start, stop in self._spans(shard, row))

    def num_within(self, shard: int, ranges: RowRanges, *, rows: Integers) -> Integers:
        """Number of images and videos within `ranges`, for each of `rows` that has a range, `[rows]`."""
        found = []
        for row in rows[np.isin(rows, ranges.rows)].tolist():
            own = ranges.rows == row
            first, last = ranges.starts[own], ranges.stops[own]
            found.append(
                sum(bool(((first <= start) & (stop <= last)).any()) for start, stop in self._spans(shard, row))
            )
        return np.array(found, dtype=np.int64)

    def _spans(self, shard: int, row: int) -> list[Range]:
        return [(item.start, item.stop) for item in items_of(self._items[shard][row].values.to_numpy())]

    def around_images(
        self, shard: int, ranges: RowRanges, *, rows: Integers, lengths: Any, max_seqlen: int, split: bool
    ) -> RowRanges:
        """Return `ranges`, recomputed for `rows`, which are long and have images. No image is cut, and in a
        conversation no target follows an image that its sample lacks. `lengths`: tokens of each row."""
        found: list[tuple[int, int, int]] = []
        for row in rows.tolist():
            spans = self._spans(shard, row)
            whole = split and not self._trains_all_text(shard, row, spans)
            pieces = clear_pieces(int(lengths[row]), spans, max_seqlen=max_seqlen, split=split, whole=whole)
            found += [(row, *piece) for piece in pieces]
        kept = ~np.isin(ranges.rows, rows)
        old = np.stack([ranges.rows[kept], ranges.starts[kept], ranges.stops[kept]], axis=1)
        both = np.concatenate([old, np.array(found, dtype=np.int64).reshape(-1, 3)])
        rows, starts, stops = both[np.lexsort((both[:, 1], both[:, 0]))].T
        return RowRanges(rows=rows, starts=starts, stops=stops)

    def _trains_all_text(self, shard: int, row: int, spans: Sequence[Range]) -> bool:
        """True if all text of a row enters the loss, as in documents; conversations have tokens that do not."""
        is_text = self._readers[shard].labels(row) != IGNORED
        for start, stop in spans:
            is_text[start:stop] = True
        return bool(is_text[1:].all())
