"""What the ranks of a layout attend to: with their own keys, and with those that each transfer brings."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from rayfcp.plan.costs.picture_work import picture_work, seen_tokens
from rayfcp.plan.costs.window_work import seen_through
from rayfcp.values import Layout, Mask, SequenceSpec, Windows

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
