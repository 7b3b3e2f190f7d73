"""The slots of all ranks while a layout is lowered: what lies in them, and where it came from."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rayfcp.program.drafts import RoundDrafts
from rayfcp.program.placed import BlockTable, Placed
from rayfcp.values import Layout

Lot = tuple[int, ...]
"""Blocks that travel or lie together, as indices into `Layout.all_blocks`."""


@dataclass(slots=True, kw_only=True)
class Slot:
    """Blocks of one owner that lie together on a rank; the owner has them in slot `home`, 0 or one of context.
    `arrived` is below 0 there. `passed`: (rank, its slot, round), where it went on to."""

    held: Placed
    arrived: int
    owner: int
    home: int = 0
    passed: tuple[int, int, int] | None = None

    @property
    def at_home(self) -> bool:
        return self.arrived < 0


@dataclass(slots=True, kw_only=True)
class RankSlots:
    """What a rank has and does. `numbers[owner, home]`: its slots with blocks that lie there, ascending."""

    slots: list[Slot]
    forward: RoundDrafts
    backward: RoundDrafts
    numbers: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def add(self, slot: Slot) -> int:
        """The number of the new slot."""
        self.slots.append(slot)
        self.numbers.setdefault((slot.owner, slot.home), []).append(len(self.slots) - 1)
        return len(self.slots) - 1


class Lots:
    """Blocks that travel or lie together. `home[b]`: the slot in which block b's owner has it."""

    def __init__(self, layout: Layout, *, table: BlockTable) -> None:
        self.table = table
        self.home = [0] * len(layout.blocks)
        self.rank = [block.rank for block in layout.all_blocks]
        self.num_contexts = len(layout.context)
        for number, context in enumerate(layout.context, start=1):
            self.home += [number] * len(context.blocks)
        self._parts: dict[Lot, list[Lot]] = {}
        self._placed: dict[Lot, Placed] = {}

    def of(self, blocks: Lot) -> list[Lot]:
        """The blocks of a transfer as one lot for each slot that its owner has them in."""
        if not self.num_contexts:
            return [blocks]
        found = self._parts.get(blocks)
        if found is None:
            parts: dict[int, list[int]] = {}
            for block in blocks:
                parts.setdefault(self.home[block] if 0 <= block < len(self.home) else 0, []).append(block)
            found = self._parts[blocks] = [tuple(parts[home]) for home in sorted(parts)]
        return found

    def placed(self, blocks: Lot) -> Placed:
        """The blocks laid end to end."""
        found = self._placed.get(blocks)
        if found is None:
            found = self._placed[blocks] = Placed(blocks, self.table)
        return found

    def of_context(self, num_ranks: int) -> list[list[Lot]]:
        """Of each context, the blocks of each rank."""
        found: list[list[list[int]]] = [[[] for _ in range(num_ranks)] for _ in range(self.num_contexts)]
        for block, (home, rank) in enumerate(zip(self.home, self.rank, strict=True)):
            if home:
                found[home - 1][rank].append(block)
        return [[tuple(blocks) for blocks in lot] for lot in found]


def own_slots(own: Sequence[Sequence[int]], lots: Lots, *, num_stages: int, hold: int) -> list[RankSlots]:
    """Each rank with the slot of its own blocks and those of its context; `hold`: rounds from a slot's coming to its
    partial gradient's going home."""
    ranks = []
    contexts = lots.of_context(len(own))
    for number, blocks in enumerate(own):
        rank = RankSlots(slots=[], forward=RoundDrafts(num_stages + 1), backward=RoundDrafts(num_stages + hold))
        rank.add(Slot(held=lots.placed(tuple(blocks)), arrived=-1, owner=number))
        for home, lot in enumerate(contexts, start=1):
            rank.add(Slot(held=lots.placed(lot[number]), arrived=-1, owner=number, home=home))
        ranks.append(rank)
    return ranks


def blocks_of_ranks(layout: Layout, *, num_ranks: int) -> list[list[int]]:
    """Blocks of each rank, in the order of the layout."""
    own: list[list[int]] = [[] for _ in range(num_ranks)]
    for index, block in enumerate(layout.blocks):
        own[block.rank].append(index)
    return own
