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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from rayfcp.program.attends import SlotBlocks, firsts, joined_tables
from rayfcp.program.instructions import CAUSAL, FLIPPED, WHOLE, Attends, Column, Range, expanded, union
from rayfcp.values import Block, LayerKind, Layout, Round, Transfer
from rayfcp.values.sequence import POSITIONS

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

    sequence: Column
    start: Column
    stop: Column
    begin: Column

    @classmethod
    def of(cls, held: SlotBlocks) -> "Pieces":
        """The blocks of a slot by sequence and start; blocks that continue each other, in the sequence and in the slot,
        are one piece."""
        goes_on = (held.sequence[1:] == held.sequence[:-1]) & (held.start[1:] == held.stop[:-1])
        goes_on &= held.begin[1:] == held.end[:-1]
        size = len(held.sequence)
        opens = firsts(goes_on, size=size) == np.arange(size)
        stop = held.stop[np.append(opens[1:], True)[:size]]
        return cls(held.sequence[opens], held.start[opens], stop, held.begin[opens])

    def part(self, at: Column) -> "Pieces":
        return Pieces(*(column[at] for column in self))


class WindowedQueries:
    """A rank's own tokens as queries of layers with a window. Attends to one slot come squares first, by kind, then by
    query."""

    def __init__(self, own: SlotBlocks, kind: LayerKind) -> None:
        self._kind = kind
        self._own = Pieces.of(own)
        self._reaching = self._own.part(np.flatnonzero((self._own.start > 0) & (kind.first_visible(1) < 1)))

    def within(self) -> Attends:
        """Attends to own keys."""
        return self._attends(self._own, self._own, slot=0)

    def to(self, held: SlotBlocks, *, slot: int) -> Attends:
        """Attends to the keys that other blocks brought into a slot."""
        first, last = self._meet(self._reaching, held)
        return self._attends(self._reaching, Pieces.of(held), slot=slot) if (first < last).any() else joined_tables([])

    def to_each(self, slots: Iterable[tuple[int, SlotBlocks]], *, first: Attends | None) -> Attends:
        """`first`, then attends to the keys of each of these slots (number, blocks)."""
        tables = [] if first is None else [first.columns]
        tables += [self.to(held, slot=number).columns for number, held in slots if held.blocks]
        return joined_tables(tables)

    def _meet(self, queries: Pieces, keys: Pieces | SlotBlocks) -> tuple[Column, Column]:
        """The first entry of `keys` that each piece of queries sees a part of, and the one behind the last."""
        base = queries.sequence * POSITIONS
        low = base + np.maximum(self._kind.first_visible(queries.start), 0)
        first = np.searchsorted(keys.sequence * POSITIONS + keys.stop, low, side="right")
        return first, np.searchsorted(keys.sequence * POSITIONS + keys.start, base + queries.stop)

    def _attends(self, queries: Pieces, keys: Pieces, *, slot: int) -> Attends:
        first, last = self._meet(queries, keys)
        query, step = expanded(np.maximum(last - first, 0))
        parts = decomposed(queries.part(query), keys.part(first[query] + step), window=self._kind.window)
        columns = np.empty((len(parts), 6), np.int64)
        columns[:, :2], columns[:, 2], columns[:, 3:5], columns[:, 5] = parts[:, :2], slot, parts[:, 2:4], parts[:, 4]
        return Attends(columns)


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
