"""The static check that no rank can wait for ever, before anything runs.

All ranks' programs are replayed together with rendezvous sends: an operation completes only when its
partner has posted it too. Per channel and pair of ranks, messages match in the order posted; there are
no tags. Every forward and backward pass also gathers the layers' shards, which needs all ranks (a
barrier); recomputed layers repeat their forward rounds inside the backward pass.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rayfcp.program.heads import rounds_of
from rayfcp.program.instructions import Backward, Forward, Load, Message, RankProgram
from rayfcp.program.order import check_order


@dataclass(frozen=True, slots=True)
class _Barrier:
    """All ranks must come here, with the same words."""

    words: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Exchange:
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


_Operation = _Barrier | _Exchange


def check_progress(programs: Sequence[RankProgram]) -> None:
    """Prove that the programs of one stage run to their end together.

    Raises:
        ValueError: a program alone is not in order (`check_order`), or ranks disagree on the plan, on a pass, on a
            message, or would wait for ever; the message names the rank and what it waits for.
    """
    check_order(programs)
    hashes = {program.plan_hash for program in programs}
    if len(hashes) > 1:
        raise ValueError(f"plan_hash differs between ranks ({', '.join(sorted(hashes))}); lower one plan for all ranks")
    waiting = [deque(_operations(program)) for program in programs]
    channel = _Channel()
    moved = True
    while moved:
        moved = _pass_barrier(waiting)
        for rank, operations in enumerate(waiting):
            moved = channel.advance(rank, operations) or moved
    for rank, operations in enumerate(waiting):
        if operations:
            raise ValueError(
                f"rank {rank} would wait for ever at {_describe(operations[0])}; the ranks' programs disagree"
            )


def _operations(program: RankProgram) -> Iterator[_Operation]:
    forwards = {item.microbatch: item for item in program.instructions if isinstance(item, Forward)}
    for item in program.instructions:
        if isinstance(item, Load):
            continue
        forward = forwards[item.microbatch]
        reduce = isinstance(item, Backward) and item.reduce
        yield _Barrier((type(item).__name__, item.microbatch, reduce, forward.recomputed_layers))
        passes = [False] if isinstance(item, Forward) else [False, True] if forward.recomputed_layers else [True]
        for backward in passes:
            for step in rounds_of(forward.attention, rank=program.rank, backward=backward):
                if step.sends or step.receives:
                    yield _Exchange(step.sends, step.receives)


def _pass_barrier(waiting: list[deque[_Operation]]) -> bool:
    heads = [operations[0] if operations else None for operations in waiting]
    if not isinstance(heads[0], _Barrier) or any(head != heads[0] for head in heads):
        return False
    for operations in waiting:
        operations.popleft()
    return True


class _Channel:
    """Messages posted and not yet matched, in order, per (source, target)."""

    def __init__(self) -> None:
        self._sent: dict[tuple[int, int], deque[tuple[int, Message]]] = defaultdict(deque)
        self._awaited: dict[tuple[int, int], deque[tuple[int, Message]]] = defaultdict(deque)
        self._open: dict[int, int] = {}

    def advance(self, rank: int, operations: deque[_Operation]) -> bool:
        """Post the exchange at the head, or finish it once all its messages met. True if anything moved."""
        head = operations[0] if operations else None
        if not isinstance(head, _Exchange):
            return False
        if rank not in self._open:
            self._open[rank] = len(head.sends) + len(head.receives)
            for message in head.sends:
                self._post(self._sent, (rank, message.peer), rank=rank, message=message)
            for message in head.receives:
                self._post(self._awaited, (message.peer, rank), rank=rank, message=message)
            return True
        if self._open[rank] == 0:
            del self._open[rank]
            operations.popleft()
            return True
        return False

    def _post(
        self,
        side: dict[tuple[int, int], deque[tuple[int, Message]]],
        pair: tuple[int, int],
        *,
        rank: int,
        message: Message,
    ) -> None:
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


def _describe(operation: _Operation) -> str:
    if isinstance(operation, _Barrier):
        return "the pass (kind, microbatch, reduce, recomputed layers) " + repr(operation.words)
    targets = [message.peer for message in operation.sends]
    sources = [message.peer for message in operation.receives]
    return f"an exchange that sends to {targets} and receives from {sources}"
