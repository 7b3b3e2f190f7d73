"""Replay of one microbatch on all ranks, and the proof that it computes the causal mask.

`Replay` follows the tokens in every slot, the pairs that are computed, and the partial gradients on their way home.

`check_pairs` proves that computed pairs cover masks exactly, by the edges of the keys that each query sees. The keys of
successive queries begin and end at keys that stay or move with the query: on lines of one key or of one distance from
query to key. Over each line the ends of all that is computed must be those of the mask. Only where two lines cross may
one line's surplus be the other's lack; there single points are compared.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rayfcp.program.instructions import (
    CAUSAL,
    FLIPPED,
    Attend,
    Attends,
    AttentionProgram,
    Column,
    Message,
    Payload,
)
from rayfcp.program.progress import Match, attention_channel
from rayfcp.values import FULL, LayerKind, SequenceSpec
from rayfcp.values.arrays import expanded
from rayfcp.verify.tokens import Tokens, pairs_of


def check_pairs(pairs: Column, sequences: Sequence[SequenceSpec], *, kind: LayerKind = FULL, direction: str) -> None:
    """Every visible (query, key) pair of every sequence is computed exactly once, and no other pair, in layers of
    a kind.

    `pairs`: sequence, query start and stop, key start and stop, kind (`tokens.pairs_of`).

    Raises:
        ValueError: names the direction, the sequence, and a query and a key that are wrong.
    """
    ids = np.array([sequence.id for sequence in sequences], np.int64)
    unknown = np.setdiff1d(pairs[:, 0], ids)
    if len(unknown):
        raise ValueError(f"{direction}: pairs of sequences {unknown.tolist()} that the batch does not have")
    due = [piece for sequence in sequences for piece in _edges_of_mask(sequence, kind=kind)]
    left = _left(np.concatenate((_edges_of(pairs), np.array(due, np.int64).reshape(-1, 6))))
    for sequence, row in _suspects(left).tolist():
        spec = sequences[int(np.flatnonzero(ids == sequence)[0])]
        _check_row(pairs, spec, row=row, mask=kind, direction=direction)


_STILL, _MOVING = 0, 1
"""Lines of one key; lines of one distance from query to key."""


class _Left(NamedTuple):
    """Stretches of lines on which ends do not add up: sequence, kind, key or distance, rows `[start, stop)`, and how
    many too many."""

    sequence: Column
    kind: Column
    at: Column
    start: Column
    stop: Column
    excess: Column


def _edges_of(pairs: Column) -> Column:
    """`[edges, 6]`: sequence, kind of line, key or distance, first row, row behind the last, 1 where keys begin and -1
    where they end."""
    sequence, start, stop, low, high, kind = pairs.T
    begins = np.where(kind == FLIPPED, low - start, low)
    ends = np.where(kind == CAUSAL, low - start + 1, high)
    one = np.ones(len(pairs), np.int64)
    return np.concatenate(
        [
            np.stack((sequence, np.where(kind == FLIPPED, _MOVING, _STILL), begins, start, stop, one), axis=1),
            np.stack((sequence, np.where(kind == CAUSAL, _MOVING, _STILL), ends, start, stop, -one), axis=1),
        ]
    )


def _edges_of_mask(sequence: SequenceSpec, *, kind: LayerKind) -> list[tuple[int, ...]]:
    """The same for the mask, with the opposite sign: row q sees keys [max(q - window + 1, 0), q + 1)."""
    number, last, window = sequence.id, sequence.num_tokens, kind.window
    inside = window if kind.hides(last) else last  # rows that see keys from 0 on
    edges: list[tuple[int, ...]] = [(number, _STILL, 0, 0, inside, -1), (number, _MOVING, 1, 0, last, 1)]
    if inside < last:
        edges.append((number, _MOVING, 1 - window, inside, last, -1))
    return edges


def _left(edges: Column) -> _Left:
    """Stretches of lines on which ends do not add up to zero."""
    line, sign = edges[:, :3], edges[:, 5]
    table = np.concatenate([np.column_stack((line, edges[:, 3], sign)), np.column_stack((line, edges[:, 4], -sign))])
    table = table[np.lexsort(table[:, 3::-1].T)]
    count = np.cumsum(table[:, 4])
    wrong = np.flatnonzero((count[:-1] != 0) & (table[1:, 3] > table[:-1, 3])) if len(table) else count
    sequence, kind, at, start = table[wrong, :4].T
    return _Left(sequence, kind, at, start, table[wrong + 1, 3], count[wrong])


def _suspects(left: _Left) -> Column:
    """`[rows, 2]`: sequence and row, among which is a wrong one if there is any.

    A stretch that is right crosses as many others of the other kind as it has rows.
    """
    size = left.stop - left.start
    crossed = np.bincount(left.kind, minlength=2)[1 - left.kind]
    if (size > crossed).any():
        size, left = size[size > crossed], _Left(*(column[size > crossed] for column in left))
        at, step = expanded(size)
        return np.stack((left.sequence[at], left.start[at] + step), axis=1)
    at, step = expanded(size)
    row = left.start[at] + step
    key = left.at[at] + np.where(left.kind[at] == _MOVING, row, 0)
    points = np.stack((left.sequence[at], row, key), axis=1)
    found, place = np.unique(points, axis=0, return_inverse=True)
    total = np.bincount(place.ravel(), left.excess[at], minlength=len(found))
    return found[total != 0, :2]


def _check_row(pairs: Column, sequence: SequenceSpec, *, row: int, mask: LayerKind, direction: str) -> None:
    """The keys of one query, compared at each key where anything begins or ends."""
    mine = pairs[(pairs[:, 0] == sequence.id) & (pairs[:, 1] <= row) & (row < pairs[:, 2])]
    start, low, high, kind = mine[:, 1], mine[:, 3], mine[:, 4], mine[:, 5]
    low, high = (
        np.where(kind == FLIPPED, low + row - start, low),
        np.where(kind == CAUSAL, low + row - start + 1, high),
    )
    first, last = max(mask.first_visible(row), 0), row + 1
    for key in np.unique(np.concatenate((low, high, (first, last)))).tolist():
        times = int(((low <= key) & (key < high)).sum())
        due = int(first <= key < last)
        if times != due:
            raise ValueError(
                f"{direction}: sequence {sequence.id}, query {row} on key {key} is computed {times} times, must be "
                f"{due}; each pair of the causal mask ({mask}) exactly once"
            )


SlotTokens = tuple[AttentionProgram, Mapping[int, Tokens]]
"""The attention of a rank, and the tokens in its slots at first: its own in slot 0, in others those that earlier
microbatches left."""
PartialKey = tuple[int, int, int]
"""(rank, round, slot): names what the attends of a round add to the dK, dV of a slot."""


class Replay:
    """Runs the forward or the backward rounds of all ranks in step; `held[r]` is rank r's.

    Raises:
        ValueError: a message does not meet its partner in its round, a slot is read before it is
            filled, or tokens arrive in the wrong place.
    """

    def __init__(self, held: Sequence[SlotTokens], *, backward: bool) -> None:
        rounds = [program.backward if backward else program.forward for program, _ in held]
        self._homes = [frozenset(slots) for _, slots in held]
        self._slots = [dict(slots) for _, slots in held]
        self._partials: list[dict[int, Counter[PartialKey]]] = [defaultdict(Counter) for _ in held]
        self.partials: list[PartialKey] = []
        self._pairs: list[Column] = []
        arriving: dict[int, list[Match[Message]]] = defaultdict(list)
        channel = attention_channel(rounds)
        if wrong := channel.out_of_step():
            raise ValueError(wrong)
        for match in channel.matches():
            arriving[match[2]].append(match)
        for index in range(max(map(len, rounds))):
            attends = [steps[index].attends if index < len(steps) else () for steps in rounds]
            self._step(index, attends, arriving[index])

    def pairs(self) -> Column:
        """All pairs that are computed, as `pairs_of` has them."""
        return np.concatenate(self._pairs) if self._pairs else np.empty((0, 6), np.int64)

    def partials_at_home(self) -> Counter[PartialKey]:
        """How often each of `partials` ended in a slot of its owner's that was full at first."""
        home: Counter[PartialKey] = Counter()
        for slots, homes in zip(self._partials, self._homes, strict=True):
            for slot in homes & slots.keys():
                home.update(slots[slot])
        return home

    def lost_partials(self) -> int:
        """Number of partials that ended elsewhere."""
        return sum(
            sum(count.values())
            for slots, homes in zip(self._partials, self._homes, strict=True)
            for slot, count in slots.items()
            if slot not in homes
        )

    def _step(self, index: int, attends: Sequence[Sequence[Attend]], arriving: Sequence[Match[Message]]) -> None:
        carried = [self._depart(source, sent) for source, _, _, _, sent, _ in arriving]
        for rank, mine in enumerate(attends):
            if mine:
                self._attend(Attends.of(mine), rank=rank, index=index)
        for (source, target, _, _, sent, received), partial in zip(arriving, carried, strict=True):
            tokens = self._content(source, sent.slot).cut(sent.ranges)
            if received.payload is Payload.KV:
                if received.slot in self._slots[target] or received.ranges != ((0, sent.num_tokens),):
                    raise ValueError(
                        f"round {index}: rank {target} receives into slot {received.slot} twice or in part"
                    )
                self._slots[target][received.slot] = tokens
            elif self._content(target, received.slot).cut(received.ranges) != tokens:
                raise ValueError(
                    f"round {index}: gradient of {tokens} from rank {source} lands elsewhere on rank {target}"
                )
            else:
                self._partials[target][received.slot] += partial

    def _depart(self, source: int, sent: Message) -> Counter[PartialKey]:
        if sent.payload is Payload.KV:
            return Counter()
        whole = self._content(source, sent.slot).num_tokens
        if sent.num_tokens != whole:
            raise ValueError(f"rank {source} sends the gradient of {sent.num_tokens} of the {whole} tokens: {sent}")
        return self._partials[source].pop(sent.slot, Counter())

    def _attend(self, attends: Attends, *, rank: int, index: int) -> None:
        used = np.unique(attends.columns[:, 2]).tolist()
        slots = {slot: self._content(rank, slot) for slot in (0, *used)}
        self._pairs.append(pairs_of(attends, slots=slots, rank=rank))
        for slot in used:
            self.partials.append((rank, index, slot))
            self._partials[rank][slot][rank, index, slot] += 1

    def _content(self, rank: int, slot: int) -> Tokens:
        tokens = self._slots[rank].get(slot)
        if tokens is None:
            raise ValueError(f"rank {rank} reads slot {slot} before it is filled")
        return tokens
