"""Blocks that lie together in a slot, as columns of numbers."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from rayfcp.program.parcels import Range
from rayfcp.program.table import Column
from rayfcp.values import Block, Mask


class BlockTable:
    """All blocks of a layout, in columns. `full[i]`: every query of block i sees its whole sequence."""

    def __init__(self, blocks: Sequence[Block], masks: Mapping[int, Mask]) -> None:
        self.sequence = np.array([block.sequence for block in blocks], np.int64)
        self.start = np.array([block.start for block in blocks], np.int64)
        self.stop = np.array([block.stop for block in blocks], np.int64)
        self.rank = np.array([block.rank for block in blocks], np.int64)
        self.full = np.array([masks[block.sequence] is Mask.FULL for block in blocks], bool)


class Placed:
    """Blocks in a slot: `blocks` in the order of the slot, columns by sequence and start.

    Block i of the columns lies at `[begin[i], end[i])`. A run is a maximal series of blocks of one sequence,
    ascending, that touch in the slot; `run[i]` is that of block i, run j lies at `[opens[j], closes[j])`.
    `first[i]` is the first block of block i's sequence, `all` the whole slot.
    """

    __slots__ = (
        "_only_run",
        "_ranges",
        "all",
        "begin",
        "blocks",
        "closes",
        "end",
        "first",
        "full",
        "num_tokens",
        "opens",
        "run",
        "sequence",
        "start",
        "stop",
    )

    def __init__(self, blocks: tuple[int, ...], table: BlockTable, *, begin: Column | None = None) -> None:
        at = np.array(blocks, np.int64)
        sizes = table.stop[at] - table.start[at]
        begin = np.cumsum(sizes) - sizes if begin is None else begin
        end = begin + sizes
        order = np.lexsort((table.start[at], table.sequence[at]))
        by_start = at[order]
        self.blocks, self._ranges = blocks, dict[int, Range]()
        self._only_run = list[tuple[int, int] | None]()
        self.begin, self.end = begin[order], end[order]
        self.num_tokens = int(end.max(initial=0))
        self.all: tuple[Range, ...] = ((0, self.num_tokens),)
        self.sequence, self.full = table.sequence[by_start], table.full[by_start]
        self.start, self.stop = table.start[by_start], table.stop[by_start]
        same = self.sequence[1:] == self.sequence[:-1]
        touch = same & (self.begin[1:] == self.end[:-1])
        self.first = firsts(same, size=len(at))
        opens = firsts(touch, size=len(at)) == np.arange(len(at))
        self.run = np.cumsum(opens) - 1
        self.opens, self.closes = self.begin[opens], self.end[np.append(opens[1:], True)[: len(at)]]

    @property
    def ranges(self) -> Mapping[int, Range]:
        """Block -> where it lies in the slot."""
        if not self._ranges:
            spans = sorted(zip(self.begin.tolist(), self.end.tolist(), strict=True))
            self._ranges |= dict(zip(self.blocks, spans, strict=True))
        return self._ranges

    @property
    def only_run(self) -> tuple[int, int] | None:
        """The sequence and the end of what is one run over the whole slot."""
        if not self._only_run:
            one = len(self.opens) == 1 and self.opens[0] == 0
            self._only_run.append((int(self.sequence[0]), int(self.stop[-1])) if one else None)
        return self._only_run[0]

    def holds(self, blocks: tuple[int, ...]) -> bool:
        return blocks == self.blocks or all(block in self.ranges for block in blocks)

    def at(self, blocks: tuple[int, ...]) -> tuple[Range, ...]:
        """Where `blocks` lie, in their order, ranges that touch as one."""
        if blocks == self.blocks:
            return self.all
        return merged([self.ranges[block] for block in blocks])


def firsts(joined: npt.NDArray[np.bool_], *, size: int) -> Column:
    """Of each of `size` items, the first of its series; item i + 1 is in the series of item i where `joined[i]`.

    >>> firsts(np.array([True, False, True]), size=4)
    array([0, 0, 2, 2])
    """
    opens = np.ones(size, bool)
    opens[1:] = ~joined
    return np.maximum.accumulate(np.where(opens, np.arange(size), 0))


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
