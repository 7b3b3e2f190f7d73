"""That all messages of one pass meet, when every rank of a stage is in it.

A pass begins when all ranks of its stage have come to it, and a rank leaves it when all its messages met. So nothing of
a pass is left when the next one begins, passes can be looked at one by one, and what one stage does in a microbatch
stands for all stages, which attend alike.

The static check that no rank can wait for ever, before anything runs.

The programs of all ranks and stages are replayed together, without tags:

- every forward and backward pass gathers the layers' shards, which needs all ranks of its stage (a barrier), and then
  exchanges keys, values and gradients with them (`rayfcp.program.progress`); recomputed layers repeat their forward
  rounds inside the backward pass;
- so does the vision encoder, and then exchanges features; their gradients go back in the same rounds at the end of the
  backward pass (`rayfcp.verify.features`);
- the same rank of neighbouring stages hands activations on through one channel and gradients back through another.
  Operations of a device on a channel complete in the order in which they are posted, each together with its partner
  when both are first in line. A Send is posted and the program goes on; a Receive waits.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from rayfcp.program.heads import rounds_of
from rayfcp.program.instructions import (
    AttentionProgram,
    AttentionRound,
    Backward,
    Encode,
    Flow,
    Forward,
    Free,
    HeadProgram,
    Load,
    Message,
    RankProgram,
    Receive,
    Send,
)
from rayfcp.program.order import check_order
from rayfcp.program.windows import attention_by_window

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


_HandOver = Send | Receive


@dataclass(frozen=True, slots=True)
class _Pass:
    """All ranks of a stage must come here, with the same words."""

    words: tuple[object, ...]


@dataclass(slots=True)
class _Device:
    """The programs of one rank on one stage, as far as it has come."""

    program: RankProgram
    left: deque[_Pass | _HandOver]
    posted: dict[Flow, deque[_HandOver]] = field(default_factory=lambda: {flow: deque() for flow in Flow})


def check_progress(programs: Sequence[RankProgram]) -> None:
    """Prove that the programs of all ranks and stages run to their end together.

    Raises:
        ValueError: a program alone is not in order (`check_order`), or ranks disagree on the plan, on a pass, on a
            message, or would wait for ever; the message names the rank and what it waits for.
    """
    check_order(programs)
    hashes = {program.plan_hash for program in programs}
    if len(hashes) > 1:
        raise ValueError(f"plan_hash differs between ranks ({', '.join(sorted(hashes))}); lower one plan for all ranks")
    _check_meetings(programs)
    _Replay(programs).run()


def hand_overs_end(programs: Sequence[RankProgram]) -> bool:
    """Whether the stages of one rank, alone, run to their end; `programs[p]` is that of stage p, each in order."""
    try:
        _Replay([replace(program, num_ranks=1) for program in programs]).run()
    except ValueError:
        return False
    return True


def _check_meetings(programs: Sequence[RankProgram]) -> None:
    """Layers of one window attend alike on all stages (`check_order`)."""
    for of_ranks in attention_by_window(programs).values():
        for microbatch, parts in enumerate(zip(*of_ranks, strict=True)):
            for backward, kind in ((False, "forward"), (True, "backward")):
                check_meeting(parts, backward=backward, name=f"the {kind} pass of microbatch {microbatch}")


class _Replay:
    """All devices, each as far as it comes."""

    def __init__(self, programs: Sequence[RankProgram]) -> None:
        self._num_ranks = programs[0].num_ranks
        self._devices = [_Device(program, _operations(program)) for program in programs]
        self._arrived = [0] * programs[0].num_stages
        self._ready = deque(range(len(programs)))

    def run(self) -> None:
        """Raises:
        ValueError: passes or hand-overs disagree, or a device would wait for ever.
        """
        while self._ready:
            self._advance(self._ready.popleft())
        for device in self._devices:
            if device.left:
                raise ValueError(
                    f"{device.program.place} would wait for ever at {_describe(device.left[0])}; the programs disagree"
                )
            for queue in device.posted.values():
                if queue:
                    raise ValueError(
                        f"{device.program.place} would wait for ever for {_describe(queue[0])} to leave; the programs "
                        "disagree"
                    )

    def _advance(self, number: int) -> None:
        """Up to the next operation that needs others."""
        device = self._devices[number]
        while device.left:
            head = device.left[0]
            if isinstance(head, _Pass):
                self._arrive(number // self._num_ranks)
                return
            device.posted[head.flow].append(head)
            if isinstance(head, Send):
                device.left.popleft()
            self._complete(number, head.flow)
            if isinstance(head, Receive):
                return

    def _arrive(self, stage: int) -> None:
        """One more rank has come to the next pass; the last one lets all go on."""
        self._arrived[stage] += 1
        if self._arrived[stage] < self._num_ranks:
            return
        self._arrived[stage] = 0
        first = stage * self._num_ranks
        devices = self._devices[first : first + self._num_ranks]
        for device in devices:
            if device.left[0] != devices[0].left[0]:
                raise ValueError(
                    f"{device.program.place} would wait for ever at {_describe(device.left[0])}, where "
                    f"{devices[0].program.place} comes to {_describe(devices[0].left[0])}; the programs disagree"
                )
        for device in devices:
            device.left.popleft()
        self._ready.extend(range(first, first + self._num_ranks))

    def _complete(self, number: int, flow: Flow) -> None:
        """Hand over what is first in line on both sides, from this device on to those whose turn comes by that."""
        turns = [number]
        while turns:
            here = turns.pop()
            queue = self._devices[here].posted[flow]
            if not queue:
                continue
            there = self._partner(here, queue[0])
            others = self._devices[there].posted[flow]
            if others and self._partner(there, others[0]) == here:
                self._hand_over((here, queue.popleft()), (there, others.popleft()))
                turns += [here, there]

    def _partner(self, number: int, operation: _HandOver) -> int:
        return operation.stage * self._num_ranks + number % self._num_ranks

    def _hand_over(self, one: tuple[int, _HandOver], other: tuple[int, _HandOver]) -> None:
        (source, sent), (target, awaited) = (one, other) if isinstance(one[1], Send) else (other, one)
        if (sent.microbatch, sent.num_tokens) != (awaited.microbatch, awaited.num_tokens):
            raise ValueError(
                f"{self._devices[source].program.place} hands over {_content(sent)} where "
                f"{self._devices[target].program.place} expects {_content(awaited)}; they match in order"
            )
        self._devices[target].left.popleft()
        self._ready.append(target)


def _operations(program: RankProgram) -> deque[_Pass | _HandOver]:
    found: deque[_Pass | _HandOver] = deque()
    recomputed: dict[int, int] = {}
    for item in program.instructions:
        if isinstance(item, Encode):
            found.append(_Pass(("Encode", item.microbatch)))
        elif isinstance(item, Forward):
            recomputed[item.microbatch] = item.recomputed_layers
            found.append(_Pass(("Forward", item.microbatch, False, item.recomputed_layers)))
        elif isinstance(item, Backward):
            found.append(_Pass(("Backward", item.microbatch, item.reduce, recomputed[item.microbatch])))
        elif not isinstance(item, Load | Free):
            found.append(item)
    return found


def _content(operation: _HandOver) -> str:
    return f"the {operation.flow.value} of microbatch {operation.microbatch}, {operation.num_tokens} tokens,"


def _describe(operation: _Pass | _HandOver) -> str:
    if isinstance(operation, _Pass):
        return "the pass (kind, microbatch, reduce, recomputed layers) " + repr(operation.words)
    way = "to" if isinstance(operation, Send) else "from"
    return f"{_content(operation)} {way} stage {operation.stage}"
