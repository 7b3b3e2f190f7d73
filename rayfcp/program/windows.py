"""Kinds of layers, by their window: which a program has, that ranks and stages agree on them, and what each of them
attends to.

The layouts of a batch as layers with a window need them: only the keys and values that somebody sees travel or are
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

from rayfcp.program.columns import union
from rayfcp.program.instructions import AttentionProgram, Forward, HeadProgram, Load, Range, RankProgram
from rayfcp.values import Band, Block, Layout, Round, Transfer

Attention = AttentionProgram | HeadProgram


def windows_of(program: RankProgram) -> tuple[int, ...]:
    """The windows of a program's layers, ascending."""
    return tuple(kind.window for kind in _forwards(program)[0].kinds)


def attention_by_window(programs: Sequence[RankProgram]) -> dict[int, list[list[Attention]]]:
    """Of each window that some stage has, the attention of its layers, by rank, then microbatch; `check_order` holds.

    What layers of one window attend to is the same on all stages that have them.
    """
    num_ranks = programs[0].num_ranks
    found: dict[int, list[list[Attention]]] = {}
    for first in range(0, len(programs), num_ranks):
        of_stage = programs[first : first + num_ranks]
        for at, window in enumerate(windows_of(of_stage[0])):
            if window not in found:
                found[window] = [[item.kinds[at].attention for item in _forwards(each)] for each in of_stage]
    return dict(sorted(found.items()))


def check_windows(program: RankProgram, first: RankProgram) -> None:
    """Every Forward has the kinds of layers that those of the stage's first rank have, with windows that ascend, and
    these share out heads alike.

    Raises:
        ValueError: names the rank, the microbatch and the windows.
    """
    due = windows_of(first)
    for item in _forwards(program):
        where, found = f"{program.place}, microbatch {item.microbatch}", tuple(kind.window for kind in item.kinds)
        if found != due or list(found) != sorted(set(found)) or found[0] < 0:
            raise ValueError(
                f"{where}: windows of layers are {found}, must ascend from 0 or more and be those of {first.place}, "
                f"{due}; lower one plan for all"
            )
        if len({_sharing(kind.attention) for kind in item.kinds}) > 1:
            raise ValueError(f"{where}: layers of windows {found} share out heads differently; lower the plan again")


def _sharing(attention: Attention) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (attention.ranks, attention.tokens) if isinstance(attention, HeadProgram) else ((), ())


def check_loads(program: RankProgram, other: RankProgram) -> None:
    """What a rank loads is the same on all stages.

    Raises:
        ValueError: names the rank and the microbatch.
    """
    mine, theirs = ([item for item in each.instructions if isinstance(item, Load)] for each in (program, other))
    for here, there in zip(mine, theirs, strict=True):
        if here.pieces != there.pieces:
            raise ValueError(_differ(program, other, "pieces", microbatch=here.microbatch))


def check_likeness(program: RankProgram, other: RankProgram, *, window: int) -> None:
    """What a rank's layers of a window attend to is the same on all stages.

    Raises:
        ValueError: names the rank and the microbatch.
    """
    at, there = windows_of(program).index(window), windows_of(other).index(window)
    for mine, theirs in zip(_forwards(program), _forwards(other), strict=True):
        value, due = mine.kinds[at].attention, theirs.kinds[there].attention
        if value is not due and value != due:
            raise ValueError(_differ(program, other, "attention", microbatch=mine.microbatch))


def _differ(program: RankProgram, other: RankProgram, field: str, *, microbatch: int) -> str:
    return (
        f"{program.place}, microbatch {microbatch}: {field} differ from those of {other.place}, must be the same on "
        "all stages; lower one plan for all"
    )


def _forwards(program: RankProgram) -> list[Forward]:
    return [item for item in program.instructions if isinstance(item, Forward)]


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
