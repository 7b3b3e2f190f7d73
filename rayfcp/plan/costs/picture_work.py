"""What mutual pictures add to the work of a layout: cells on the rank that holds a picture, and with keys that travel
where a picture is cut."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby, product
from operator import attrgetter
from typing import NamedTuple

from rayfcp.values import Block, Mask, SequenceSpec, Windows

Range = tuple[int, int]


class Meeting(NamedTuple):
    """Queries of a run of ranks meet keys of the block with this number in one picture, beyond their mask: `cells` and
    `sides` (tokens of the longer side), in the mean over layers; of the block, layers with windows see `seen`."""

    run: int
    block: int
    cells: float
    sides: float
    seen: Range


class PictureWork(NamedTuple):
    """`own_sides` by run of ranks, and the meetings of runs with blocks of others."""

    own_sides: Mapping[int, float]
    meetings: Sequence[Meeting]


def picture_work(blocks: Sequence[Block], *, by_id: Mapping[int, SequenceSpec], heads: int) -> PictureWork:
    """The work of all pictures; blocks of ranks that share out heads (`heads` of them) count as their run's."""
    held: dict[int, list[int]] = defaultdict(list)
    for number, block in enumerate(blocks):
        if any(run.mutual for run in by_id[block.sequence].pictures):
            held[block.sequence].append(number)
    own: dict[int, float] = defaultdict(float)
    meetings: list[Meeting] = []
    for sequence, numbers in held.items():
        sight = _Sight(by_id[sequence])
        for parts in _parts(by_id[sequence], {number: blocks[number] for number in numbers}, heads=heads):
            if len({part.run for part in parts}) == 1:
                own[parts[0].run] += sight.own_sides(parts[-1].stop - parts[0].start)
                continue
            for run, joined in groupby(parts, key=attrgetter("run")):
                pieces = list(joined)
                own[run] += sight.own_sides(pieces[-1].stop - pieces[0].start)
            meetings += _meetings(parts, sight)
    return PictureWork(own, meetings)


class _Part(NamedTuple):
    """Tokens `[start, stop)` of a picture, which a run has in the block with this number."""

    run: int
    block: int
    start: int
    stop: int


def _parts(sequence: SequenceSpec, blocks: Mapping[int, Block], *, heads: int) -> Iterator[list[_Part]]:
    """Of each mutual picture, ascending, what blocks have of it."""
    numbers = sorted(blocks, key=lambda number: blocks[number].start)
    starts = [blocks[number].start for number in numbers]
    for start, stop in (span for run in sequence.mutual for span in run.ranges()):
        at = bisect_right(starts, start) - 1
        if at >= 0 and blocks[numbers[at]].stop >= stop:  # as nearly all
            yield [_Part(blocks[numbers[at]].rank // heads, numbers[at], start, stop)]
            continue
        cut = numbers[max(at, 0) : bisect_left(starts, stop)]
        parts = [
            _Part(each.rank // heads, number, max(each.start, start), min(each.stop, stop))
            for number, each in ((number, blocks[number]) for number in cut)
        ]
        if parts := [part for part in parts if part.start < part.stop]:
            yield parts


def _meetings(parts: Sequence[_Part], sight: "_Sight") -> Iterator[Meeting]:
    """Of the parts of one picture."""
    for queries, keys in product(parts, parts):
        ahead = queries.run != keys.run and queries.stop <= keys.start
        cells = sight.cells(queries[2:], keys[2:]) if ahead else 0.0
        if cells:
            sizes = queries.stop - queries.start, keys.stop - keys.start
            yield Meeting(queries.run, keys.block, cells, cells / min(sizes), keys[2:])


def seen_tokens(block: Block, sequence: SequenceSpec, *, ranges: Iterable[Range], first: int | None) -> float:
    """Of a block, in the mean over layers, the tokens that a rank sees: in pictures these `ranges`, which are apart,
    and from its `first` query behind the block what the window reaches; all tokens where that cuts nothing."""
    windows: Windows = sequence.windows or ((0, 1),)
    tokens, layers = 0, 0
    for window, count in windows:
        layers += count
        if not 0 < window < sequence.num_tokens:
            tokens += count * block.num_tokens
            continue
        since = block.stop if first is None else min(max(first - window + 1, block.start), block.stop)
        pictures = sum(max(min(high, since) - low, 0) for low, high in ranges)
        tokens += count * (block.stop - since + pictures)
    return tokens / layers


class _Sight:
    """What rows of a sequence's pictures see beyond mask and window, in the mean over layers."""

    def __init__(self, sequence: SequenceSpec) -> None:
        windows: Windows = sequence.windows or ((0, 1),)
        causal, layers = sequence.mask is Mask.CAUSAL, sum(count for _, count in windows)
        self._kinds = [(1 if causal else window or sequence.num_tokens, count / layers) for window, count in windows]
        self.own_sides = cache(self._own_sides)

    def _own_sides(self, tokens: int) -> float:
        """Half the sides of the triangles of so many tokens of a picture."""
        return sum(share * max(tokens - ahead, 0) / 2 for ahead, share in self._kinds)

    def cells(self, queries: Range, keys: Range) -> float:
        """Of a part of a picture with a later one."""
        cells, most = 0.0, keys[1] - keys[0]
        for ahead, share in self._kinds:
            first, last = (keys[1] - ahead - row + 1 for row in queries)
            cells += share * (_ramp(first, most) - _ramp(last, most))
        return cells


def _ramp(rows: int, most: int) -> int:
    """The sum of min(row, most) over rows from 0 on, as many as `rows`.

    >>> [_ramp(rows, 2) for rows in (-1, 0, 1, 2, 3, 4)]
    [0, 0, 0, 1, 3, 5]
    """
    if rows <= 0:
        return 0
    rising = min(rows - 1, most)
    return rising * (rising + 1) // 2 + (rows - 1 - rising) * most
