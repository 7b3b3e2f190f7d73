"""Exact cover of masks by computed cells, counted by the edges of what each row sees.

What a row of queries sees begins and ends at keys that stay or move with the row: on lines of one key or of one
distance from query to key. Over each line the ends of all that is computed must be those of the mask. Only where two
lines cross may what one has too much be what the other lacks; there single points are compared.

Symbolic replay of one microbatch on all ranks: which tokens every slot holds, which cells are
computed, and which partial gradients reach whom.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rayfcp.program.columns import CAUSAL, FLIPPED, Attends, Column, Tokens, cells_of, expanded
from rayfcp.program.instructions import AttentionProgram, AttentionRound, Message, Payload
from rayfcp.values import Band, Edge, SequenceSpec, bands_of


def check_cells(cells: Column, sequences: Sequence[SequenceSpec], *, window: int = 0, direction: str) -> None:
    """Every (query, key) cell of every mask is computed exactly once, and no other cell, in layers with `window`.

    `cells`: sequence, query start and stop, key start and stop, kind (`tokens.cells_of`).

    Raises:
        ValueError: names the direction, the sequence, and a query and a key that are wrong.
    """
    ids = np.array([sequence.id for sequence in sequences], np.int64)
    unknown = np.setdiff1d(cells[:, 0], ids)
    if len(unknown):
        raise ValueError(f"{direction}: cells of sequences {unknown.tolist()} that the batch does not have")
    due = [piece for sequence in sequences for piece in _edges_of_mask(sequence, window=window)]
    left = _left(np.concatenate((_edges_of(cells), np.array(due, np.int64).reshape(-1, 6))))
    for sequence, row in _suspects(left).tolist():
        spec = sequences[int(np.flatnonzero(ids == sequence)[0])]
        _check_row(cells, spec, row=row, window=window, direction=direction)


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


def _edges_of(cells: Column) -> Column:
    """`[edges, 6]`: sequence, kind of line, key or distance, first row, row behind the last, 1 where keys begin and -1
    where they end."""
    sequence, start, stop, low, high, kind = cells.T
    begins = np.where(kind == FLIPPED, low - start, low)
    ends = np.where(kind == CAUSAL, low - start + 1, high)
    one = np.ones(len(cells), np.int64)
    return np.concatenate(
        [
            np.stack((sequence, np.where(kind == FLIPPED, _MOVING, _STILL), begins, start, stop, one), axis=1),
            np.stack((sequence, np.where(kind == CAUSAL, _MOVING, _STILL), ends, start, stop, -one), axis=1),
        ]
    )


def _edges_of_mask(sequence: SequenceSpec, *, window: int) -> list[tuple[int, ...]]:
    """The same of a mask, with the opposite sign. Each row of a band sees some key."""
    found: list[tuple[int, ...]] = []
    for band in bands_of(sequence, window=window):
        for edge, sign in ((band.low, -1), (band.high, 1)):
            for kind, at, start, stop in _clipped(edge, band, num_tokens=sequence.num_tokens):
                found.append((sequence.id, kind, at, start, stop, sign))
    return found


def _clipped(edge: Edge, band: Band, *, num_tokens: int) -> list[tuple[int, int, int, int]]:
    """Kind, place and rows of an edge within a sequence: at its first key, on its way, and behind its last one."""
    if not edge.slides:
        return [(_STILL, min(max(edge.at, 0), num_tokens), band.start, band.stop)]
    first, last = (min(max(row, band.start), band.stop) for row in (-edge.at, num_tokens - edge.at))
    parts = [
        (_STILL, 0, band.start, first),
        (_MOVING, edge.at, first, last),
        (_STILL, num_tokens, last, band.stop),
    ]
    return [part for part in parts if part[2] < part[3]]


def _left(edges: Column) -> _Left:
    """Where ends on a line do not add up to nothing."""
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


def _check_row(cells: Column, sequence: SequenceSpec, *, row: int, window: int, direction: str) -> None:
    """What a query sees, key by key, as far as anything begins or ends."""
    mine = cells[(cells[:, 0] == sequence.id) & (cells[:, 1] <= row) & (row < cells[:, 2])]
    start, low, high, kind = mine[:, 1], mine[:, 3], mine[:, 4], mine[:, 5]
    low, high = (
        np.where(kind == FLIPPED, low + row - start, low),
        np.where(kind == CAUSAL, low + row - start + 1, high),
    )
    spans = [
        (max(band.low.of(row), 0), min(band.high.of(row), sequence.num_tokens))
        for band in bands_of(sequence, window=window)
        if band.start <= row < band.stop
    ]
    edges = np.array(spans, np.int64).ravel()
    for key in np.unique(np.concatenate((low, high, edges))).tolist():
        times = int(((low <= key) & (key < high)).sum())
        due = sum(first <= key < last for first, last in spans)
        if times != due:
            raise ValueError(
                f"{direction}: sequence {sequence.id}, query {row} on key {key} is computed {times} times, must be "
                f"{due}; each cell of the {_mask_in_words(sequence, window=window)} exactly once"
            )


def _mask_in_words(sequence: SequenceSpec, *, window: int) -> str:
    more = [f"window {window}"] if window else []
    more += ["mutual pictures"] if sequence.mutual else []
    return f"{sequence.mask.value} mask" + (f" with {' and '.join(more)}" if more else "")


Held = tuple[AttentionProgram, Mapping[int, Tokens]]
"""A rank's attention, and what lies in its slots at first: its own tokens in slot 0, in others what earlier
microbatches left."""
PartialKey = tuple[int, int, int]
"""(rank, round, slot): names what the attends of a round add to the dK, dV of a slot."""


class Replay:
    """Runs the forward or the backward rounds of all ranks in step; `held[r]` is rank r's.

    Raises:
        ValueError: a message does not meet its partner in its round, a slot is read before it is
            filled, or tokens arrive in the wrong place.
    """

    def __init__(self, held: Sequence[Held], *, backward: bool) -> None:
        self._rounds = [program.backward if backward else program.forward for program, _ in held]
        self._homes = [frozenset(slots) for _, slots in held]
        self._slots = [dict(slots) for _, slots in held]
        self._partials: list[dict[int, Counter[PartialKey]]] = [defaultdict(Counter) for _ in held]
        self.partials: list[PartialKey] = []
        self._cells: list[Column] = []
        for index in range(max(len(rounds) for rounds in self._rounds)):
            self._step(index)

    def cells(self) -> Column:
        """All cells that are computed, as `cells_of` has them."""
        return np.concatenate(self._cells) if self._cells else np.empty((0, 6), np.int64)

    def partials_at_home(self) -> Counter[PartialKey]:
        """How often each of `partials` is contained in a slot of its owner's that was full at first, at the end."""
        home: Counter[PartialKey] = Counter()
        for slots, homes in zip(self._partials, self._homes, strict=True):
            for slot in homes & slots.keys():
                home.update(slots[slot])
        return home

    def lost_partials(self) -> int:
        """Partials that ended elsewhere."""
        return sum(
            sum(count.values())
            for slots, homes in zip(self._partials, self._homes, strict=True)
            for slot, count in slots.items()
            if slot not in homes
        )

    def _step(self, index: int) -> None:
        rounds = [each[index] if index < len(each) else AttentionRound() for each in self._rounds]
        arrivals = list(self._matched(rounds, index))
        carried = [self._depart(source, sent) for source, sent, _, _ in arrivals]
        for rank, step in enumerate(rounds):
            if step.attends:
                self._attend(Attends.of(step.attends), rank=rank, index=index)
        for (source, sent, target, received), partial in zip(arrivals, carried, strict=True):
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

    def _matched(self, rounds: list[AttentionRound], index: int) -> Iterator[tuple[int, Message, int, Message]]:
        awaited: dict[tuple[int, int], list[Message]] = defaultdict(list)
        for rank, step in enumerate(rounds):
            for message in step.receives:
                awaited[message.peer, rank].append(message)
        for rank, step in enumerate(rounds):
            for sent in step.sends:
                if sent.peer == rank:
                    raise ValueError(
                        f"round {index}: rank {rank} sends to itself: {sent}; it holds these tokens already"
                    )
                queue = awaited[rank, sent.peer]
                if not queue or (queue[0].payload, queue[0].num_tokens) != (sent.payload, sent.num_tokens):
                    raise ValueError(f"round {index}: rank {sent.peer} does not expect what rank {rank} sends: {sent}")
                yield rank, sent, sent.peer, queue.pop(0)
        left = [pair for pair, queue in awaited.items() if queue]
        if left:
            raise ValueError(f"round {index}: nothing is sent for the receives {left} (source, target)")

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
        self._cells.append(cells_of(attends, slots=slots, rank=rank))
        for slot in used:
            self.partials.append((rank, index, slot))
            self._partials[rank][slot][rank, index, slot] += 1

    def _content(self, rank: int, slot: int) -> Tokens:
        tokens = self._slots[rank].get(slot)
        if tokens is None:
            raise ValueError(f"rank {rank} reads slot {slot} before it is filled")
        return tokens
