"""Lowering of a layout to attention programs: slots, rounds, and the way of partial gradients home.

A transfer fills a new slot at its target, which attends to it in the next round. In backward the same
transfers bring the slots again, and the partial dK, dV of a slot goes

- to the rank that the slot was passed on to, one round after the slot went there (rings); the
  receiver adds its own part; or
- home to the owner of the blocks, one round after it was computed, when the slot was not passed on.

With a `Pipeline`, `coalesce` rounds of the layout are one round of the program, attends are spread over the
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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rayfcp.program.attends import Queries, attends_to, attends_within
from rayfcp.program.drafts import RoundDrafts
from rayfcp.program.instructions import Attend, AttentionProgram, Message, Payload
from rayfcp.program.paced import Brought, paced
from rayfcp.program.placed import BlockTable, Placed
from rayfcp.program.table import Attends
from rayfcp.values import Layout, Mask, Pipeline, Transfer


@dataclass(slots=True, kw_only=True)
class _Slot:
    """Blocks of one owner that lie together on a rank. `passed`: (rank, its slot, round), where it went on to."""

    held: Placed
    arrived: int
    owner: int
    passed: tuple[int, int, int] | None = None


@dataclass(slots=True, kw_only=True)
class _Rank:
    slots: list[_Slot]
    forward: RoundDrafts
    backward: RoundDrafts
    slots_of_owner: dict[int, list[int]] = field(default_factory=dict)


def lower_attention(
    layout: Layout, *, masks: Mapping[int, Mask], num_ranks: int, own: Sequence[Sequence[int]] | None = None
) -> tuple[AttentionProgram, ...]:
    """The attention program of each rank for one microbatch. `own`: the blocks of each rank in the order of its slot
    0, that of the layout if absent.

    Invariant: every (query, key) cell of every mask is computed on the query's rank in exactly one
    attend, forward and backward; both ends of a message carry the same number of tokens.

    Raises:
        ValueError: a transfer names no blocks, blocks or a rank that are not there, one rank twice, or blocks that
            its source does not hold together by then; or a block names a sequence without a mask.
    """
    unknown = sorted({block.sequence for block in layout.blocks} - masks.keys())
    if unknown:
        raise ValueError(f"blocks name sequences {unknown}, which the batch does not have; plan the batch again")
    table = BlockTable(layout.blocks, masks)
    pipeline = layout.pipeline
    coalesce, hold = (pipeline.coalesce, pipeline.num_buffers) if pipeline else (1, 2)
    num_stages = -(-len(layout.rounds) // coalesce)
    held = blocks_of_ranks(layout, num_ranks=num_ranks) if own is None else own
    ranks = _own_slots(held, table, num_stages=num_stages, hold=hold)
    known: dict[tuple[int, ...], Placed] = {}
    for index, step in enumerate(layout.rounds):
        for transfer in step.transfers:
            _check_transfer(transfer, index=index, num_ranks=num_ranks, num_blocks=len(layout.blocks))
            if pipeline and transfer.source != (owner := layout.blocks[transfer.blocks[0]].rank):
                raise ValueError(
                    f"round {index}: rank {transfer.source} passes on blocks of rank {owner}, which a pipeline does "
                    "not do; send them from their owner"
                )
            _add_transfer(ranks, transfer, table=table, index=index // coalesce, known=known)
    for rank in ranks:
        _add_attends(rank, pipeline, num_phases=num_stages + 1)
    for number in range(num_ranks):
        _add_gradients(ranks, number, hold=hold)
    return tuple(
        AttentionProgram(
            num_tokens=max(rank.slots[0].held.num_tokens, 1),
            forward=rank.forward.finished(),
            backward=rank.backward.finished(),
        )
        for rank in ranks
    )


def blocks_of_ranks(layout: Layout, *, num_ranks: int) -> list[list[int]]:
    """Blocks of each rank, in the order of the layout."""
    own: list[list[int]] = [[] for _ in range(num_ranks)]
    for index, block in enumerate(layout.blocks):
        own[block.rank].append(index)
    return own


def _own_slots(own: Sequence[Sequence[int]], table: BlockTable, *, num_stages: int, hold: int) -> list[_Rank]:
    """Each rank with the slot of its own blocks; `hold`: rounds from a slot's coming to its partial gradient's going
    home."""
    ranks = []
    for rank, blocks in enumerate(own):
        slot = _Slot(held=Placed(tuple(blocks), table), arrived=-1, owner=rank)
        forward, backward = RoundDrafts(num_stages + 1), RoundDrafts(num_stages + hold)
        ranks.append(_Rank(slots=[slot], forward=forward, backward=backward))
        ranks[-1].slots_of_owner[rank] = [0]
    return ranks


def _check_transfer(transfer: Transfer, *, index: int, num_ranks: int, num_blocks: int) -> None:
    where = f"the transfer from rank {transfer.source} to rank {transfer.target}"
    if not transfer.blocks:
        raise ValueError(f"round {index}: blocks is empty in {where}, must name at least one block; drop the transfer")
    ends = (transfer.source, transfer.target)
    if transfer.source == transfer.target or any(not 0 <= rank < num_ranks for rank in ends):
        raise ValueError(
            f"round {index}: a transfer has source {transfer.source} and target {transfer.target}, must be two ranks "
            f"of [0, {num_ranks}); drop it or name another rank"
        )
    if not 0 <= transfer.blocks[0] < num_blocks:  # of others `_held_in` sees that their owner lacks them
        raise ValueError(
            f"round {index}: blocks are {transfer.blocks} in {where}, must be within [0, {num_blocks}); plan again"
        )


def _add_transfer(
    ranks: list[_Rank], transfer: Transfer, *, table: BlockTable, index: int, known: dict[tuple[int, ...], Placed]
) -> None:
    source, target = ranks[transfer.source], ranks[transfer.target]
    owner = int(table.rank[transfer.blocks[0]])
    number = _held_in(source, transfer, owner=owner, index=index)
    slot = source.slots[number]
    held = slot.held if slot.held.blocks == transfer.blocks else known.get(transfer.blocks)
    if held is None:
        held = known[transfer.blocks] = Placed(transfer.blocks, table)
    new = len(target.slots)
    target.slots.append(_Slot(held=held, arrived=index, owner=owner))
    target.slots_of_owner.setdefault(owner, []).append(new)
    whole = number > 0 and len(held.blocks) == len(slot.held.blocks)
    if whole and slot.passed is None:
        slot.passed = (transfer.target, new, index)
    sent = Message(peer=transfer.target, payload=Payload.KV, slot=number, ranges=slot.held.at(transfer.blocks))
    received = Message(peer=transfer.source, payload=Payload.KV, slot=new, ranges=((0, held.num_tokens),))
    source.forward.sends[index].append(sent)
    source.backward.sends[index].append(sent)
    target.forward.receives[index].append(received)
    target.backward.receives[index].append(received)


def _held_in(source: _Rank, transfer: Transfer, *, owner: int, index: int) -> int:
    """The latest slot of the source that holds all blocks of the transfer by then."""
    for number in reversed(source.slots_of_owner.get(owner, ())):
        slot = source.slots[number]
        if slot.arrived < index and slot.held.holds(transfer.blocks):
            return number
    raise ValueError(
        f"round {index}: rank {transfer.source} sends blocks {transfer.blocks} to rank {transfer.target} "
        "but does not hold them together by then; send them from their owner"
    )


_PADDING = Attends.of([Attend(query=(0, 1), slot=0, key=(0, 1), causal=True)])


def _add_attends(rank: _Rank, pipeline: Pipeline | None, *, num_phases: int) -> None:
    own = rank.slots[0].held
    queries = Queries(own)
    within = attends_within(own) if own.blocks else _PADDING
    found = [attends_to(queries, slot.held, slot=number) for number, slot in enumerate(rank.slots[1:], start=1)]
    if pipeline is None:
        placed = [(0, within), *((slot.arrived + 1, each) for slot, each in zip(rank.slots[1:], found, strict=True))]
    else:
        brought = [
            Brought(attends=each, first=slot.arrived + 1, due=slot.arrived + pipeline.num_buffers - 1)
            for slot, each in zip(rank.slots[1:], found, strict=True)
        ]
        placed = list(enumerate(paced(brought, within, num_phases=num_phases)))
    for index, each in placed:
        if len(each):
            rank.forward.attends[index].append(each)
            rank.backward.attends[index].append(each)


def _add_gradients(ranks: list[_Rank], number: int, *, hold: int) -> None:
    rank = ranks[number]
    for index, slot in enumerate(rank.slots[1:], start=1):
        if slot.passed is not None:
            target, there, when = slot.passed[0], slot.passed[1], slot.passed[2] + 1
        else:
            target, there, when = slot.owner, 0, slot.arrived + hold
        size, arriving = slot.held.num_tokens, ranks[target].slots[there].held.at(slot.held.blocks)
        sent = Message(peer=target, payload=Payload.GRAD, slot=index, ranges=((0, size),))
        rank.backward.sends[when].append(sent)
        received = Message(peer=number, payload=Payload.GRAD, slot=there, ranges=arriving)
        ranks[target].backward.receives[when].append(received)
