"""The static check, before anything runs, that no rank can wait forever.

The programs of all ranks and stages are replayed together, without tags:

- every forward and backward pass gathers the layers' shards, which needs all ranks of its stage (a barrier), and then
  exchanges keys, values and gradients with them; recomputed layers repeat their forward rounds inside the backward
  pass, unless they keep their attention, as on all ranks of a stage or on none (`check_order`). A rank leaves a pass
  when all its messages have met, so passes are checked one by one, and since all stages attend alike (`check_order`),
  one stage stands for all;
- so does the vision encoder, and then exchanges features, whose gradients take the same rounds back at the end of the
  backward pass;
- a rank posts the messages of a round as one group call, which NCCL and HCCL run as one kernel. The sends and receives
  of all ranks in one round are a complete matching, so each group call meets only group calls of the same round;
- the same rank of neighbouring stages hands activations on through one channel and gradients back through another.
  Operations of a device on a channel complete in the order in which they are posted, each together with its partner
  when both are first in line. A Send is posted and the program goes on; a Receive waits. All ranks of a stage come to
  passes and hand-overs in one order (`check_order`), so one rank stands for all.

Messages travel on channels without tags (`Channel`), for the validator and the simulator as well.

Two communicators of one device need no common order: the kernels of all of them fit on it together
(`rayfcp.execute.devices.cuda.CudaBackend.group_options`), so none is kept from starting by one that waits. Without
pipeline stages there is one, nevertheless: passes, layers and rounds come in the same order on all ranks, and each
device starts a subsequence of their gathers, reductions and messages. With stages, one that runs forward passes ahead
sends activations before it receives gradients, and its neighbour has them the other way round.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from rayfcp.program.heads import head_rounds
from rayfcp.program.instructions import (
    AttentionProgram,
    AttentionRound,
    Encode,
    HeadProgram,
    Message,
    RankProgram,
    Receive,
    ReshuffleMessage,
    Send,
    StageFlow,
)
from rayfcp.program.order import attention_by_kind, check_order, check_outlines, describe, of_kind
from rayfcp.program.programs import Programs


def check_progress(programs: Sequence[RankProgram], *, forward_only: bool = False) -> None:
    """Prove that the programs of all ranks and stages run to their end together, with `forward_only` those of `lower`
    with the same.

    Lowered `Programs` are checked as they are, in columns (`check_outlines`, `AttentionTable.check`); others, however
    they were made, instruction by instruction.

    Raises:
        ValueError: a program alone is not in order (`check_order`), or ranks disagree on the plan, on a pass, on a
            message, or would wait forever; the message names the rank and what it waits for.
    """
    if isinstance(programs, Programs):
        _check_columns(programs, forward_only=forward_only)
        return
    check_order(programs, forward_only=forward_only)
    for items in zip(*(of_kind(program, Encode) for program in programs), strict=True):
        _check_exchange(items)
    hashes = {program.plan_hash for program in programs}
    if len(hashes) > 1:
        raise ValueError(f"plan_hash differs between ranks ({', '.join(sorted(hashes))}); lower one plan for all ranks")
    for of_ranks in attention_by_kind(programs).values():
        for microbatch, parts in enumerate(zip(*of_ranks, strict=True)):
            for backward, kind in ((False, "forward"), (True, "backward")):
                _check_pass(parts, backward=backward, name=f"the {kind} pass of microbatch {microbatch}")
    if problem := hand_overs_stuck(programs[:: programs[0].num_ranks]):
        raise ValueError(f"{problem}; hand-overs of a channel match in order, lower one plan for all")


def _check_columns(programs: Programs, *, forward_only: bool) -> None:
    check_outlines(programs, forward_only=forward_only)
    for items in programs.encodes:
        if items:
            _check_exchange(items)
    if problem := hand_overs_stuck(programs.outlines):
        raise ValueError(f"{problem}; hand-overs of a channel match in order, lower one plan for all")


def _check_pass(parts: Sequence[AttentionProgram | HeadProgram], *, backward: bool, name: str) -> None:
    """All ranks' rounds of one direction run to their end; `parts[r]` is rank r's.

    Exchanges of tokens for heads meet by construction where the ranks of a group agree on it, and are left out then.
    """
    rounds = [part.inner.backward if backward else part.inner.forward for part in parts]
    if not all(_agrees(part, parts) for part in parts if isinstance(part, HeadProgram)):
        for rank, part in enumerate(parts):
            if isinstance(part, HeadProgram):
                rounds[rank] = head_rounds(part, rank=rank, backward=backward)
    if problem := attention_channel(rounds).out_of_step():
        raise ValueError(f"{problem}, in {name}; the ranks' programs disagree, lower one plan for all")


def _agrees(part: HeadProgram, parts: Sequence[AttentionProgram | HeadProgram]) -> bool:
    others, due = [parts[rank] for rank in part.ranks], (part.ranks, part.tokens)
    return all(isinstance(each, HeadProgram) and (each.ranks, each.tokens) == due for each in others)


def hand_overs_stuck(programs: Sequence[RankProgram]) -> str | None:
    """The first stage whose hand-overs do not all end, and the one at which it stops, in words; None if all end.
    `programs[p]` is that of stage p of one rank."""
    left = [deque(item for item in each.instructions if isinstance(item, Send | Receive)) for each in programs]
    lines = {(stage, flow): deque[Send | Receive]() for stage in range(len(programs)) for flow in StageFlow}
    waits_for: list[Receive | None] = [None] * len(programs)
    moved = True
    while moved:
        moved = False
        for stage, items in enumerate(left):
            while items and not waits_for[stage]:
                item = items.popleft()
                lines[stage, item.flow].append(item)
                waits_for[stage] = item if isinstance(item, Receive) else None
        for (stage, flow), line in lines.items():
            others = lines.get((line[0].stage, flow)) if line and isinstance(line[0], Send) else None
            if others and isinstance(others[0], Receive) and others[0].stage == stage:
                sent, awaited = line.popleft(), others.popleft()
                if sent.microbatch != awaited.microbatch:
                    return f"{programs[stage].place}: {describe(sent)} meets {describe(awaited)}"
                waits_for[sent.stage], moved = None, True
    for (stage, _), line in lines.items():
        if line:
            return f"{programs[stage].place} would wait forever at: {describe(waits_for[stage] or line[0])}"
    return None


T = TypeVar("T", Message, ReshuffleMessage)

RankPair = tuple[int, int]
"""(source, target)."""
Match = tuple[int, int, int, int, T, T]
"""Source, target, round in which each of them posts the message, and the message as each of them has it."""


class Channel(Generic[T]):
    """Messages that ranks send and expect, each as (round, message), in program order. They match in this order."""

    def __init__(self) -> None:
        self._sent: dict[RankPair, list[tuple[int, T]]] = defaultdict(list)
        self._expected: dict[RankPair, list[tuple[int, T]]] = defaultdict(list)

    def post(self, rank: int, at: int, *, sends: Iterable[T], receives: Iterable[T]) -> None:
        """Post the messages of a rank in its round `at`."""
        for message in sends:
            self._sent[rank, message.peer].append((at, message))
        for message in receives:
            self._expected[message.peer, rank].append((at, message))

    def matches(self, *, complete: bool = False) -> Iterator[Match[T]]:
        """All messages that meet, by (source, target), then order.

        Raises:
            ValueError: the two ends of a message disagree on its content, or (`complete`) it has only one; names both
                ranks.
        """
        for pair in sorted(self._sent):
            source, target = pair
            for (at, sent), (due, expected) in zip(self._sent[pair], self._expected.get(pair, ()), strict=False):
                if (one := content_of(sent)) != (other := content_of(expected)):
                    raise ValueError(
                        f"rank {source} sends {one[0]} of {one[1]} tokens where rank {target} expects {other[0]} of "
                        f"{other[1]}; messages match in order, lower one plan for all ranks"
                    )
                yield source, target, at, due, sent, expected
        if complete and (alone := self._unmatched()):
            source, target = alone[0]
            raise ValueError(
                f"rank {source} sends rank {target} {len(self._sent[source, target])} messages, which that expects "
                f"{len(self._expected[source, target])} of; lower one plan for all ranks"
            )

    def out_of_step(self) -> str | None:
        """The first pair of ranks whose messages are not group calls of the same rounds, in words: a message that only
        one of them has, that they post in different rounds, or that a rank sends to itself. None if all ranks pass the
        rounds together.

        Raises:
            ValueError: as `matches`.
        """
        wrong = {pair: "only one of them has all messages" for pair in self._unmatched()}
        for source, target, at, due, _, _ in self.matches():
            if at != due or source == target:
                wrong.setdefault((source, target), f"the sender's is round {at}, the receiver's round {due}")
        if not wrong:
            return None
        source, target = min(wrong)
        return f"messages from rank {source} to rank {target} do not meet in one round: {wrong[source, target]}"

    def _unmatched(self) -> list[RankPair]:
        """Pairs of ranks with a message that only one of them has."""
        pairs = self._sent.keys() | self._expected.keys()
        return sorted(each for each in pairs if len(self._sent.get(each, ())) != len(self._expected.get(each, ())))


def content_of(message: Message | ReshuffleMessage) -> tuple[str, int]:
    """Payload and number of tokens, on which both ends of a message agree."""
    return message.payload if isinstance(message, Message) else "features", message.num_tokens


def attention_channel(rounds: Sequence[Sequence[AttentionRound]]) -> Channel[Message]:
    """The messages of one pass; `rounds[r]` are rank r's."""
    channel = Channel[Message]()
    for rank, steps in enumerate(rounds):
        for at, step in enumerate(steps):
            channel.post(rank, at, sends=step.sends, receives=step.receives)
    return channel


def _check_exchange(items: Sequence[Encode]) -> None:
    """All ranks post the features of one microbatch that travel between them in the same rounds."""
    channel = Channel[ReshuffleMessage]()
    for rank, item in enumerate(items):
        for at, step in enumerate(item.features.rounds):
            channel.post(rank, at, sends=filter(None, [step.send]), receives=filter(None, [step.receive]))
    counts = {len(item.features.rounds) for item in items}
    problem = channel.out_of_step() or (f"ranks have {sorted(counts)} rounds" if len(counts) > 1 else None)
    if problem:
        raise ValueError(f"features of microbatch {items[0].microbatch}: {problem}; lower one plan for all")
