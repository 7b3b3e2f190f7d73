"""The layouts of a batch as layers with a window need them: only the keys and values that somebody sees travel or are
kept.

Blocks are cut where what later queries see of them begins or ends. Of sequences that the window does not cut nothing
changes. Blocks of others go straight from their owner to the ranks that see them, in the round in which they came
without a window: passed on from rank to rank, what few ranks see would travel past many. Rounds in which nothing
travels any more are left out.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from rayfcp.program.parcels import Range
from rayfcp.program.placed import union
from rayfcp.values import Band, Block, Layout, Round, Transfer

Bands = Mapping[int, Sequence[Band]]
"""Of sequences, what their queries see."""
Units = Mapping[int, int]
"""Of ranks, who attends together with them to keys that lie together: the number that transfers have for them."""


def windowed(
    layouts: Sequence[Layout], *, bands: Bands, uncut: Collection[int], units: Sequence[Units]
) -> tuple[Layout, ...]:
    """The layouts of all microbatches; `units[m]` of microbatch m. `uncut`: sequences whose queries see what they do
    without a window.

    Invariant: ranks hold the same tokens in the same order, and whatever queries see of other ranks' keys still
    comes to their rank, or lies in its context.
    """
    cuts = _cuts(layouts, bands, uncut=uncut)
    return tuple(
        _Cut(layout, cuts).seen(bands, uncut=uncut, units=unit) for layout, unit in zip(layouts, units, strict=True)
    )


def _cuts(layouts: Sequence[Layout], bands: Bands, *, uncut: Collection[int]) -> dict[int, list[int]]:
    """Of each sequence, ascending, where what a block sees begins or ends."""
    found: dict[int, set[int]] = defaultdict(set)
    for layout in layouts:
        for block in layout.blocks:
            if block.sequence not in uncut:
                found[block.sequence].update(*_seen(block, bands))
    return {sequence: sorted(places) for sequence, places in found.items()}


def _seen(block: Block, bands: Bands) -> tuple[Range, ...]:
    """What the queries of a block see, in ranges of keys that are apart; some of it may not exist."""
    rows = ((band, max(band.start, block.start), min(band.stop, block.stop)) for band in bands[block.sequence])
    return union([(band.low.of(start), band.high.of(stop - 1)) for band, start, stop in rows if start < stop])


def _pieces(block: Block, places: Sequence[int]) -> list[Block]:
    """The block, cut at places within it."""
    within = places[bisect_right(places, block.start) : bisect_left(places, block.stop)]
    if not within:
        return [block]
    return [replace(block, start=start, stop=stop) for start, stop in pairwise((block.start, *within, block.stop))]


class _Cut:
    """A layout with its blocks cut. `parts[b]`: what became of block b, own or of context."""

    def __init__(self, layout: Layout, cuts: Mapping[int, Sequence[int]]) -> None:
        self.layout = layout
        self.blocks: list[Block] = []
        self.parts: list[range] = []
        for block in layout.all_blocks:
            first = len(self.blocks)
            self.blocks += _pieces(block, cuts.get(block.sequence, ()))
            self.parts.append(range(first, len(self.blocks)))
        self.num_own = self.parts[len(layout.blocks) - 1].stop if layout.blocks else 0

    def seen(self, bands: Bands, *, uncut: Collection[int], units: Units) -> Layout:
        """The layout with what is seen of it."""
        views = _Views(self.blocks[: self.num_own], bands, units=units)
        rounds = [self._round(step, views, uncut=uncut, units=units) for step in self.layout.rounds]
        carried = {block for step in rounds for transfer in step for block in transfer.blocks}
        kept = list(range(self.num_own))
        contexts, first = [], len(self.layout.blocks)
        for context in self.layout.context:
            parts = [at for held in self.parts[first : first + len(context.blocks)] for at in held]
            first += len(context.blocks)
            mine = [at for at in parts if at in carried or self._is_seen(at, units[self.blocks[at].rank], views, uncut)]
            kept += mine
            if mine:
                contexts.append(replace(context, blocks=tuple(self.blocks[at] for at in mine)))
        number = {at: new for new, at in enumerate(kept)}
        return replace(
            self.layout,
            blocks=tuple(self.blocks[: self.num_own]),
            rounds=tuple(_renumbered(step, number) for step in rounds if step),
            context=tuple(contexts),
        )

    def _round(self, step: Round, views: "_Views", *, uncut: Collection[int], units: Units) -> list[Transfer]:
        """What still travels in a round: as it did, or straight from the owner."""
        found: list[Transfer] = []
        for transfer in step.transfers:
            parts = [at for block in transfer.blocks for at in self.parts[block]]
            owner = units[self.blocks[parts[0]].rank]
            ways: dict[int, list[int]] = {transfer.source: [], owner: []}
            for at in parts:
                if self._is_seen(at, transfer.target, views, uncut):
                    ways[transfer.source if self.blocks[at].sequence in uncut else owner].append(at)
            found += [
                Transfer(blocks=tuple(blocks), source=source, target=transfer.target)
                for source, blocks in ways.items()
                if blocks
            ]
        return found

    def _is_seen(self, at: int, unit: int, views: "_Views", uncut: Collection[int]) -> bool:
        block = self.blocks[at]
        return block.sequence in uncut or views.any_of(block, unit)


class _Views:
    """What the queries of each unit see of each sequence: disjoint ranges, ascending."""

    def __init__(self, blocks: Sequence[Block], bands: Bands, *, units: Units) -> None:
        found: dict[tuple[int, int], list[Range]] = defaultdict(list)
        for block in blocks:
            found[units[block.rank], block.sequence] += _seen(block, bands)
        self._ranges = {key: union(ranges) for key, ranges in found.items()}

    def any_of(self, block: Block, unit: int) -> bool:
        """Whether the unit sees some key of the block."""
        ranges = self._ranges.get((unit, block.sequence), ())
        at = bisect_left(ranges, (block.stop,))
        return at > 0 and ranges[at - 1][1] > block.start


def _renumbered(step: Sequence[Transfer], number: Mapping[int, int]) -> Round:
    return Round(transfers=tuple(replace(each, blocks=tuple(number[block] for block in each.blocks)) for each in step))
