"""Layouts as layers with a window need them: only keys and values that some query sees travel or are kept.

Blocks are cut where what later queries see of them begins or ends. Sequences that the window does not cut stay as they
are. Blocks of others go straight from their owner to the ranks that see them, in the round in which they came without a
window: passed on from rank to rank, what few ranks see would travel past many. Rounds without transfers are left out.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from rayfcp.program.columns import union
from rayfcp.program.instructions import Range
from rayfcp.values import Block, LayerKind, Layout, Round, Transfer

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
