"""Attention work of a layout: pairs that its ranks compute with their own keys, and with those that transfers bring."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np

from rayfcp.values import LayerKind, LayerKinds, Layout, SequenceSpec
from rayfcp.values.arrays import Floats, Ints
from rayfcp.values.sequence import POSITIONS

RING_TOKENS = 8192
"""Tokens of a sequence that a rank of a ring is taken to hold, for how much of a window reaches other ranks."""


def visible_ring_share(kinds: LayerKinds, ranks: Floats) -> Floats:
    """Share of the traffic of rings of `ranks` ranks that layers of these kinds need, in the mean.

    Where each rank has two slices of a sequence, `RING_TOKENS` together, it gets of each slice's predecessors what the
    window reaches, instead of the slices of all others. That is close where rings hold about one sequence that long;
    what a layout's transfers carry is counted instead (`layout_work`), and so is what programs send.

    >>> visible_ring_share(((LayerKind(), 1), (LayerKind(window=1024), 1)), np.array([1.0, 2.0, 5.0]))
    array([1.     , 0.625  , 0.53125])
    """
    if not kinds:
        return np.ones_like(ranks)
    share = np.zeros_like(ranks)
    for kind, layers in kinds:
        reached = 2 * (kind.reach or POSITIONS) / (np.maximum(ranks - 1, 1) * RING_TOKENS)
        share += layers * np.where(ranks <= 1, 1.0, np.minimum(reached, 1.0))
    return share / sum(layers for _, layers in kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutWork:
    """Pairs, and `sides`: tokens of the longer side summed over attends, with which half tokens are counted (a causal
    square counts half). By run (a rank, where `heads` is 1), for its own keys, and by transfer: `source`, `target`, its
    `round` in the layout, and the tokens of its blocks; all in pairs and tokens of all heads, in the mean over layers.
    `tokens`: by rank."""

    own_pairs: Floats
    own_sides: Floats
    tokens: Floats
    source: Ints
    target: Ints
    round: Ints
    moved_tokens: Floats
    pairs: Floats
    sides: Floats


def layout_work(layout: Layout, *, by_id: Mapping[int, SequenceSpec], num_ranks: int) -> LayoutWork:
    """The work of every run of ranks and every transfer.

    A run's blocks of a sequence are queries. Its own keys lie as they do: one causal square. Keys of one transfer lie
    together; neighbouring query blocks that attend to the same ones of them are one attend. Only what is
    visible counts.
    """
    num_runs = num_ranks // layout.heads
    held = _Held(layout, by_id=by_id, num_runs=num_runs)
    transfers = list(chain.from_iterable(step.transfers for step in layout.rounds))
    counts = np.fromiter((len(each.blocks) for each in transfers), np.int64, len(transfers))
    carried = np.fromiter(chain.from_iterable(each.blocks for each in transfers), np.int64, int(counts.sum()))
    owner = np.repeat(np.arange(len(transfers)), counts)
    target = np.fromiter((each.target for each in transfers), np.int64, len(transfers))
    order = np.lexsort((held.start[carried], held.sequence[carried], owner))
    carried, owner = carried[order], owner[order]

    keys, queries = held.size[carried], held.later_tokens(target[owner], carried)
    sides = _sides(queries, keys, group=owner * (held.sequence.max(initial=0) + 1) + held.sequence[carried])
    pairs, moved = keys * queries, keys
    runs, tokens = held.totals()
    own_pairs = _sums(runs, tokens * (tokens + 1) / 2, num_runs)
    if kinds := tuple(each for each in next(iter(by_id.values())).layer_kinds if each[1]):
        pairs, moved = held.visible(target[owner], carried, kinds=kinds)
        sides *= np.divide(moved, keys)
        of_blocks = [by_id[block.sequence].block_pairs(block.start, block.stop) for block in layout.blocks]
        own_pairs = _sums(held.run, np.array(of_blocks), num_runs) - _sums(target[owner], pairs, num_runs)
    return LayoutWork(
        own_pairs=own_pairs,
        own_sides=_sums(runs, tokens / 2, num_runs),
        tokens=_sums(np.array([block.rank for block in layout.blocks], np.int64), held.size, num_ranks),
        source=np.fromiter((each.source for each in transfers), np.int64, len(transfers)),
        target=target,
        round=np.repeat(np.arange(len(layout.rounds)), [len(step.transfers) for step in layout.rounds]),
        moved_tokens=_sums(owner, moved, len(transfers)),
        pairs=_sums(owner, pairs, len(transfers)),
        sides=_sums(owner, sides, len(transfers)),
    )


class _Held:
    """Blocks as columns, sorted so that the blocks of a sequence on a run from some position on are a range."""

    def __init__(self, layout: Layout, *, by_id: Mapping[int, SequenceSpec], num_runs: int) -> None:
        blocks = layout.blocks
        numbers = {sequence: number for number, sequence in enumerate({block.sequence: None for block in blocks})}
        self._lengths = np.array([by_id[each].num_tokens for each in numbers], np.int64)
        self._num_runs = num_runs
        self.sequence = np.array([numbers[block.sequence] for block in blocks], np.int64)
        self.run = np.array([block.rank for block in blocks], np.int64) // layout.heads
        self.start = np.array([block.start for block in blocks], np.int64)
        self.stop = np.array([block.stop for block in blocks], np.int64)
        self.size = (self.stop - self.start).astype(np.float64)
        self._end = int(self.start.max(initial=0)) + 1
        keys = self._keys(self.sequence, self.run, self.start)
        self._order = np.argsort(keys, kind="stable")
        self._sorted = keys[self._order]
        self._before = np.concatenate([[0.0], np.cumsum(self.size[self._order])])

    def later_tokens(self, run: Ints, block: Ints) -> Floats:
        """Tokens of `run` that attend to all of `block`: the later ones of its sequence."""
        first, stop = self._later(run, block, since=self.start[block])
        return np.asarray(self._before[stop] - self._before[first])

    def visible(self, run: Ints, block: Ints, *, kinds: LayerKinds) -> tuple[Floats, Floats]:
        """In the mean over layers: pairs that `run` computes with `block`, and tokens of the block that travel there,
        those that its queries see; all tokens in layers whose window does not cut the sequence."""
        start, stop = self.start[block], self.stop[block]
        first, behind = self._later(run, block, since=np.minimum(stop, self._end))
        entry = np.repeat(np.arange(len(block)), behind - first)
        queries = self._order[first[entry] + np.arange(len(entry)) - np.searchsorted(entry, entry)]
        nearest = np.full(len(block), np.iinfo(np.int64).max // 2)
        np.minimum.at(nearest, entry, self.start[queries])
        pairs, tokens = np.zeros(len(block)), np.zeros(len(block))
        for kind, layers in kinds:
            computed = _rectangle((self.start[queries], self.stop[queries]), (start[entry], stop[entry]), kind)
            pairs += layers * np.bincount(entry, computed, minlength=len(block))
            cuts = kind.hides(self._lengths[self.sequence[block]])
            reached = np.maximum(stop - np.maximum(start, kind.first_visible(nearest)), 0)
            tokens += layers * np.where(cuts, reached, stop - start)
        num_layers = sum(layers for _, layers in kinds)
        return pairs / num_layers, tokens / num_layers

    def totals(self) -> tuple[Ints, Floats]:
        """Run and tokens, of each sequence on each of its runs."""
        joined, at = np.unique(self.sequence * self._num_runs + self.run, return_inverse=True)
        return joined % self._num_runs, _sums(at, self.size, len(joined))

    def _later(self, run: Ints, block: Ints, *, since: Ints) -> tuple[Ints, Ints]:
        """The range, in sorted order, of the run's blocks of the same sequence that start at `since` or later."""
        sequence = self.sequence[block]
        first = np.searchsorted(self._sorted, self._keys(sequence, run, since))
        return first, np.searchsorted(self._sorted, self._keys(sequence, run, np.full(len(block), self._end)))

    def _keys(self, sequence: Ints, run: Ints, start: Ints) -> Ints:
        return np.asarray((sequence * self._num_runs + run) * (self._end + 1) + start)


def _rectangle(queries: tuple[Ints, Ints], keys: tuple[Ints, Ints], kind: LayerKind) -> Ints:
    """Visible pairs of queries and keys `[start, stop)`."""
    until = kind.visible_pairs(queries[1], keys[1]) - kind.visible_pairs(queries[1], keys[0])
    return until - kind.visible_pairs(queries[0], keys[1]) + kind.visible_pairs(queries[0], keys[0])


def _sides(queries: Floats, keys: Floats, *, group: Ints) -> Floats:
    """For each key block, the longer side of the attend of those queries that see it and nothing later of its group;
    `group` is sorted."""
    if not len(group):
        return np.zeros(0)
    last = np.append(group[1:] != group[:-1], True)
    own = queries - np.where(last, 0.0, np.append(queries[1:], 0.0))
    seen = np.cumsum(keys)
    first = np.append(0, np.flatnonzero(last)[:-1] + 1)
    before = np.repeat(seen[first] - keys[first], np.diff(np.append(first, len(group))))
    return np.where(own > 0, np.maximum(own, seen - before), 0.0)


def _sums(at: Ints, values: Floats, count: int) -> Floats:
    return np.bincount(at, values, minlength=count).astype(np.float64)
