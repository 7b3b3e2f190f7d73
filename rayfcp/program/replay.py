"""Symbolic replay of one microbatch on all ranks: which tokens every slot holds, which cells are
computed, and which partial gradients reach whom."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rayfcp.program.instructions import (
    Attend,
    AttentionProgram,
    AttentionRound,
    Load,
    Message,
    Payload,
    Piece,
    Range,
)

Part = tuple[AttentionProgram, Load]
AttendKey = tuple[int, int, int]
"""(rank, round, position): names one attend of a pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """Cells (query, key) of a sequence that one attend computes: all of them, or those with key <= query."""

    sequence: int
    query: Range
    key: Range
    causal: bool


def padding(rank: int) -> Piece:
    """What a rank without tokens holds: a sequence of its own, with a number that no batch has."""
    return Piece(sequence=-1 - rank, start=0, stop=1)


class Replay:
    """Runs the forward or the backward rounds of all ranks in step; `parts[r]` is rank r's.

    Raises:
        ValueError: a message does not meet its partner in its round, a slot is read before it is
            filled, or tokens arrive in the wrong place.
    """

    def __init__(self, parts: Sequence[Part], *, backward: bool) -> None:
        self._rounds = [part.backward if backward else part.forward for part, _ in parts]
        self._slots: list[dict[int, tuple[Piece, ...]]] = [
            {0: load.pieces or (padding(rank),)} for rank, (_, load) in enumerate(parts)
        ]
        self._partials: list[dict[int, Counter[AttendKey]]] = [defaultdict(Counter) for _ in parts]
        self.cells: dict[AttendKey, list[Cells]] = {}
        for index in range(max(len(rounds) for rounds in self._rounds)):
            self._step(index)

    def partials_at_home(self) -> Counter[AttendKey]:
        """How often each attend's dK, dV is contained in its owner's slot 0 at the end."""
        return sum((slots[0] for slots in self._partials), Counter())

    def lost_partials(self) -> int:
        """Partials that ended elsewhere."""
        return sum(sum(count.values()) for slots in self._partials for slot, count in slots.items() if slot)

    def _step(self, index: int) -> None:
        rounds = [each[index] if index < len(each) else AttentionRound() for each in self._rounds]
        arrivals = list(self._matched(rounds, index))
        carried = [self._depart(source, sent) for source, sent, _, _ in arrivals]
        for rank, step in enumerate(rounds):
            for position, attend in enumerate(step.attends):
                self._attend(attend, (rank, index, position))
        for (source, sent, target, received), partial in zip(arrivals, carried, strict=True):
            tokens = cut(self._content(source, sent.slot), sent.ranges)
            if received.payload is Payload.KV:
                if received.slot in self._slots[target] or received.ranges != ((0, sent.num_tokens),):
                    raise ValueError(
                        f"round {index}: rank {target} receives into slot {received.slot} twice or in part"
                    )
                self._slots[target][received.slot] = tokens
            elif cut(self._content(target, received.slot), received.ranges) != tokens:
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

    def _depart(self, source: int, sent: Message) -> Counter[AttendKey]:
        if sent.payload is Payload.KV:
            return Counter()
        return self._partials[source].pop(sent.slot, Counter())

    def _attend(self, attend: Attend, key: AttendKey) -> None:
        rank = key[0]
        queries = cut(self._content(rank, 0), (attend.query,))
        keys = cut(self._content(rank, attend.slot), (attend.key,))
        if attend.causal and (attend.slot != 0 or attend.query != attend.key):
            raise ValueError(f"rank {rank}: causal attend {attend} does not hold the same tokens on both sides")
        found = [
            Cells(sequence=q.sequence, query=(q.start, q.stop), key=(k.start, k.stop), causal=attend.causal and q == k)
            for i, q in enumerate(queries)
            for j, k in enumerate(keys)
            if not attend.causal or j <= i
        ]
        if any(q.sequence != k.sequence for q in queries for k in keys):
            raise ValueError(f"rank {rank}: attend {attend} mixes sequences")
        self.cells[key] = found
        self._partials[rank][attend.slot][key] += 1

    def _content(self, rank: int, slot: int) -> tuple[Piece, ...]:
        pieces = self._slots[rank].get(slot)
        if pieces is None:
            raise ValueError(f"rank {rank} reads slot {slot} before it is filled")
        return pieces


def cut(pieces: Sequence[Piece], ranges: Sequence[Range]) -> tuple[Piece, ...]:
    """The tokens at `ranges` of the concatenation of `pieces`, neighbours joined."""
    found: list[Piece] = []
    for start, stop in ranges:
        at = 0
        for piece in pieces:
            first, last = max(start, at), min(stop, at + piece.num_tokens)
            if first < last:
                part = Piece(sequence=piece.sequence, start=piece.start + first - at, stop=piece.start + last - at)
                if found and (found[-1].sequence, found[-1].stop) == (part.sequence, part.start):
                    part = Piece(sequence=part.sequence, start=found.pop().start, stop=part.stop)
                found.append(part)
            at += piece.num_tokens
        if stop > at or start >= stop:
            raise ValueError(f"range [{start}, {stop}) is empty or ends beyond the {at} tokens of its slot")
    return tuple(found)
