"""Layouts as layers with a window need them: only keys and values that some query sees travel or are kept.

Blocks are cut where what later queries see of them begins or ends. Sequences that the window does not cut stay as they
are. Blocks of others go straight from their owner to the ranks that see them, in the round in which they came without a
window: passed on from rank to rank, what few ranks see would travel past many. Rounds without transfers are left out.

In layers with a window, query q attends to keys (q - window, q]. Over the keys of a piece both ends of that range are
fixed or move with the query. Where only the upper one moves, queries see a rectangle and a causal square, where only
the lower one does, a flipped causal square and a rectangle. Where both do they see a parallelogram, cut into runs of as
many queries as a query sees keys: in each the flipped square of its first keys, and the causal square of those that its
later queries see beyond. In layers with chunks, pieces are cut at these, and nothing moves but the upper end.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rayfcp.plan.layout import Blocks, Placement, Transfers
from rayfcp.program.instructions import CAUSAL, FLIPPED, WHOLE, Column
from rayfcp.values import LayerKind
from rayfcp.values.arrays import Ints, expanded

_NO_WINDOW = 1 << 40
"""Wider than any sequence."""


def windowed(
    placements: Sequence[Placement], *, kind: LayerKind, uncut: Sequence[int], units: Sequence[Ints]
) -> list[Placement]:
    """The layouts of all microbatches in layers of a kind. `uncut`: sequences of which the kind hides nothing.
    `units[m]`: the unit of each rank in microbatch m, as transfers number them: the ranks that attend together to keys
    that lie together.

    Invariant: ranks hold the same tokens in the same order, and all keys of other ranks that a query sees still come to
    its rank, or lie in its context.
    """
    most = max(int(each.blocks.stop.max(initial=0)) for each in placements) + 1
    parts = [_seen(each.own.at(~np.isin(each.own.sequence, uncut)), kind) for each in placements]
    seen = Blocks.joined(parts)
    cuts = np.unique([seen.sequence * most + each for each in (seen.start, seen.stop)])
    return [
        _Cut(placement, cuts, most=most, uncut=uncut, unit=unit).placement(part)
        for placement, part, unit in zip(placements, parts, units, strict=True)
    ]


def _seen(blocks: Blocks, kind: LayerKind) -> Blocks:
    """The keys that the queries of blocks see."""
    return blocks._replace(start=np.maximum(kind.first_visible(blocks.start), 0))


class _Cut:
    """A placement with its blocks cut at `cuts`, ascending, each sequence x `most` + position. Piece p is of block
    `block[p]`, and one of `whole` sequences where the kind hides nothing. `unit`: of each rank."""

    def __init__(self, placement: Placement, cuts: Ints, *, most: int, uncut: Sequence[int], unit: Ints) -> None:
        self._placement, self._most, self._unit = placement, most, unit
        self.block, self.pieces = _pieces(placement.blocks, cuts, most=most)
        self.whole = np.isin(self.pieces.sequence, uncut)

    def placement(self, seen: Blocks) -> Placement:
        """The placement without the transfers and context that no query sees. `seen`: keys of cut sequences that
        queries of ranks see."""
        placement, own = self._placement, self.block < self._placement.num_own
        piece, unit = self._seeing(seen)
        transfers = self._transfers(piece, unit)
        kept = own | self.whole
        kept[transfers.block] = True
        kept[piece[unit == self._unit[self.pieces.rank[piece]]]] = True
        bounds = placement.num_own + np.cumsum([0, *(count for _, count in placement.contexts)])
        left = np.diff(np.searchsorted(self.block[kept], bounds)).tolist()
        contexts = zip((microbatch for microbatch, _ in placement.contexts), left, strict=True)
        rounds, number = np.unique(transfers.round, return_inverse=True)
        return replace(
            placement,
            blocks=self.pieces.at(kept),
            num_own=int(own.sum()),
            contexts=tuple((microbatch, count) for microbatch, count in contexts if count),
            transfers=transfers._replace(round=number, block=(np.cumsum(kept) - 1)[transfers.block]),
            num_rounds=len(rounds),
        )

    def _seeing(self, seen: Blocks) -> tuple[Ints, Ints]:
        """Pieces of cut sequences, ascending, and the units that see them, each pair once."""
        pieces, most = self.pieces, self._most
        order = np.flatnonzero(~self.whole)
        order = order[np.lexsort((pieces.start[order], pieces.sequence[order]))]
        start, stop = ((pieces.sequence * most + each)[order] for each in (pieces.start, pieces.stop))
        first = np.searchsorted(stop, seen.sequence * most + seen.start, side="right")
        last = np.searchsorted(start, seen.sequence * most + seen.stop)
        at, step = expanded(np.maximum(last - first, 0))
        num_units = int(self._unit.max(initial=0)) + 1
        pairs = np.unique(order[first[at] + step] * num_units + self._unit[seen.rank[at]])
        return np.divmod(pairs, num_units)

    def _transfers(self, piece: Ints, unit: Ints) -> Transfers:
        """What is left of transfers: pieces of whole sequences, in one set for all transfers that carried them, and
        pieces that the target sees, from their owner, in a set for each transfer, with the former if these come from
        there as well."""
        old, blocks = self._placement.transfers, self._placement.blocks
        part, bounds = self._parts()
        owner = self._unit[blocks.rank[np.append(old.block, 0)[old.first[old.carried]]]]
        transfer, item = self._reaching(piece, unit, part=part, bounds=bounds)
        direct = np.unique(transfer)
        joined = direct[owner[direct] == old.source[direct]]  # as one message: rounds stay matchings
        whole = np.flatnonzero(self.whole[part])
        first = np.searchsorted(whole, bounds)
        at, step = expanded(np.diff(first)[old.carried[joined]])
        transfer = np.append(transfer, joined[at])
        item = np.append(item, whole[first[old.carried[joined]][at] + step])
        order = np.lexsort((item, transfer))
        ends = np.searchsorted(transfer[order], direct, side="right")
        some = np.diff(first)[old.carried] > 0
        some[joined] = False
        before = np.flatnonzero(some)
        rows = np.append(before, direct)
        found = Transfers(
            round=old.round[rows],
            source=np.append(old.source[before], owner[direct]),
            target=old.target[rows],
            carried=np.append(old.carried[before], len(bounds) - 1 + np.arange(len(direct))),
            first=np.append(first, first[-1] + ends),
            block=part[np.append(whole, item[order])],
        )
        return _distinct(found, order=np.argsort(rows, kind="stable"))

    def _parts(self) -> tuple[Ints, Ints]:
        """The pieces of all sets of blocks, in their order, and the bounds of sets."""
        sets = self._placement.transfers
        first, last = (np.searchsorted(self.block, sets.block, side=side) for side in ("left", "right"))
        at, step = expanded(last - first)
        return first[at] + step, np.append(0, np.cumsum(last - first))[sets.first]

    def _reaching(self, piece: Ints, unit: Ints, *, part: Ints, bounds: Ints) -> tuple[Ints, Ints]:
        """The transfers whose target, a unit of `unit`, sees an item of the set that they carry, and the item."""
        old = self._placement.transfers
        low, high = (np.searchsorted(piece, part, side=side) for side in ("left", "right"))
        item, step = expanded(high - low)
        num_units = int(max(self._unit.max(initial=0), old.target.max(initial=0))) + 1
        carried = np.searchsorted(bounds, item, side="right") - 1
        wanted = carried * num_units + unit[low[item] + step]
        there = old.carried * num_units + old.target
        order = np.argsort(there, kind="stable")
        low, high = (np.searchsorted(there[order], wanted, side=side) for side in ("left", "right"))
        at, step = expanded(high - low)
        return order[low[at] + step], item[at]


def _pieces(blocks: Blocks, cuts: Ints, *, most: int) -> tuple[Ints, Blocks]:
    """The block of each piece, ascending, and the pieces."""
    low = np.searchsorted(cuts, blocks.sequence * most + blocks.start, side="right")
    high = np.searchsorted(cuts, blocks.sequence * most + blocks.stop)
    counts = np.maximum(high - low, 0) + 1
    at, step = expanded(counts)
    pieces = blocks.at(at)
    inner = np.flatnonzero(step)
    pieces.start[inner] = cuts[low[at[inner]] + step[inner] - 1] % most
    pieces.stop[inner - 1] = pieces.start[inner]
    return at, pieces


def _distinct(transfers: Transfers, *, order: Ints) -> Transfers:
    """The transfers in this order, without sets that none carries, and equal sets as one: what passes a set on has to
    find it."""
    used, carried = np.unique(transfers.carried[order], return_inverse=True)
    items, bounds = transfers.block.tobytes(), transfers.block.itemsize * transfers.first
    numbers: dict[bytes, int] = {}
    both = zip(bounds[used].tolist(), bounds[used + 1].tolist(), strict=True)
    number = np.array([numbers.setdefault(items[low:high], len(numbers)) for low, high in both], np.int64)
    block = np.frombuffer(b"".join(numbers), np.int64) if numbers else transfers.block[:0]
    return Transfers(
        transfers.round[order],
        transfers.source[order],
        transfers.target[order],
        number[carried],
        first=np.cumsum([0, *map(len, numbers)]) // transfers.block.itemsize,
        block=block,
    )


class Pieces(NamedTuple):
    """Tokens `[start, stop)` of sequences, which lie in a slot from row `begin` on. Columns, one entry a piece."""

    sequence: Ints
    start: Ints
    stop: Ints
    begin: Ints

    def part(self, at: Ints) -> "Pieces":
        return Pieces(*(column[at] for column in self))

    def between(self, low: Ints, high: Ints) -> "Pieces":
        """Their tokens in `[low, high)`, of which each has some."""
        start = np.maximum(self.start, low)
        return Pieces(self.sequence, start, np.minimum(self.stop, high), self.begin + start - self.start)


def decomposed(queries: Pieces, keys: Pieces, *, kind: LayerKind) -> Column:
    """The pairs that the i-th piece of queries sees of the i-th piece of keys, each (query, key) pair once.

    `[parts, 6]`: query start and stop and key start and stop in rows of their slots, kind as in `Attends`, and i;
    squares first, by kind, then query. No part is empty.
    """
    if not kind.chunk:
        return _in_windows(queries, keys, window=kind.window)
    of, queries, keys = _by_chunk(queries, keys, chunk=kind.chunk)
    table = _in_windows(queries, keys, window=_NO_WINDOW)
    table[:, 5] = of[table[:, 5]]
    return table


def _by_chunk(queries: Pieces, keys: Pieces, *, chunk: int) -> tuple[Ints, Pieces, Pieces]:
    """Pairs of pieces cut at the chunks of their sequence that both reach, and the pair that each is of."""
    first = np.maximum(queries.start, keys.start) // chunk
    last = (np.minimum(queries.stop, keys.stop) - 1) // chunk
    of, step = expanded(np.maximum(last - first + 1, 0))
    low = (first[of] + step) * chunk
    return of, queries.part(of).between(low, low + chunk), keys.part(of).between(low, low + chunk)


def _in_windows(queries: Pieces, keys: Pieces, *, window: int) -> Column:
    """See `decomposed`."""
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
