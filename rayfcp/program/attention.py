"""Lowering of a layout to attention programs: slots, rounds, and the way of partial gradients home.

A transfer fills a new slot at its target, which attends to it in the next round. In backward the same
transfers bring the slots again, and the partial dK, dV of a slot goes

- to the rank that the slot was passed on to, one round after the slot went there (rings); the
  receiver adds its own part; or
- home to the owner of the blocks, one round after it was computed, when the slot was not passed on.

So every partial travels one hop per round, each hop the transpose or the follower of a forward
transfer. Keys and values of a round are a matching, as in the layout. Of gradients, a rank sends in round r
at most one partial on (behind its transfer of round r - 1) and at most one home (of the slot that came in
round r - 2, unless passed on); it receives at most one that is passed on, and one home for each slot of
its blocks that came to a rank in round r - 2 and stayed there. So gradients are a matching too where
every slot comes from its owner (transposed rounds) and in rings (all pass on, then all send home). Other
relays break it: a rank may then pass a partial on and send another home in one round, and an owner may
receive from several ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rayfcp.program.attends import attends_of
from rayfcp.program.instructions import Attend, AttentionProgram, AttentionRound, Message, Payload, Range
from rayfcp.values import Block, Layout, Mask, Transfer


@dataclass(slots=True)
class _Slot:
    """Blocks that lie together on a rank: local indices of blocks -> range in the slot."""

    ranges: dict[int, Range]
    arrived: int
    owner: int
    source: int
    passed_to: int | None = None
    passed_in: int | None = None

    @property
    def num_tokens(self) -> int:
        return max((stop for _, stop in self.ranges.values()), default=0)


@dataclass(slots=True)
class _Rank:
    slots: list[_Slot]
    forward: list[AttentionRound]
    backward: list[AttentionRound]
    slot_of_block: dict[int, int] = field(default_factory=dict)


def lower_attention(layout: Layout, *, masks: Mapping[int, Mask], num_ranks: int) -> tuple[AttentionProgram, ...]:
    """The attention program of each rank for one microbatch.

    Invariant: every (query, key) cell of every mask is computed on the query's rank in exactly one
    attend, forward and backward; both ends of a message carry the same number of tokens.

    Raises:
        ValueError: a transfer names no blocks, one rank twice, a rank that is not there, or blocks that its
            source does not hold together by then; or a block names a sequence without a mask.
    """
    unknown = sorted({block.sequence for block in layout.blocks} - masks.keys())
    if unknown:
        raise ValueError(f"blocks name sequences {unknown}, which the batch does not have; plan the batch again")
    ranks = [_own_slot(layout, rank) for rank in range(num_ranks)]
    for index, step in enumerate(layout.rounds):
        for transfer in step.transfers:
            _check_transfer(transfer, index=index, num_ranks=num_ranks)
            _add_transfer(ranks, transfer, blocks=layout.blocks, index=index)
    for rank in ranks:
        _add_attends(rank, blocks=layout.blocks, masks=masks)
    for number in range(num_ranks):
        _add_gradients(ranks, number)
    return tuple(
        AttentionProgram(
            num_tokens=max(rank.slots[0].num_tokens, 1),
            forward=_trimmed(rank.forward),
            backward=_trimmed(rank.backward),
        )
        for rank in ranks
    )


def _own_slot(layout: Layout, rank: int) -> _Rank:
    ranges: dict[int, Range] = {}
    offset = 0
    for index, block in enumerate(layout.blocks):
        if block.rank == rank:
            ranges[index] = (offset, offset + block.num_tokens)
            offset += block.num_tokens
    own = _Slot(ranges=ranges, arrived=-1, owner=rank, source=rank)
    num_rounds = len(layout.rounds)
    return _Rank(
        slots=[own],
        forward=[AttentionRound()] * (num_rounds + 1),
        backward=[AttentionRound()] * (num_rounds + 2),
        slot_of_block=dict.fromkeys(ranges, 0),
    )


def _check_transfer(transfer: Transfer, *, index: int, num_ranks: int) -> None:
    if not transfer.blocks:
        raise ValueError(
            f"round {index}: blocks is empty in the transfer from rank {transfer.source} to rank {transfer.target}, "
            "must name at least one block; drop the transfer"
        )
    ends = (transfer.source, transfer.target)
    if transfer.source == transfer.target or any(not 0 <= rank < num_ranks for rank in ends):
        raise ValueError(
            f"round {index}: a transfer has source {transfer.source} and target {transfer.target}, must be two ranks "
            f"of [0, {num_ranks}); drop it or name another rank"
        )


def _add_transfer(ranks: list[_Rank], transfer: Transfer, *, blocks: tuple[Block, ...], index: int) -> None:
    source, target = ranks[transfer.source], ranks[transfer.target]
    held_in = {source.slot_of_block.get(block) for block in transfer.blocks}
    number = held_in.pop()
    if number is None or held_in or source.slots[number].arrived >= index:
        raise ValueError(
            f"round {index}: rank {transfer.source} sends blocks {transfer.blocks} to rank {transfer.target} "
            "but does not hold them together by then; send them from their owner"
        )
    slot = source.slots[number]
    ranges: dict[int, Range] = {}
    offset = 0
    for block in transfer.blocks:
        ranges[block] = (offset, offset + blocks[block].num_tokens)
        offset = ranges[block][1]
    new = len(target.slots)
    target.slots.append(
        _Slot(ranges=ranges, arrived=index, owner=blocks[transfer.blocks[0]].rank, source=transfer.source)
    )
    target.slot_of_block |= dict.fromkeys(ranges, new)
    whole = number > 0 and len(ranges) == len(slot.ranges)
    if whole and slot.passed_to is None:
        slot.passed_to, slot.passed_in = transfer.target, index
    sent = merged([slot.ranges[block] for block in transfer.blocks])
    for rounds in (source.forward, source.backward):
        _post(rounds, index, send=Message(peer=transfer.target, payload=Payload.KV, slot=number, ranges=sent))
    for rounds in (target.forward, target.backward):
        _post(
            rounds,
            index,
            receive=Message(peer=transfer.source, payload=Payload.KV, slot=new, ranges=((0, offset),)),
        )


def _add_attends(rank: _Rank, *, blocks: tuple[Block, ...], masks: Mapping[int, Mask]) -> None:
    own = rank.slots[0].ranges
    for number, slot in enumerate(rank.slots):
        found = attends_of(own, slot.ranges, blocks=blocks, masks=masks, slot=number)
        if not own and number == 0:
            found = (Attend(query=(0, 1), slot=0, key=(0, 1), causal=True),)
        for rounds in (rank.forward, rank.backward):
            index = slot.arrived + 1
            rounds[index] = replace(rounds[index], attends=rounds[index].attends + found)


def _add_gradients(ranks: list[_Rank], number: int) -> None:
    rank = ranks[number]
    for index, slot in enumerate(rank.slots[1:], start=1):
        if slot.passed_to is not None and slot.passed_in is not None:
            target, when = slot.passed_to, slot.passed_in + 1
            there = ranks[target].slot_of_block[next(iter(slot.ranges))]
        else:
            target, when, there = slot.owner, slot.arrived + 2, 0
        size = slot.num_tokens
        arriving = [ranks[target].slots[there].ranges[block] for block in slot.ranges]
        _post(rank.backward, when, send=Message(peer=target, payload=Payload.GRAD, slot=index, ranges=((0, size),)))
        _post(
            ranks[target].backward,
            when,
            receive=Message(peer=number, payload=Payload.GRAD, slot=there, ranges=merged(arriving)),
        )


def _post(
    rounds: list[AttentionRound], index: int, *, send: Message | None = None, receive: Message | None = None
) -> None:
    old = rounds[index]
    rounds[index] = replace(
        old,
        sends=old.sends + ((send,) if send else ()),
        receives=old.receives + ((receive,) if receive else ()),
    )


def merged(ranges: list[Range]) -> tuple[Range, ...]:
    """Ranges in the same order with neighbours that touch joined.

    >>> merged([(0, 2), (2, 5), (7, 9)])
    ((0, 5), (7, 9))
    """
    joined: list[Range] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def _trimmed(rounds: list[AttentionRound]) -> tuple[AttentionRound, ...]:
    last = max((i for i, step in enumerate(rounds) if step.sends or step.receives or step.attends), default=-1)
    return tuple(rounds[: last + 1])
