"""Lowering of a layout to attention programs: slots, rounds, and the way of partial gradients home.

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

from rayfcp.program.attends import Attending, Queries
from rayfcp.program.banded import BandedQueries, PictureQueries
from rayfcp.program.context import Order, context_slots, kept_ranges
from rayfcp.program.instructions import Attend, AttentionProgram, Message, Payload
from rayfcp.program.paced import Brought, paced
from rayfcp.program.placed import BlockTable, Placed
from rayfcp.program.slots import Lot, Lots, RankSlots, Slot, blocks_of_ranks, own_slots
from rayfcp.program.table import Attends
from rayfcp.program.windowed import Bands
from rayfcp.values import Block, Layout, Mask, Pacing, Transfer


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
    layers have windows; no more has to travel then than is seen (`rayfcp.program.windowed`). `mutual`: without `bands`,
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
