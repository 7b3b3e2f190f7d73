"""Keys and values that a microbatch leaves for later ones: where they lie, and what must be kept.

The slots of all ranks while a layout is lowered: what lies in them, and where it came from.

Lowering of a layout to attention programs: slots, rounds, and the way of partial gradients home.

Blocks of a context lie in slots of their own from the start, their home like slot 0 is that of own blocks. A
transfer fills a new slot at its target (one for each home of its blocks), which attends to it in the next round. In
backward the same transfers bring the slots again, and the partial dK, dV of a slot goes

- to the rank that the slot was passed on to, one round after the slot went there (rings); the
  receiver adds its own part; or
- home to the owner of the blocks, one round after it was computed, when the slot was not passed on.

With a `Pacing`, `coalesce` rounds of the layout are one round of the program, attends are spread over the
phases (`rayfcp.program.paced`), and a slot's partial goes home `num_buffers` rounds after it came, when it is whole:
the transposed rounds again. Slots then come from their owners.

So every partial travels one hop per round, each hop the transpose or the follower of a forward
transfer. Keys and values of a round are a matching, as in the layout. Of gradients, a rank sends in round r
at most one partial on (behind its transfer of round r - 1) and at most one home (of the slot that came in
round r - 2, unless passed on); it receives at most one that is passed on, and one home for each slot of
its blocks that came to a rank in round r - 2 and stayed there. So gradients are a matching too where
every slot comes from its owner (transposed rounds) and in rings (all pass on, then all send home). Other
relays break it: a rank may then pass a partial on and send another home in one round, and an owner may
receive from several ranks.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from rayfcp.program.attends import Attending, BandedQueries, PictureQueries, Queries
from rayfcp.program.columns import Attends, BlockTable, Placed, RoundDrafts, merged
from rayfcp.program.instructions import Attend, AttentionProgram, ContextSlot, Message, Payload, Range
from rayfcp.program.paced import Brought, paced
from rayfcp.program.windows import Bands
from rayfcp.values import Block, Layout, Mask, Pacing, Transfer

Order = Mapping[tuple[int, int], int]
"""Where (sequence, start) of a block lies in a slot 0."""


def order_of(blocks: Sequence[Block]) -> Order:
    """Of the blocks of a slot 0, in its order.

    >>> order_of([Block(sequence=0, start=4, stop=6, rank=0), Block(sequence=2, start=0, stop=1, rank=0)])
    {(0, 4): 0, (2, 0): 2}
    """
    order, at = {}, 0
    for block in blocks:
        order[block.sequence, block.start] = at
        at += block.num_tokens
    return order


def context_slots(
    layout: Layout, *, num_ranks: int, earlier: Mapping[int, Sequence[Order]]
) -> list[tuple[ContextSlot, ...]]:
    """Slots 1.. of each rank that has blocks of the layout's contexts.

    Raises:
        ValueError: a context's microbatch does not have its blocks on the same rank, in the same order, side by side.
    """
    slots: list[list[ContextSlot]] = [[] for _ in range(num_ranks)]
    for number, context in enumerate(layout.context, start=1):
        of_rank: dict[int, list[Block]] = {}
        for block in context.blocks:
            of_rank.setdefault(block.rank, []).append(block)
        for rank, mine in of_rank.items():
            order = earlier[context.microbatch][rank] if context.microbatch in earlier else {}
            joined = merged([_span(block, order, microbatch=context.microbatch) for block in mine])
            if len(joined) > 1:
                raise ValueError(
                    f"context of microbatch {context.microbatch}: blocks of sequence {mine[0].sequence} on rank {rank} "
                    f"lie at {joined}, must lie side by side in their order; plan the batch again"
                )
            slots[rank].append(ContextSlot(slot=number, microbatch=context.microbatch, span=joined[0]))
    return [tuple(each) for each in slots]


def _span(block: Block, order: Order, *, microbatch: int) -> Range:
    start = order.get((block.sequence, block.start))
    if start is None:
        raise ValueError(
            f"context of microbatch {microbatch}: tokens [{block.start}, {block.stop}) of sequence {block.sequence} "
            f"are not on rank {block.rank} there; keep a sequence's slices on the same ranks, with the same primitive"
        )
    return start, start + block.num_tokens


def kept_ranges(held: Placed, blocks: Sequence[Block], *, needed: Collection[tuple[int, int]]) -> tuple[Range, ...]:
    """What of a slot 0 later microbatches need, in ascending ranges."""
    if not needed:
        return ()
    spans = (span for at, span in held.ranges.items() if (blocks[at].sequence, blocks[at].start) in needed)
    return merged(sorted(spans))


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


def lower_attention(
    layout: Layout,
    *,
    masks: Mapping[int, Mask],
    num_ranks: int,
    bands: Bands | None = None,
    mutual: Bands | None = None,
    own: Sequence[Sequence[int]] | None = None,
    earlier: Mapping[int, Sequence[Order]] | None = None,
    needed: Collection[tuple[int, int]] = (),
) -> tuple[AttentionProgram, ...]:
    """The attention program of each rank for one microbatch. `bands`: what the queries of each sequence see, where
    layers have windows; no more has to travel then than is seen (`rayfcp.program.windows`). `mutual`: without `bands`,
    what queries of pictures see beyond their masks. `own`: the blocks of each rank in the order of its slot 0, that of
    the layout if absent. `earlier[m][r]`: the order of rank r's slot 0 in
    microbatch m of the layout's context. `needed`: (sequence, start) of blocks whose keys and values later microbatches
    need.

    Invariant: every (query, key) cell of every mask is computed on the query's rank in exactly one
    attend, forward and backward; both ends of a message carry the same number of tokens.

    Raises:
        ValueError: a transfer names no blocks, blocks or a rank that are not there, one rank twice, or blocks that
            its source does not hold together by then; or a block names a sequence without a mask.
    """
    blocks, pacing = layout.all_blocks, layout.pacing
    _check_masks(blocks, masks)
    coalesce, hold = (pacing.coalesce, pacing.num_buffers) if pacing else (1, 2)
    num_stages = -(-len(layout.rounds) // coalesce)
    placed = blocks_of_ranks(layout, num_ranks=num_ranks) if own is None else own
    lots = Lots(layout, table=BlockTable(blocks, masks))
    ranks = own_slots(placed, lots, num_stages=num_stages, hold=hold)
    for index, step in enumerate(layout.rounds):
        for transfer in step.transfers:
            _check_transfer(transfer, blocks, index=index, num_ranks=num_ranks, paced=pacing is not None)
            for lot in lots.of(transfer.blocks):
                _add_transfer(ranks, transfer, lot=lot, lots=lots, index=index // coalesce)
    for rank in ranks:
        queries = _queries(rank.slots[0].held, bands, mutual or {})
        _add_attends(rank, queries, pacing, num_phases=num_stages + 1)
    for number in range(num_ranks):
        _add_gradients(ranks, number, hold=hold)
    slots = context_slots(layout, num_ranks=num_ranks, earlier=earlier or {})
    return tuple(
        AttentionProgram(
            num_tokens=max(rank.slots[0].held.num_tokens, 1),
            forward=rank.forward.finished(),
            backward=rank.backward.finished(),
            context=slots[number],
            kept=kept_ranges(rank.slots[0].held, blocks, needed=needed),
        )
        for number, rank in enumerate(ranks)
    )


def _queries(held: Placed, bands: Bands | None, mutual: Bands) -> Attending:
    if bands is not None:
        return BandedQueries(held, bands)
    sees_more = not mutual.keys().isdisjoint(held.sequence.tolist())
    return PictureQueries(held, mutual) if sees_more else Queries(held)


def _check_masks(blocks: Sequence[Block], masks: Mapping[int, Mask]) -> None:
    unknown = sorted({block.sequence for block in blocks} - masks.keys())
    if unknown:
        raise ValueError(f"blocks name sequences {unknown}, which the batch does not have; plan the batch again")


def _check_transfer(transfer: Transfer, blocks: Sequence[Block], *, index: int, num_ranks: int, paced: bool) -> None:
    where = f"the transfer from rank {transfer.source} to rank {transfer.target}"
    if not transfer.blocks:
        raise ValueError(f"round {index}: blocks is empty in {where}, must name at least one block; drop the transfer")
    ends = (transfer.source, transfer.target)
    if transfer.source == transfer.target or any(not 0 <= rank < num_ranks for rank in ends):
        raise ValueError(
            f"round {index}: a transfer has source {transfer.source} and target {transfer.target}, must be two ranks "
            f"of [0, {num_ranks}); drop it or name another rank"
        )
    if not 0 <= transfer.blocks[0] < len(blocks):  # of others `_held_in` sees that their owner lacks them
        raise ValueError(
            f"round {index}: blocks are {transfer.blocks} in {where}, must be within [0, {len(blocks)}); plan again"
        )
    if paced and transfer.source != (owner := blocks[transfer.blocks[0]].rank):
        raise ValueError(
            f"round {index}: rank {transfer.source} passes on blocks of rank {owner}, which paced rounds do not "
            "do; send them from their owner"
        )


def _add_transfer(ranks: list[RankSlots], transfer: Transfer, *, lot: Lot, lots: Lots, index: int) -> None:
    source, target = ranks[transfer.source], ranks[transfer.target]
    number = _held_in(source, transfer, lot=lot, lots=lots, index=index)
    slot = source.slots[number]
    held = slot.held if slot.held.blocks == lot else lots.placed(lot)
    new = target.add(Slot(held=held, arrived=index, owner=slot.owner, home=slot.home))
    whole = not slot.at_home and len(held.blocks) == len(slot.held.blocks)
    if whole and slot.passed is None:
        slot.passed = (transfer.target, new, index)
    sent = Message(peer=transfer.target, payload=Payload.KV, slot=number, ranges=slot.held.at(lot))
    received = Message(peer=transfer.source, payload=Payload.KV, slot=new, ranges=held.all)
    source.forward.sends[index].append(sent)
    source.backward.sends[index].append(sent)
    target.forward.receives[index].append(received)
    target.backward.receives[index].append(received)


def _held_in(source: RankSlots, transfer: Transfer, *, lot: Lot, lots: Lots, index: int) -> int:
    """The latest slot of the source that holds all blocks of the lot by then."""
    for number in reversed(source.numbers.get((lots.rank[lot[0]], lots.home[lot[0]]), ())):
        slot = source.slots[number]
        if slot.arrived < index and slot.held.holds(lot):
            return number
    raise ValueError(
        f"round {index}: rank {transfer.source} sends blocks {lot} to rank {transfer.target} "
        "but does not hold them together by then; send them from their owner"
    )


_PADDING = Attends.of([Attend(query=(0, 1), slot=0, key=(0, 1), causal=True)])


def _add_attends(rank: RankSlots, queries: Attending, pacing: Pacing | None, *, num_phases: int) -> None:
    within = queries.within() if rank.slots[0].held.blocks else _PADDING
    phases = (
        _paced(rank, queries, within, pacing, num_phases=num_phases) if pacing else _one_by_one(rank, queries, within)
    )
    for index, each in enumerate(phases):
        if len(each):
            rank.forward.attends[index] = rank.backward.attends[index] = each


def _one_by_one(rank: RankSlots, queries: Attending, within: Attends) -> list[Attends]:
    """What is there at first, then what each round brought."""
    brought: list[list[tuple[int, Placed]]] = [[] for _ in range(max(slot.arrived for slot in rank.slots) + 2)]
    for number, slot in enumerate(rank.slots[1:], start=1):
        brought[slot.arrived + 1].append((number, slot.held))
    return [queries.to_each(slots, first=None if index else within) for index, slots in enumerate(brought)]


def _paced(rank: RankSlots, queries: Attending, within: Attends, pacing: Pacing, *, num_phases: int) -> list[Attends]:
    brought = [
        Brought(
            attends=queries.to(slot.held, slot=number),
            first=slot.arrived + 1,
            due=num_phases - 1 if slot.at_home else slot.arrived + pacing.num_buffers - 1,
        )
        for number, slot in enumerate(rank.slots[1:], start=1)
    ]
    return paced(brought, within, num_phases=num_phases)


def _add_gradients(ranks: list[RankSlots], number: int, *, hold: int) -> None:
    rank = ranks[number]
    for index, slot in enumerate(rank.slots):
        if slot.at_home:
            continue
        if slot.passed is not None:
            target, there, when = slot.passed[0], slot.passed[1], slot.passed[2] + 1
        else:
            target, there, when = slot.owner, slot.home, slot.arrived + hold
        arriving = ranks[target].slots[there].held.at(slot.held.blocks)
        sent = Message(peer=target, payload=Payload.GRAD, slot=index, ranges=slot.held.all)
        rank.backward.sends[when].append(sent)
        received = Message(peer=number, payload=Payload.GRAD, slot=there, ranges=arriving)
        ranks[target].backward.receives[when].append(received)
