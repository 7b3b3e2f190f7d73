"""Layouts as layers with a window need them: only keys and values that some query sees travel or are kept.

Blocks are cut where what later queries see of them begins or ends. Sequences that the window does not cut stay as they
are. Blocks of others go straight from their owner to the ranks that see them, in the round in which they came without a
window: passed on from rank to rank, what few ranks see would travel past many. Rounds without transfers are left out.

In layers with a window, query q attends to keys (q - window, q]. Over the keys of a piece both ends of that range are
fixed or move with the query. Where only the upper one moves, queries see a rectangle and a causal square, where only
the lower one does, a flipped causal square and a rectangle. Where both do they see a parallelogram, cut into runs of as
many queries as a query sees keys: in each the flipped square of its first keys, and the causal square of those that its
later queries see beyond.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from rayfcp.program.instructions import CAUSAL, FLIPPED, WHOLE, Column, Range, union
from rayfcp.values import Block, LayerKind, Layout, Round, Transfer
from rayfcp.values.arrays import Ints, expanded

Units = Mapping[int, int]
"""The unit of each rank, as transfers number them: the ranks that attend together to keys that lie together."""


def windowed(
    layouts: Sequence[Layout], *, kind: LayerKind, uncut: Collection[int], units: Sequence[Units]
) -> tuple[Layout, ...]:
    """The layouts of all microbatches in layers of a kind; `units[m]` of microbatch m. `uncut`: sequences of which the
    kind hides nothing.

    Invariant: ranks hold the same tokens in the same order, and all keys of other ranks that a query sees still come to
    its rank, or lie in its context.
    """
    cuts = _cuts(layouts, kind, uncut=uncut)
    return tuple(
        _Cut(layout, cuts, kind=kind, uncut=uncut, units=unit).layout()
        for layout, unit in zip(layouts, units, strict=True)
    )


def _cuts(layouts: Sequence[Layout], kind: LayerKind, *, uncut: Collection[int]) -> dict[int, list[int]]:
    """The positions of each sequence at which what a block sees begins or ends, ascending."""
    found: dict[int, set[int]] = defaultdict(set)
    for layout in layouts:
        for block in layout.blocks:
            if block.sequence not in uncut:
                found[block.sequence].update(_seen(block, kind))
    return {sequence: sorted(places) for sequence, places in found.items()}


def _seen(block: Block, kind: LayerKind) -> Range:
    """The keys that the queries of a block see; positions below 0 do not exist."""
    return kind.first_visible(block.start), block.stop


def _pieces(block: Block, places: Sequence[int]) -> list[Block]:
    """The block, cut at the places inside it."""
    within = places[bisect_right(places, block.start) : bisect_left(places, block.stop)]
    if not within:
        return [block]
    return [replace(block, start=start, stop=stop) for start, stop in pairwise((block.start, *within, block.stop))]


class _Cut:
    """A layout with its blocks cut; `parts[b]` are the pieces of block b, own or of context. `seen[u, s]`: the keys of
    sequence s that queries of unit u see, disjoint ranges, ascending."""

    def __init__(
        self,
        layout: Layout,
        cuts: Mapping[int, Sequence[int]],
        *,
        kind: LayerKind,
        uncut: Collection[int],
        units: Units,
    ) -> None:
        self._layout, self._uncut, self._units = layout, uncut, units
        self.blocks: list[Block] = []
        self.parts: list[range] = []
        seen: dict[tuple[int, int], list[Range]] = defaultdict(list)
        for block in layout.blocks:
            seen[units[block.rank], block.sequence].append(_seen(block, kind))
        self.seen = {key: union(ranges) for key, ranges in seen.items()}
        for block in layout.all_blocks:
            first = len(self.blocks)
            self.blocks += _pieces(block, cuts.get(block.sequence, ()))
            self.parts.append(range(first, len(self.blocks)))

    def layout(self) -> Layout:
        """The layout without the transfers and context that no query sees."""
        num_blocks = len(self._layout.blocks)
        num_own = self.parts[num_blocks - 1].stop if num_blocks else 0
        rounds = [self._round(step) for step in self._layout.rounds]
        carried = {block for step in rounds for transfer in step for block in transfer.blocks}
        kept = list(range(num_own))
        contexts, first = [], num_blocks
        for context in self._layout.context:
            parts = [at for held in self.parts[first : first + len(context.blocks)] for at in held]
            first += len(context.blocks)
            mine = [at for at in parts if at in carried or self._is_seen(at, self._units[self.blocks[at].rank])]
            kept += mine
            if mine:
                contexts.append(replace(context, blocks=tuple(self.blocks[at] for at in mine)))
        number = {at: new for new, at in enumerate(kept)}
        return replace(
            self._layout,
            blocks=tuple(self.blocks[:num_own]),
            rounds=tuple(_renumbered(step, number) for step in rounds if step),
            context=tuple(contexts),
        )

    def _round(self, step: Round) -> list[Transfer]:
        """The transfers that are left of a round: as they were, or straight from the owner."""
        found: list[Transfer] = []
        for transfer in step.transfers:
            parts = [at for block in transfer.blocks for at in self.parts[block]]
            owner = self._units[self.blocks[parts[0]].rank]
            ways: dict[int, list[int]] = {transfer.source: [], owner: []}
            for at in parts:
                if self._is_seen(at, transfer.target):
                    ways[transfer.source if self.blocks[at].sequence in self._uncut else owner].append(at)
            found += [
                Transfer(blocks=tuple(blocks), source=source, target=transfer.target)
                for source, blocks in ways.items()
                if blocks
            ]
        return found

    def _is_seen(self, at: int, unit: int) -> bool:
        """True if the unit sees some key of a piece."""
        block = self.blocks[at]
        if block.sequence in self._uncut:
            return True
        ranges = self.seen.get((unit, block.sequence), ())
        at = bisect_left(ranges, (block.stop,))
        return at > 0 and ranges[at - 1][1] > block.start


def _renumbered(step: Sequence[Transfer], number: Mapping[int, int]) -> Round:
    return Round(transfers=tuple(replace(each, blocks=tuple(number[block] for block in each.blocks)) for each in step))


class Pieces(NamedTuple):
    """Tokens `[start, stop)` of sequences, which lie in a slot from row `begin` on. Columns, one entry a piece."""

    sequence: Ints
    start: Ints
    stop: Ints
    begin: Ints

    def part(self, at: Ints) -> "Pieces":
        return Pieces(*(column[at] for column in self))


def decomposed(queries: Pieces, keys: Pieces, *, window: int) -> Column:
    """The pairs that the i-th piece of queries sees of the i-th piece of keys, each (query, key) pair once.

    `[parts, 6]`: query start and stop and key start and stop in rows of their slots, kind as in `Attends`, and i;
    squares first, by kind, then query. No part is empty.
    """
    begin = np.maximum(queries.start, keys.start)
    end = np.maximum(np.minimum(queries.stop, keys.stop + window - 1), begin)
    lower_moves, upper_moves = keys.start + window, keys.stop  # from the one query on, up to the other
    first = np.clip(np.minimum(lower_moves, upper_moves), begin, end)
    second = np.clip(np.maximum(lower_moves, upper_moves), begin, end)
    both, pair = lower_moves < upper_moves, np.arange(len(begin))
    table = np.concatenate(
        (
            _parts(begin, first, begin, first, kind=CAUSAL, pair=pair),
            _parts(begin, first, keys.start, begin, kind=WHOLE, pair=pair),
            *_parallelogram(first, np.where(both, second, first), window, pair),
            _parts(first, np.where(both, first, second), keys.start, keys.stop, kind=WHOLE, pair=pair),
            _parts(second, end, second + 1 - window, end + 1 - window, kind=FLIPPED, pair=pair),
            _parts(second, end, end + 1 - window, keys.stop, kind=WHOLE, pair=pair),
        )
    )
    table = table[(table[:, 0] < table[:, 1]) & (table[:, 2] < table[:, 3])]
    pair = table[:, 5]
    table[:, :2] += (queries.begin - queries.start)[pair, None]
    table[:, 2:4] += (keys.begin - keys.start)[pair, None]
    return table[np.lexsort((table[:, 2], table[:, 0], table[:, 4], table[:, 4] == WHOLE))]


def _parallelogram(start: Column, stop: Column, window: int, pair: Column) -> tuple[Column, Column, Column]:
    """Query q sees (q - window, q], in runs of `window` queries."""
    some = np.flatnonzero(start < stop)
    run, step = expanded(-((start - stop)[some] // window))
    at = some[run]
    begin = start[at] + step * window
    end = np.minimum(begin + window, stop[at])
    return (
        _parts(begin, end, begin + 1 - window, end + 1 - window, kind=FLIPPED, pair=pair[at]),
        _parts(begin, end, end + 1 - window, begin + 1, kind=WHOLE, pair=pair[at]),
        _parts(begin + 1, end, begin + 1, end, kind=CAUSAL, pair=pair[at]),
    )


def _parts(start: Column, stop: Column, low: Column, high: Column, *, kind: int, pair: Column) -> Column:
    return np.stack((start, stop, low, high, np.full(len(start), kind), pair), axis=1)
