"""Symbolic replay of one microbatch on all ranks: which tokens every slot holds, which cells are
computed, and which partial gradients reach whom."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from rayfcp.program.instructions import AttentionProgram, AttentionRound, Message, Payload
from rayfcp.program.table import Attends, Column
from rayfcp.program.tokens import Tokens, cells_of

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
