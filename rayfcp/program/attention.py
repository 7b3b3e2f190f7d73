"""Lowering of a layout to attention programs: slots, rounds, and the way of partial gradients home.

Blocks of a context lie in slots of their own from the start, at home there as own blocks are in slot 0. A transfer
fills a new slot at its target (one for each home of its blocks), which attends to it in the next round. In backward
the same transfers bring the slots again, and the partial dK, dV of a slot goes

- to the rank that the slot was passed on to, one round after the slot went there (rings); the
  receiver adds its own part; or
- home to the owner of the blocks, one round after it was computed, when the slot was not passed on.

With a `Pacing`, `coalesce` rounds of the layout are one round of the program, attends are spread over the
phases (`paced`), and a slot's partial goes home `num_buffers` rounds after it came, when it is whole:
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

from rayfcp.program.attends import Brought, Queries, SlotBlocks, block_columns, paced
from rayfcp.program.instructions import (
    Attend,
    Attends,
    AttentionProgram,
    AttentionRound,
    Column,
    ContextSlot,
    Message,
    Payload,
    Range,
    merged,
)
from rayfcp.program.windows import WindowedQueries
from rayfcp.values import FULL, Block, LayerKind, Layout, Pacing, Transfer

Order = Mapping[tuple[int, int], int]
"""Row of a slot 0 at which each block, named by (sequence, start), begins."""

Orders = Mapping[int, Mapping[int, Order]]
"""The order of each rank's slot 0, by microbatch, then rank."""

Needed = Collection[tuple[int, int]]
"""(sequence, start) of blocks whose keys and values later microbatches need."""

BlockSet = tuple[int, ...]
"""Blocks that travel or lie together, as indices into `Layout.all_blocks`."""

_NO_ATTENDS = Attends.of(())
_PADDING = Attends.of([Attend(query=(0, 1), slot=0, key=(0, 1), causal=True)])


def lower_attention(
    layout: Layout,
    *,
    num_ranks: int,
    kind: LayerKind = FULL,
    own: Sequence[Sequence[int]] | None = None,
    earlier: Orders | None = None,
    needed: Needed = (),
) -> tuple[AttentionProgram, ...]:
    """The attention program of each rank for one microbatch, in layers of a `kind`, for which keys and
    values that no query sees need not travel (`rayfcp.program.windows`). `own`: the blocks of each rank in the order of
    its slot 0, that of the layout if absent. `earlier`: for the microbatches of the layout's context.

    Invariant: every visible (query, key) pair is computed on the query's rank in exactly one attend, forward and
    backward; both ends of a message carry the same number of tokens.

    Raises:
        ValueError: a transfer names no blocks, blocks or a rank that are not there, one rank twice, or blocks that
            its source does not hold together by then.
    """
    blocks, pacing = layout.all_blocks, layout.pacing
    coalesce, hold = (pacing.coalesce, pacing.num_buffers) if pacing else (1, 2)
    num_stages = -(-len(layout.rounds) // coalesce)
    placed = _blocks_of_ranks(layout, num_ranks=num_ranks) if own is None else own
    sets = _BlockSets(layout, blocks)
    ranks = _first_slots(placed, sets, num_stages=num_stages, hold=hold)
    for index, step in enumerate(layout.rounds):
        for transfer in step.transfers:
            _check_transfer(transfer, blocks, index=index, num_ranks=num_ranks, paced=pacing is not None)
            for part in sets.of(transfer.blocks):
                _add_transfer(ranks, transfer, part=part, sets=sets, index=index // coalesce)
    for rank in ranks:
        held = rank.slots[0].held
        queries = Queries(held) if kind == FULL else WindowedQueries(held, kind)
        _add_attends(rank, queries, pacing, num_phases=num_stages + 1)
    for number in range(num_ranks):
        _add_gradients(ranks, number, hold=hold)
    context = _context_slots(layout, num_ranks=num_ranks, earlier=earlier or {}) if layout.context else None
    return tuple(
        AttentionProgram(
            num_tokens=max(rank.slots[0].held.num_tokens, 1),
            forward=rank.forward.finished(),
            backward=rank.backward.finished(),
            context=context[number] if context else (),
            kept=_kept_ranges(rank.slots[0].held, blocks, needed=needed) if needed else (),
        )
        for number, rank in enumerate(ranks)
    )


class _RoundDrafts:
    """Rounds of a rank while they are being filled."""

    def __init__(self, num_rounds: int) -> None:
        self.sends: list[list[Message]] = [[] for _ in range(num_rounds)]
        self.receives: list[list[Message]] = [[] for _ in range(num_rounds)]
        self.attends: list[Attends] = [_NO_ATTENDS] * num_rounds

    def finished(self) -> tuple[AttentionRound, ...]:
        """The rounds, without empty ones at the end."""
        drafts = list(zip(self.sends, self.receives, self.attends, strict=True))
        while drafts and not (drafts[-1][0] or drafts[-1][1] or len(drafts[-1][2].columns)):
            drafts.pop()
        return tuple(
            AttentionRound(sends=tuple(sends), receives=tuple(receives), attends=attends)
            for sends, receives, attends in drafts
        )


@dataclass(slots=True, kw_only=True)
class _Slot:
    """Blocks of one owner that lie together on a rank; the owner has them in slot `home`, 0 or one of context.
    `arrived` is below 0 there. `passed`: (rank, its slot, round) of where it went on to."""

    held: SlotBlocks
    arrived: int
    owner: int
    home: int = 0
    passed: tuple[int, int, int] | None = None

    @property
    def at_home(self) -> bool:
        return self.arrived < 0


@dataclass(slots=True, kw_only=True)
class _RankDraft:
    """Slots and rounds of a rank. `numbers[owner, home]`: its slots with blocks that are at home there, ascending."""

    slots: list[_Slot]
    forward: _RoundDrafts
    backward: _RoundDrafts
    numbers: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def add(self, slot: _Slot) -> int:
        """The number of the new slot."""
        self.slots.append(slot)
        self.numbers.setdefault((slot.owner, slot.home), []).append(len(self.slots) - 1)
        return len(self.slots) - 1


class _BlockSets:
    """Sets of blocks that travel or lie together. `home[b]`: the slot in which block b's owner has it."""

    def __init__(self, layout: Layout, blocks: Sequence[Block]) -> None:
        self.table: Column = block_columns(blocks)
        self.home = [0] * len(layout.blocks)
        self.rank = [block.rank for block in blocks]
        self.num_contexts = len(layout.context)
        for number, context in enumerate(layout.context, start=1):
            self.home += [number] * len(context.blocks)
        self._parts: dict[BlockSet, list[BlockSet]] = {}
        self._placed: dict[BlockSet, SlotBlocks] = {}

    def of(self, blocks: BlockSet) -> list[BlockSet]:
        """The blocks of a transfer, one set for each slot that their owner has them in."""
        if not self.num_contexts:
            return [blocks]
        found = self._parts.get(blocks)
        if found is None:
            parts: dict[int, list[int]] = {}
            for block in blocks:
                parts.setdefault(self.home[block] if 0 <= block < len(self.home) else 0, []).append(block)
            found = self._parts[blocks] = [tuple(parts[home]) for home in sorted(parts)]
        return found

    def placed(self, blocks: BlockSet) -> SlotBlocks:
        """The blocks laid end to end."""
        found = self._placed.get(blocks)
        if found is None:
            found = self._placed[blocks] = SlotBlocks(blocks, self.table)
        return found

    def of_context(self, num_ranks: int) -> list[list[BlockSet]]:
        """The blocks of each context on each rank."""
        found: list[list[list[int]]] = [[[] for _ in range(num_ranks)] for _ in range(self.num_contexts)]
        for block, (home, rank) in enumerate(zip(self.home, self.rank, strict=True)):
            if home:
                found[home - 1][rank].append(block)
        return [[tuple(blocks) for blocks in of_ranks] for of_ranks in found]


def _first_slots(own: Sequence[Sequence[int]], sets: _BlockSets, *, num_stages: int, hold: int) -> list[_RankDraft]:
    """Each rank with the slot of its own blocks and those of its context; `hold`: rounds from the arrival of a slot to
    the round in which its partial gradient goes home."""
    ranks = []
    contexts = sets.of_context(len(own)) if sets.num_contexts else []
    for number, blocks in enumerate(own):
        rank = _RankDraft(slots=[], forward=_RoundDrafts(num_stages + 1), backward=_RoundDrafts(num_stages + hold))
        rank.add(_Slot(held=sets.placed(tuple(blocks)), arrived=-1, owner=number))
        for home, of_ranks in enumerate(contexts, start=1):
            rank.add(_Slot(held=sets.placed(of_ranks[number]), arrived=-1, owner=number, home=home))
        ranks.append(rank)
    return ranks


def _blocks_of_ranks(layout: Layout, *, num_ranks: int) -> list[list[int]]:
    own: list[list[int]] = [[] for _ in range(num_ranks)]
    for index, block in enumerate(layout.blocks):
        own[block.rank].append(index)
    return own


def order_of(blocks: Sequence[Block]) -> Order:
    """The order of a slot 0 that holds these blocks.

    >>> order_of([Block(sequence=0, start=4, stop=6, rank=0), Block(sequence=2, start=0, stop=1, rank=0)])
    {(0, 4): 0, (2, 0): 2}
    """
    order, at = {}, 0
    for block in blocks:
        order[block.sequence, block.start] = at
        at += block.num_tokens
    return order


def _context_slots(layout: Layout, *, num_ranks: int, earlier: Orders) -> list[tuple[ContextSlot, ...]]:
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


def _kept_ranges(held: SlotBlocks, blocks: Sequence[Block], *, needed: Needed) -> tuple[Range, ...]:
    """Ranges of a slot 0 that later microbatches need, ascending."""
    spans = (span for at, span in held.ranges.items() if (blocks[at].sequence, blocks[at].start) in needed)
    return merged(sorted(spans))


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
    if not 0 <= transfer.blocks[0] < len(blocks):  # `_held_in` refuses other blocks that are not there
        raise ValueError(
            f"round {index}: blocks are {transfer.blocks} in {where}, must be within [0, {len(blocks)}); plan again"
        )
    if paced and transfer.source != (owner := blocks[transfer.blocks[0]].rank):
        raise ValueError(
            f"round {index}: rank {transfer.source} passes on blocks of rank {owner}, which paced rounds do not "
            "do; send them from their owner"
        )


def _add_transfer(ranks: list[_RankDraft], transfer: Transfer, *, part: BlockSet, sets: _BlockSets, index: int) -> None:
    source, target = ranks[transfer.source], ranks[transfer.target]
    number = _held_in(source, transfer, part=part, sets=sets, index=index)
    slot = source.slots[number]
    held = slot.held if slot.held.blocks == part else sets.placed(part)
    new = target.add(_Slot(held=held, arrived=index, owner=slot.owner, home=slot.home))
    whole = not slot.at_home and len(held.blocks) == len(slot.held.blocks)
    if whole and slot.passed is None:
        slot.passed = (transfer.target, new, index)
    sent = Message(peer=transfer.target, payload=Payload.KV, slot=number, ranges=slot.held.at(part))
    received = Message(peer=transfer.source, payload=Payload.KV, slot=new, ranges=held.all)
    source.forward.sends[index].append(sent)
    source.backward.sends[index].append(sent)
    target.forward.receives[index].append(received)
    target.backward.receives[index].append(received)


def _held_in(source: _RankDraft, transfer: Transfer, *, part: BlockSet, sets: _BlockSets, index: int) -> int:
    """The latest slot of the source that holds all blocks of the set by then."""
    for number in reversed(source.numbers.get((sets.rank[part[0]], sets.home[part[0]]), ())):
        slot = source.slots[number]
        if slot.arrived < index and slot.held.holds(part):
            return number
    raise ValueError(
        f"round {index}: rank {transfer.source} sends blocks {part} to rank {transfer.target} "
        "but does not hold them together by then; send them from their owner"
    )


def _add_attends(
    rank: _RankDraft, queries: Queries | WindowedQueries, pacing: Pacing | None, *, num_phases: int
) -> None:
    within = queries.within() if rank.slots[0].held.blocks else _PADDING
    phases = (
        _paced(rank, queries, within, pacing, num_phases=num_phases) if pacing else _one_by_one(rank, queries, within)
    )
    for index, each in enumerate(phases):
        if len(each):
            rank.forward.attends[index] = rank.backward.attends[index] = each


def _one_by_one(rank: _RankDraft, queries: Queries | WindowedQueries, within: Attends) -> list[Attends]:
    """Keys that are there from the start, then those that each round brought."""
    brought: list[list[tuple[int, SlotBlocks]]] = [[] for _ in range(max(slot.arrived for slot in rank.slots) + 2)]
    for number, slot in enumerate(rank.slots[1:], start=1):
        brought[slot.arrived + 1].append((number, slot.held))
    return [queries.to_each(slots, first=None if index else within) for index, slots in enumerate(brought)]


def _paced(
    rank: _RankDraft, queries: Queries | WindowedQueries, within: Attends, pacing: Pacing, *, num_phases: int
) -> list[Attends]:
    brought = [
        Brought(
            attends=queries.to(slot.held, slot=number),
            first=slot.arrived + 1,
            due=num_phases - 1 if slot.at_home else pacing.due_phase(slot.arrived),
        )
        for number, slot in enumerate(rank.slots[1:], start=1)
    ]
    return paced(brought, within, num_phases=num_phases)


def _add_gradients(ranks: list[_RankDraft], number: int, *, hold: int) -> None:
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
