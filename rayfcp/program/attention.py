"""Lowering of a layout to attention: slots, messages, and the way of partial gradients home, for all ranks at once.

Blocks of a context lie in slots of their own from the start, at home there as own blocks are in slot 0. A transfer
fills a new slot at its target (one for each home of its blocks), which attends to it in the next round. In backward
the same transfers bring the slots again, and the partial dK, dV of a slot goes

- to the rank that the slot was passed on to, one round after the slot went there (rings); the
  receiver adds its own part; or
- home to the owner of the blocks, one round after it was computed, when the slot was not passed on.

With a `Pacing`, `coalesce` rounds of the layout are one round of the program, attends are spread over the
phases (`rayfcp.program.kernels.pace`), and a slot's partial goes home `num_buffers` rounds after it came,
when it is whole: the transposed rounds again. Slots then come from their owners.

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
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np

from rayfcp.plan.layout import Blocks, Placement
from rayfcp.program.attends import BlockSets
from rayfcp.program.table import AttentionTable, ContextRows, KeptRows, Messages, Phases, Slots, Units
from rayfcp.values import FULL, LayerKind, Pacing
from rayfcp.values.arrays import Ints, expanded

Number = TypeVar("Number", int, Ints)


def padding_number(rank: Number) -> Number:
    """The sequence number of the padding token of a rank without tokens; no batch has it."""
    return -1 - rank


def lower_attention(
    placement: Placement,
    units: Units,
    *,
    kind: LayerKind = FULL,
    earlier: Mapping[int, AttentionTable] | None = None,
    needed: Blocks | None = None,
) -> AttentionTable:
    """The attention of all ranks for one microbatch, in layers of a `kind`, for which keys and values that no query
    sees need not travel (`rayfcp.program.windows`). `units`: the ranks that share out heads. `earlier`: of the
    microbatches of the layout's context. `needed`: blocks whose keys and values later microbatches need.

    `source` and `target` of transfers number ranks, of which each is a unit of its own, or, where the layout has
    `heads`, units.

    Invariant: every visible (query, key) pair is computed once for each head, on the query's rank or one that shares
    heads with it, forward and backward; both ends of a message carry the same tokens.

    Raises:
        ValueError: a transfer names no blocks, blocks or a rank that are not there, one rank twice, or blocks that
            its source does not hold together by then; the context's microbatch has its blocks elsewhere.
    """
    coalesce, hold = (placement.pacing.coalesce, placement.pacing.num_buffers) if placement.pacing else (1, 2)
    held = _Held(placement, units, coalesce=coalesce)
    moves = held.moves
    slots, source_slot, target_slot = _slots(held, moves)
    keys = Messages(
        round=moves.round, source=moves.source, target=moves.target, source_slot=source_slot, target_slot=target_slot
    )
    none = np.empty(0, np.int64)
    table = AttentionTable(
        units=units,
        tokens=np.bincount(held.blocks.rank[held.home == 0], held.blocks.num_tokens[held.home == 0]).astype(np.int64),
        sets=held.sets,
        slots=slots,
        keys=keys,
        gradients=_gradients(held, slots, keys, hold=hold),
        context=_context(placement, held, earlier or {}),
        kept=_kept(held, needed),
        phases=Phases(none, none.reshape(0, 6)),
        kind=kind,
    )
    if not placement.pacing:
        return table
    num_phases = -(-placement.num_rounds // coalesce) + 1
    return replace(table, phases=_phases(table, placement.pacing, num_phases=num_phases))


class _Moves(NamedTuple):
    """Transfers between units, in order: those of the layout, one for each home of its blocks."""

    round: Ints
    source: Ints
    target: Ints
    set: Ints


class _Held:
    """Blocks of a placement and of padding, and the sets of them that lie in slots: first those at home, set
    `unit * num_homes + home`, then those that `moves` carry. Block b is at home in slot `home[b]` of unit `unit[b]`;
    `owner` and `home_of` say the same of sets."""

    def __init__(self, placement: Placement, units: Units, *, coalesce: int) -> None:
        own = placement.own
        padded: Ints = np.setdiff1d(np.arange(units.num_ranks), own.rank)
        padding = Blocks(padding_number(padded), np.zeros_like(padded), np.ones_like(padded), padded)
        self.blocks = Blocks.joined([placement.blocks, padding])
        self.num_placed, self.num_homes = len(placement.blocks.rank), 1 + len(placement.contexts)
        counts = [count for _, count in placement.contexts]
        self.home = np.repeat(np.arange(self.num_homes + 1) % self.num_homes, [len(own.rank), *counts, len(padded)])
        unit, position = units.of_ranks()
        self.unit = unit[self.blocks.rank]
        self._end = unit if placement.heads == 1 else np.arange(units.num_units)  # by the number in a transfer
        at_home = self.unit * self.num_homes + self.home
        position = np.where(self.home == 0, position[self.blocks.rank], 0)
        self.block_of_row = np.lexsort((position, at_home))
        self._counts = np.bincount(at_home, minlength=units.num_units * self.num_homes)
        number = np.arange(units.num_units * self.num_homes)
        self.owner, self.home_of = np.divmod(number, self.num_homes)
        self.paced = placement.pacing is not None
        self.num_units, self.first_rank = units.num_units, units.ranks[units.first[:-1]]
        self.moves = self._moves(placement, coalesce=coalesce)
        blocks, first = self.blocks.at(self.block_of_row), np.append(0, np.cumsum(self._counts))
        self.sets = BlockSets(first, sequence=blocks.sequence, start=blocks.start, stop=blocks.stop)

    def _moves(self, placement: Placement, *, coalesce: int) -> _Moves:
        """The transfers; the sets that they carry are added."""
        transfers = placement.transfers
        self._check(placement)
        first, block = transfers.first, transfers.block
        sets = np.repeat(np.arange(len(first) - 1), np.diff(first))
        if self.num_homes > 1:  # a set of several homes becomes several
            order = np.lexsort((self.home[block], sets))
            sets, block = sets[order], block[order]
            opens = np.append(True, (sets[1:] != sets[:-1]) | (self.home[block][1:] != self.home[block][:-1]))
            opens = opens[: len(sets)]
            part_of = sets[opens]
            first = np.append(np.flatnonzero(opens), len(sets))
        else:
            part_of = np.arange(len(first) - 1)
        number = self._add(first, block)
        parts = np.searchsorted(part_of, np.arange(len(transfers.first)))
        row, part = expanded(np.diff(parts)[transfers.carried])
        carried = number[parts[:-1][transfers.carried][row] + part]
        source, target = (self._end[end[row]] for end in (transfers.source, transfers.target))
        return _Moves(transfers.round[row] // coalesce, source, target, carried)

    def _add(self, first: Ints, block: Ints) -> Ints:
        """The numbers of these sets, of blocks with one home; those that are all blocks at a home, in order, are it."""
        sizes = np.diff(first)
        some = sizes > 0
        head = np.append(block, 0)[first[:-1]]
        home = np.where(some, self.unit[head] * self.num_homes + self.home[head], 0)
        at = np.repeat(np.arange(len(sizes)), sizes)
        whole = some & (sizes == self._counts[home])
        if whole.any():
            start = (np.cumsum(self._counts) - self._counts)[home]
            place = np.minimum(start[at] + np.arange(len(block)) - first[:-1][at], len(self.block_of_row) - 1)
            whole &= np.bincount(at[self.block_of_row[place] != block], minlength=len(sizes)) == 0
        number = np.where(whole, home, len(self._counts) + np.cumsum(~whole) - 1)
        new = ~whole[at]
        self.block_of_row = np.concatenate((self.block_of_row, block[new]))
        self._counts = np.concatenate((self._counts, sizes[~whole]))
        self.owner = np.concatenate((self.owner, self.unit[head][~whole]))
        self.home_of = np.concatenate((self.home_of, self.home[head][~whole]))
        return number

    def members(self, number: int) -> Ints:
        """The blocks of a set."""
        return self.block_of_row[self.sets.first[number] : self.sets.first[number + 1]]

    def _check(self, placement: Placement) -> None:
        """
        Raises:
            ValueError: a transfer names no blocks, blocks or a rank that are not there, or one rank twice; or passes
                blocks on where rounds are paced.
        """
        transfers, num_blocks, num_ends = placement.transfers, self.num_placed, len(self._end)
        size = np.diff(transfers.first)[transfers.carried]
        head = np.append(transfers.block, -1)[transfers.first[transfers.carried]]
        low = np.minimum(transfers.source, transfers.target)
        high = np.maximum(transfers.source, transfers.target)
        wrong = (size == 0) | (low == high) | (low < 0) | (high >= num_ends) | (head < 0) | (head >= num_blocks)
        if self.paced and not wrong.any():
            wrong |= self.unit[head] != self._end[transfers.source]
        if wrong.any():
            raise ValueError(self._problem(placement, int(np.argmax(wrong))))
        if len(transfers.block) and not 0 <= transfers.block.min() <= transfers.block.max() < num_blocks:
            outside = (transfers.block < 0) | (transfers.block >= num_blocks)
            carried = np.searchsorted(transfers.first, np.argmax(outside), side="right") - 1
            row = int(np.argmax(transfers.carried == carried))
            number, source, target = (int(column[row]) for column in transfers[:3])
            raise ValueError(_not_held(number, source, target, blocks=_blocks_of(placement, row)))

    def _problem(self, placement: Placement, row: int) -> str:
        transfers, number = placement.transfers, int(placement.transfers.round[row])
        source, target = int(transfers.source[row]), int(transfers.target[row])
        where, blocks = f"the transfer from rank {source} to rank {target}", _blocks_of(placement, row)
        if not blocks:
            return f"round {number}: blocks is empty in {where}, must name at least one block; drop the transfer"
        if source == target or not 0 <= min(source, target) <= max(source, target) < len(self._end):
            return (
                f"round {number}: a transfer has source {source} and target {target}, must be two ranks "
                f"of [0, {len(self._end)}); drop it or name another rank"
            )
        if not 0 <= blocks[0] < self.num_placed:
            return f"round {number}: blocks are {blocks} in {where}, must be within [0, {self.num_placed}); plan again"
        return (
            f"round {number}: rank {source} passes on blocks of rank {self.unit[blocks[0]]}, which paced rounds do not "
            "do; send them from their owner"
        )


def _blocks_of(placement: Placement, row: int) -> tuple[int, ...]:
    transfers = placement.transfers
    carried = transfers.carried[row]
    return tuple(transfers.block[transfers.first[carried] : transfers.first[carried + 1]].tolist())


def _not_held(number: int, source: int, target: int, *, blocks: Sequence[int]) -> str:
    return (
        f"round {number}: rank {source} sends blocks {tuple(blocks)} to rank {target} "
        "but does not hold them together by then; send them from their owner"
    )


def _slots(held: _Held, moves: _Moves) -> tuple[Slots, Ints, Ints]:
    """All slots, and of each transfer the slot that it leaves and the one that it fills.

    A transfer leaves the slot that came last of those that hold all its blocks by then.

    Raises:
        ValueError: there is none.
    """
    num_units, homes = held.num_units, held.num_homes
    order = np.argsort(moves.target, kind="stable")
    counts = np.bincount(moves.target, minlength=num_units)
    target_slot = np.empty(len(order), np.int64)
    target_slot[order] = homes + np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = np.append(0, np.cumsum(counts + homes))
    slots = Slots(first=first, set=np.empty(first[-1], np.int64), arrived=np.full(first[-1], -1))
    at_home = (first[:-1, None] + np.arange(homes)).ravel()
    filled = first[moves.target] + target_slot
    slots.set[at_home], slots.set[filled] = np.arange(num_units * homes), moves.set
    slots.arrived[filled] = moves.round
    source_slot = np.where(held.owner[moves.set] == moves.source, held.home_of[moves.set], -1)
    _check_owners(held, moves, np.flatnonzero(source_slot >= 0))
    relayed = np.flatnonzero(source_slot < 0)
    if len(relayed):
        source_slot[relayed] = _relaying(held, moves, target_slot, relayed)
    return slots, source_slot, target_slot


def _check_owners(held: _Held, moves: _Moves, rows: Ints) -> None:
    """
    Raises:
        ValueError: a set that leaves its owner has blocks of others.
    """
    sets = np.unique(moves.set[rows])
    row, at = held.sets.rows(sets)
    block = held.block_of_row[row]
    strange = held.unit[block] != held.owner[sets[at]]
    if strange.any():
        number = sets[at[np.argmax(strange)]]
        raise ValueError(_lacking(held, moves, int(rows[np.argmax(moves.set[rows] == number)])))


def _lacking(held: _Held, moves: _Moves, row: int) -> str:
    number, source, target = (int(column[row]) for column in moves[:3])
    return _not_held(number, source, target, blocks=held.members(moves.set[row]).tolist())


def _relaying(held: _Held, moves: _Moves, target_slot: Ints, relayed: Ints) -> Ints:
    """The slots from which these transfers pass on what came before."""
    num_rounds, num_sets = int(moves.round.max()) + 1, len(held.sets)
    came = (moves.target * num_sets + moves.set) * num_rounds + moves.round
    order = np.argsort(came, kind="stable")
    wanted = (moves.source * num_sets + moves.set) * num_rounds + moves.round
    last = np.searchsorted(came[order], wanted[relayed]) - 1
    row = order[np.maximum(last, 0)]
    same = (last >= 0) & (moves.target[row] == moves.source[relayed]) & (moves.set[row] == moves.set[relayed])
    found = np.where(same, target_slot[row], -1)
    for at in np.flatnonzero(~same).tolist():  # part of what came: layouts by hand
        found[at] = target_slot[_holding(held, moves, int(relayed[at]))]
    return found


def _holding(held: _Held, moves: _Moves, row: int) -> int:
    """The latest transfer to the source of transfer `row` that brought all its blocks, and more."""
    blocks, number = held.members(moves.set[row]), moves.set[row]
    alike = (held.owner[moves.set] == held.owner[number]) & (held.home_of[moves.set] == held.home_of[number])
    came = np.flatnonzero(alike & (moves.target == moves.source[row]) & (moves.round < moves.round[row]))
    for earlier in came[::-1].tolist():
        if np.isin(blocks, held.members(moves.set[earlier])).all():
            return int(earlier)
    raise ValueError(_lacking(held, moves, row))


def _gradients(held: _Held, slots: Slots, keys: Messages, *, hold: int) -> Messages:
    """One message for each slot that came: on to where the slot was passed on to first, or home."""
    came, left = slots.first[keys.target] + keys.target_slot, slots.first[keys.source] + keys.source_slot
    sizes = np.diff(held.sets.first)
    on = np.flatnonzero((slots.arrived[left] >= 0) & (sizes[slots.set[left]] == sizes[slots.set[came]]))
    passed = np.full(len(slots.set), -1)
    passed[left[on[::-1]]] = on[::-1]  # the first of several
    follower, carried = passed[came], slots.set[came]
    goes_on = np.flatnonzero(follower >= 0)
    rounds, target, there = keys.round + hold, held.owner[carried], held.home_of[carried]
    rounds[goes_on] = keys.round[follower[goes_on]] + 1
    target[goes_on], there[goes_on] = (column[follower[goes_on]] for column in (keys.target, keys.target_slot))
    order = np.lexsort((keys.target_slot, keys.target, rounds))
    return Messages(*(column[order] for column in (rounds, keys.target, target, keys.target_slot, there)))


def _context(placement: Placement, held: _Held, earlier: Mapping[int, AttentionTable]) -> ContextRows:
    """The slots of context that hold blocks, and where these lie in slot 0 of the earlier microbatch.

    Raises:
        ValueError: a context's microbatch does not have its blocks on the same rank, in the same order, side by side.
    """
    found: list[tuple[int, int, int, int, int]] = []
    for number, (microbatch, _) in enumerate(placement.contexts, start=1):
        for unit in np.unique(held.unit[held.home == number]).tolist():
            blocks = held.blocks.at(held.members(unit * held.num_homes + number))
            start, stop = _span(blocks, earlier.get(microbatch), rank=held.first_rank[unit], microbatch=microbatch)
            found.append((unit, number, microbatch, start, stop))
    return ContextRows(*np.array(sorted(found), np.int64).reshape(-1, 5).T)


def _span(blocks: Blocks, earlier: AttentionTable | None, *, rank: int, microbatch: int) -> tuple[int, int]:
    """Where blocks lie in the slot 0 that the unit of a rank had in an earlier microbatch."""
    sets = earlier.sets if earlier else None
    row = np.full(len(blocks.rank), -1)
    if earlier and sets:
        own = earlier.slots.set[earlier.slots.first[earlier.place_of_rank[0][rank]]]
        row = sets.find(np.full(len(row), own), sequence=blocks.sequence, start=blocks.start)
    if (row < 0).any() or sets is None:
        at = int(np.argmax(row < 0))
        raise ValueError(
            f"context of microbatch {microbatch}: tokens [{blocks.start[at]}, {blocks.stop[at]}) of sequence "
            f"{blocks.sequence[at]} are not on rank {blocks.rank[at]} there; keep a sequence's slices on the same "
            "ranks, with the same primitive"
        )
    begin = sets.begin[row]
    end = begin + blocks.num_tokens
    if (begin[1:] != end[:-1]).any():
        raise ValueError(
            f"context of microbatch {microbatch}: blocks of sequence {blocks.sequence[0]} on rank {rank} "
            f"lie at {tuple(zip(begin.tolist(), end.tolist(), strict=True))}, must lie side by side in their order; "
            "plan the batch again"
        )
    return int(begin[0]), int(end[-1])


def _kept(held: _Held, needed: Blocks | None) -> KeptRows:
    """Ranges of each unit's slot 0 that later microbatches need, ascending."""
    none = np.empty(0, np.int64)
    if needed is None:
        return KeptRows(none, none, none)
    sets = held.sets
    home = np.arange(held.num_units) * held.num_homes
    row, unit = sets.rows(home)
    wanted = BlockSets(np.array([0, len(needed.start)]), sequence=needed.sequence, start=needed.start, stop=needed.stop)
    kept = wanted.find(np.zeros_like(row), sequence=sets.sequence[row], start=sets.start[row]) >= 0
    row, unit = row[kept], unit[kept]
    begin, end = sets.begin[row], sets.end[row]
    opens = np.append(True, (unit[1:] != unit[:-1]) | (begin[1:] != end[:-1]))[: len(row)]
    stop = end[np.append(opens[1:], True)[: len(row)]]
    return KeptRows(unit[opens], begin[opens], stop)


def _phases(table: AttentionTable, pacing: Pacing, *, num_phases: int) -> Phases:
    """The attends of a table, spread over phases."""
    from rayfcp.program.kernels.pace import pace  # ranks that run programs compile nothing

    parts = [(rows[found.slot], found.columns) for rows, found in table.attends()]
    row, columns = (np.concatenate(each) for each in zip(*parts, strict=True))
    arrived = table.slots.arrived[row]
    due = np.where(arrived < 0, num_phases - 1, np.minimum(pacing.due_phase(arrived), num_phases - 1))
    first = np.searchsorted(row, table.slots.first)
    columns, bounds = pace(columns, arrived + 1, due, first, num_phases)
    return Phases(bounds, columns)
