"""That all messages of one pass meet, when every rank of a stage is in it.

A pass begins when all ranks of its stage have come to it, and a rank leaves it when all its messages met. So nothing of
a pass is left when the next one begins, passes can be looked at one by one, and what one stage does in a microbatch
stands for all stages, which attend alike.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import zip_longest

from rayfcp.program.heads import rounds_of
from rayfcp.program.instructions import AttentionProgram, AttentionRound, HeadProgram, Message

_NOTHING = AttentionRound()
_Pair = tuple[int, int]
"""(source, target)."""


def check_meeting(parts: Sequence[AttentionProgram | HeadProgram], *, backward: bool, name: str) -> None:
    """All ranks' rounds of one direction run to their end; `parts[r]` is rank r's, `name` the pass in words.

    Raises:
        ValueError: two ends of a message differ, or a rank would wait for ever; names the rank.
    """
    if not _meet_at_once(parts, backward=backward):
        _replay([rounds_of(part, rank=rank, backward=backward) for rank, part in enumerate(parts)], name=name)


def _meet_at_once(parts: Sequence[AttentionProgram | HeadProgram], *, backward: bool) -> bool:
    """Whether each round's messages meet in that round. All ranks then go through it together.

    Exchanges of a group meet by construction (`exchange_rounds`) where its ranks agree on it.
    """
    for part in parts:
        if isinstance(part, HeadProgram):
            others = (parts[rank] for rank in part.ranks)
            if not all(isinstance(each, HeadProgram) and _group(each) == _group(part) for each in others):
                return False
    rounds = [part.inner.backward if backward else part.inner.forward for part in parts]
    return all(_is_complete(steps) for steps in zip_longest(*rounds, fillvalue=_NOTHING))


def _group(part: HeadProgram) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return part.ranks, part.tokens


def _is_complete(steps: Sequence[AttentionRound]) -> bool:
    sent: dict[_Pair, list[Message]] = defaultdict(list)
    awaited: dict[_Pair, list[Message]] = defaultdict(list)
    for rank, step in enumerate(steps):
        for message in step.sends:
            sent[rank, message.peer].append(message)
        for message in step.receives:
            awaited[message.peer, rank].append(message)
    return len(sent) == len(awaited) and all(
        len(there) == len(here) and all(map(_alike, here, there))
        for pair, here in sent.items()
        for there in (awaited.get(pair, ()),)
    )


def _alike(sent: Message, awaited: Message) -> bool:
    return sent.payload is awaited.payload and sent.num_tokens == awaited.num_tokens


def _replay(rounds: Sequence[Sequence[AttentionRound]], *, name: str) -> None:
    """Rank by rank as far as each goes, with rendezvous sends."""
    waiting = [deque(step for step in each if step.sends or step.receives) for each in rounds]
    channel = _Channel()
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(waiting):
            moved = channel.advance(rank, steps) or moved
    for rank, steps in enumerate(waiting):
        if steps:
            targets = [message.peer for message in steps[0].sends]
            sources = [message.peer for message in steps[0].receives]
            raise ValueError(
                f"rank {rank} would wait for ever at an exchange that sends to {targets} and receives from {sources}, "
                f"in {name}; the ranks' programs disagree"
            )


class _Channel:
    """Messages posted and not yet matched, in order, per (source, target)."""

    def __init__(self) -> None:
        self._sent: dict[_Pair, deque[tuple[int, Message]]] = defaultdict(deque)
        self._awaited: dict[_Pair, deque[tuple[int, Message]]] = defaultdict(deque)
        self._open: dict[int, int] = {}

    def advance(self, rank: int, steps: deque[AttentionRound]) -> bool:
        """Post the exchange at the head, or finish it once all its messages met. True if anything moved."""
        if not steps:
            return False
        head = steps[0]
        if rank not in self._open:
            self._open[rank] = len(head.sends) + len(head.receives)
            for message in head.sends:
                self._post(self._sent, (rank, message.peer), rank=rank, message=message)
            for message in head.receives:
                self._post(self._awaited, (message.peer, rank), rank=rank, message=message)
            return True
        if self._open[rank] == 0:
            del self._open[rank]
            steps.popleft()
            return True
        return False

    def _post(self, side: dict[_Pair, deque[tuple[int, Message]]], pair: _Pair, *, rank: int, message: Message) -> None:
        side[pair].append((rank, message))
        while self._sent[pair] and self._awaited[pair]:
            sender, sent = self._sent[pair].popleft()
            receiver, awaited = self._awaited[pair].popleft()
            if (sent.payload, sent.num_tokens) != (awaited.payload, awaited.num_tokens):
                raise ValueError(
                    f"rank {sender} sends {sent.payload.value} of {sent.num_tokens} tokens where rank {receiver} "
                    f"expects {awaited.payload.value} of {awaited.num_tokens}; messages match in order"
                )
            self._open[sender] -= 1
            self._open[receiver] -= 1
