"""What layers with windows see of blocks that travel: cells, and tokens of which somebody sees something.

What mutual pictures add to the work of a layout: cells on the rank that holds a picture, and with keys that travel
where a picture is cut.

What the ranks of a layout attend to: with their own keys, and with those that each transfer brings.

The rounds of a layout as columns, and what a pass over them moves and computes.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, groupby, product
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rayfcp.values import Block, Layout, Mask, SequenceSpec, Windows
from rayfcp.values.arrays import Floats, Ints

RING_TOKENS = 8192
"""Tokens of a sequence that a rank of a ring is taken to hold."""

NOWHERE = 2**40
"""Beyond any position."""


def seen_through(
    windows: Windows, keys: tuple[Ints, Ints], *, length: Ints, queries: tuple[Ints, Ints], pair: Ints
) -> tuple[Floats, Floats]:
    """Of each block of keys, in the mean over layers: the cells that later queries of one rank compute with it, and how
    many of its tokens travel there: those that these see, all in layers whose window does not cut its sequence, of
    `length` tokens.

    `keys`: start and stop of blocks; `queries`: of runs of queries that come after the block of number `pair`.
    """
    start, stop = keys
    layers = sum(count for _, count in windows)
    cells, tokens = np.zeros(len(start)), np.zeros(len(start))
    for window, count in windows:
        reach = window or NOWHERE
        low, high = start[pair], stop[pair]
        here = _cells_before(queries[1], low, high, reach) - _cells_before(queries[0], low, high, reach)
        cells += count * np.bincount(pair, here, minlength=len(start))
        first = np.full(len(start), NOWHERE)
        np.minimum.at(first, pair, queries[0])
        seen = np.maximum(stop - np.maximum(start, first - reach + 1), 0)
        tokens += count * np.where(reach < length, seen, stop - start)
    return cells / layers, tokens / layers


def seen_in_rings(windows: Windows, ranks: Floats) -> Floats:
    """Of what would travel in rings of so many ranks without windows, what does, in the mean over layers.

    Where each rank has two slices of a sequence, `RING_TOKENS` together, it gets of each slice's predecessors what the
    window reaches, instead of the slices of all others. That is close where rings hold about one sequence that long;
    what a layout's transfers carry is counted instead (`seen_through`), and so is what programs send.

    >>> seen_in_rings(((0, 1), (1024, 1)), np.array([1.0, 2.0, 5.0]))
    array([1.     , 0.625  , 0.53125])
    """
    found = np.zeros_like(ranks)
    for window, count in windows:
        reached = 2 * window / (np.maximum(ranks - 1, 1) * RING_TOKENS)
        found += count * np.where((window == 0) | (ranks <= 1), 1.0, np.minimum(reached, 1.0))
    return found / sum(count for _, count in windows) if windows else np.ones_like(ranks)


def _cells_before(row: Ints, low: Ints, high: Ints, reach: int) -> Floats:
    """Cells of the queries from `high` to `row` with keys `[low, high)` where each sees `reach` keys, itself included.

    The first queries see all of these, later ones a key less each.
    """
    all_of = np.clip(np.minimum(row, low + reach) - high, 0, None)
    begin = np.maximum(low + reach, high)
    fewer = np.clip(np.minimum(row, high + reach - 1) - begin, 0, None).astype(np.float64)
    most = high - (begin - reach + 1)
    return np.asarray(all_of * (high - low) + fewer * most - fewer * (fewer - 1) / 2, np.float64)


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


Loads = npt.NDArray[np.float64]
Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutWork:
    """Cells, and `sides`: tokens of the longer side summed over attends, which half tokens are counted with (a causal
    square counts half). By run (a rank, where `heads` is 1), for its own keys, and by transfer: `source`, `target`, its
    `round` in the layout, and the tokens of its blocks; all in cells and tokens of all heads. `tokens`: by rank."""

    own_cells: Loads
    own_sides: Loads
    tokens: Loads
    source: Index
    target: Index
    round: Index
    moved_tokens: Loads
    cells: Loads
    sides: Loads


def work_of(layout: Layout, *, by_id: Mapping[int, SequenceSpec], num_ranks: int) -> LayoutWork:
    """The work of every run of ranks and transfer.

    A run's blocks of a sequence are queries. Its own keys lie as they do: one causal square. Keys of one
    transfer lie together; neighbouring query blocks that attend to the same ones of them are one attend. Where layers
    have windows, cells and moved tokens are the mean over layers, of what is seen; of causal sequences, as trained on.
    Mutual pictures add cells and small pieces (`picture_work`).
    """
    numbers = {sequence: number for number, sequence in enumerate({block.sequence: None for block in layout.blocks})}
    full = np.array([by_id[sequence].mask is Mask.FULL for sequence in numbers])
    num_runs = num_ranks // layout.heads
    held = _Held(layout, numbers=numbers, num_runs=num_runs)
    transfers = list(chain.from_iterable(step.transfers for step in layout.rounds))
    sizes = np.array([len(step.transfers) for step in layout.rounds], np.int64)
    counts = np.fromiter((len(each.blocks) for each in transfers), np.int64, len(transfers))
    carried = np.fromiter(chain.from_iterable(each.blocks for each in transfers), np.int64, int(counts.sum()))
    owner = np.repeat(np.arange(len(transfers)), counts)
    target = np.fromiter((each.target for each in transfers), np.int64, len(transfers))
    order = np.lexsort((held.start[carried], held.sequence[carried], owner))
    carried, owner = carried[order], owner[order]
    keys, queries = held.size[carried], held.queries(target[owner], carried, full=full)
    sides = _sides(queries, keys, group=owner * max(len(numbers), 1) + held.sequence[carried])
    by_run, by_sequence, alone = held.totals()
    square = full[by_sequence]
    cells, moved = keys * queries, keys.copy()
    own_cells = _sums(by_run, np.where(square, alone**2, alone * (alone + 1) / 2), num_runs)
    own_sides = _sums(by_run, np.where(square, alone, alone / 2), num_runs)
    windows, mutual = next(iter(by_id.values())).windows, any(by_id[sequence].mutual for sequence in numbers)
    if windows:
        cells, moved = held.seen(target[owner], carried, windows=windows, by_id=by_id)
        sides *= np.divide(moved, keys)
    if mutual:
        _add_pictures(layout, held, by_id, (target[owner], carried), (own_sides, moved, cells, sides))
    if windows or mutual:
        own_cells = held.cells(by_id) - _sums(target[owner], cells, num_runs)
    return LayoutWork(
        own_cells=own_cells,
        own_sides=own_sides,
        tokens=_sums(np.array([block.rank for block in layout.blocks], np.int64), held.size, num_ranks),
        source=np.fromiter((each.source for each in transfers), np.int64, len(transfers)),
        target=target,
        round=np.repeat(np.arange(len(layout.rounds)), sizes),
        moved_tokens=_sums(owner, moved, len(transfers)),
        cells=_sums(owner, cells, len(transfers)),
        sides=_sums(owner, sides, len(transfers)),
    )


def _add_pictures(
    layout: Layout,
    held: "_Held",
    by_id: Mapping[int, SequenceSpec],
    carried: tuple[Index, Index],
    columns: tuple[Loads, Loads, Loads, Loads],
) -> None:
    """What mutual pictures add to `columns`: own sides of runs, then tokens, cells and sides of what is `carried`, by
    target and block. A block comes to a run once."""
    work = picture_work(layout.blocks, by_id=by_id, heads=layout.heads)
    own_sides, moved, cells, sides = columns
    for run, added in work.own_sides.items():
        own_sides[run] += added
    if not (work.meetings and len(carried[0])):
        return
    count = len(layout.blocks)
    keys, wanted = carried[0] * count + carried[1], np.array([each.run * count + each.block for each in work.meetings])
    order = np.argsort(keys, kind="stable")
    found = order[np.minimum(np.searchsorted(keys, wanted, sorter=order), len(keys) - 1)]
    seen: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for each, at in zip(work.meetings, found.tolist(), strict=True):
        if (carried[0][at], carried[1][at]) == (each.run, each.block):
            cells[at] += each.cells
            sides[at] += each.sides
            seen[at].add(each.seen)
    for at, ranges in seen.items():
        run, block = int(carried[0][at]), layout.blocks[int(carried[1][at])]
        first = held.first_behind(run, int(carried[1][at]))
        moved[at] = seen_tokens(block, by_id[block.sequence], ranges=ranges, first=first)


class _Held:
    """Blocks as columns, and how many tokens of a sequence a run holds from some place on."""

    def __init__(self, layout: Layout, *, numbers: Mapping[int, int], num_runs: int) -> None:
        self._blocks = blocks = layout.blocks
        self._numbers = numbers
        self.sequence = np.array([numbers[block.sequence] for block in blocks], np.int64)
        self.run = np.array([block.rank for block in blocks], np.int64) // layout.heads
        self.start = np.array([block.start for block in blocks], np.int64)
        self.size = np.array([block.num_tokens for block in blocks], np.float64)
        self._reach = int(self.start.max(initial=0)) + 1
        self._num_runs = num_runs
        keys = self._keys(self.sequence, self.run, self.start)
        self._order = order = np.argsort(keys, kind="stable")
        self._sorted = keys[order]
        self._before = np.concatenate([[0.0], np.cumsum(self.size[order])])

    def queries(self, run: Index, block: Index, *, full: npt.NDArray[np.bool_]) -> Loads:
        """Tokens of `run` that attend to `block`: the later ones of its sequence, under a full mask all."""
        sequence = self.sequence[block]
        since = np.where(full[sequence], 0, self.start[block])
        first = np.searchsorted(self._sorted, self._keys(sequence, run, since))
        stop = np.searchsorted(self._sorted, self._keys(sequence, run, np.full(len(block), self._reach)))
        return np.asarray(self._before[stop] - self._before[first])

    def seen(
        self, run: Index, block: Index, *, windows: Windows, by_id: Mapping[int, SequenceSpec]
    ) -> tuple[Loads, Loads]:
        """Cells of what `run` sees of `block`, and its tokens that travel there, in the mean over layers."""
        lengths = np.array([by_id[each].num_tokens for each in self._numbers], np.int64)
        sequence, stop = self.sequence[block], self.start[block] + self.size[block].astype(np.int64)
        first = np.searchsorted(self._sorted, self._keys(sequence, run, np.minimum(stop, self._reach)))
        behind = np.searchsorted(self._sorted, self._keys(sequence, run, np.full(len(block), self._reach)))
        pair = np.repeat(np.arange(len(block)), behind - first)
        at = self._order[first[pair] + np.arange(len(pair)) - np.searchsorted(pair, pair)]
        queries = (self.start[at], self.start[at] + self.size[at].astype(np.int64))
        return seen_through(windows, (self.start[block], stop), length=lengths[sequence], queries=queries, pair=pair)

    def cells(self, by_id: Mapping[int, SequenceSpec]) -> Loads:
        """Of each run's queries with all keys, in the mean over layers."""
        of_blocks = [by_id[block.sequence].block_cells(block.start, block.stop) for block in self._blocks]
        return _sums(self.run, np.array(of_blocks), self._num_runs)

    def first_behind(self, run: int, block: int) -> int | None:
        """Where the first of a run's blocks of the same sequence begins that come after this one."""
        sequence = int(self.sequence[block])
        keys = self._keys(self.sequence[block : block + 1], np.array([run]), self.start[block : block + 1] + 1)
        at = int(np.searchsorted(self._sorted, keys)[0])
        number = int(self._order[at]) if at < len(self._order) else block
        later = number != block and (int(self.sequence[number]), int(self.run[number])) == (sequence, run)
        return int(self.start[number]) if later else None

    def totals(self) -> tuple[Index, Index, Loads]:
        """Run, sequence and tokens, of each sequence on each of its runs."""
        pairs, at = np.unique(self.sequence * self._num_runs + self.run, return_inverse=True)
        return pairs % self._num_runs, pairs // self._num_runs, _sums(at, self.size, len(pairs))

    def _keys(self, sequence: Index, run: Index, start: Index) -> Index:
        return np.asarray((sequence * self._num_runs + run) * (self._reach + 1) + start)


def _sides(queries: Loads, keys: Loads, *, group: Index) -> Loads:
    """Of each key block: the attend of those queries that see it and nothing later of its group, `group` sorted."""
    if not len(group):
        return np.zeros(0)
    last = np.append(group[1:] != group[:-1], True)
    here = queries - np.where(last, 0.0, np.append(queries[1:], 0.0))
    seen = np.cumsum(keys)
    first = np.append(0, np.flatnonzero(last)[:-1] + 1)
    before = np.repeat(seen[first] - keys[first], np.diff(np.append(first, len(group))))
    return np.where(here > 0, np.maximum(here, seen - before), 0.0)


def _sums(at: Index, values: Loads, count: int) -> Loads:
    return np.bincount(at, values, minlength=count).astype(np.float64)


class Rounds(NamedTuple):
    """`work_s[run, phase]`: attention of all passes. Round r of the layout, which flies in phase `stage[r]`, has the
    transfers `bounds[r]` to `bounds[r + 1]`; `moved_s` and, of a transfer, `latency_s`: of all passes; `across`:
    whether each goes between nodes (1) or stays inside one (0). `exchange_s[run]`: exchanges of all passes among the
    ranks of a run, of which there are `heads`."""

    work_s: Loads
    stage: Index
    bounds: Index
    source: Index
    target: Index
    across: Index
    moved_s: Loads
    latency_s: float
    exchange_s: Loads
    heads: int
    overlap: float


class Pass(NamedTuple):
    """Shares of attention, of what a ring moves, and of latencies and exchanges of heads, in one pass; `hold`: rounds
    from a transfer to the one in which its gradients go home."""

    attention: float
    keys: float
    gradients: float
    latencies: float
    hold: int
