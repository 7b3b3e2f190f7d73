"""The static check, before anything runs, that no rank can wait forever.

The programs of all ranks and stages are replayed together, without tags:

- every forward and backward pass gathers the layers' shards, which needs all ranks of its stage (a barrier), and then
  exchanges keys, values and gradients with them; recomputed layers repeat their forward rounds inside the backward
  pass. A rank leaves a pass when all its messages have met, so passes are checked one by one, and since all stages
  attend alike (`check_order`), one stage stands for all;
- so does the vision encoder, and then exchanges features, whose gradients take the same rounds back at the end of the
  backward pass;
- the same rank of neighbouring stages hands activations on through one channel and gradients back through another.
  Operations of a device on a channel complete in the order in which they are posted, each together with its partner
  when both are first in line. A Send is posted and the program goes on; a Receive waits.

Messages travel on channels without tags (`Channel`), for the validator and the simulator as well.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, Generic, TypeVar

from rayfcp.program.heads import rounds_of
from rayfcp.program.instructions import (
    AttentionProgram,
    AttentionRound,
    Backward,
    Encode,
    Forward,
    HeadProgram,
    Message,
    Payload,
    RankProgram,
    Receive,
    ReshuffleMessage,
    Send,
    StageFlow,
)
from rayfcp.program.order import attention_by_kind, check_order, of_kind


def check_progress(programs: Sequence[RankProgram]) -> None:
    """Prove that the programs of all ranks and stages run to their end together.

    Raises:
        ValueError: a program alone is not in order (`check_order`), or ranks disagree on the plan, on a pass, on a
            message, or would wait forever; the message names the rank and what it waits for.
    """
    check_order(programs)
    if any(of_kind(program, Encode) for program in programs):
        from rayfcp.program.encoding import check_encodes

        for items in check_encodes(programs):
            _check_exchange(items)
    hashes = {program.plan_hash for program in programs}
    if len(hashes) > 1:
        raise ValueError(f"plan_hash differs between ranks ({', '.join(sorted(hashes))}); lower one plan for all ranks")
    for of_ranks in attention_by_kind(programs).values():
        for microbatch, parts in enumerate(zip(*of_ranks, strict=True)):
            for backward, kind in ((False, "forward"), (True, "backward")):
                _check_pass(parts, backward=backward, name=f"the {kind} pass of microbatch {microbatch}")
    _StageReplay(programs).run()


def _check_pass(parts: Sequence[AttentionProgram | HeadProgram], *, backward: bool, name: str) -> None:
    """All ranks' rounds of one direction run to their end; `parts[r]` is rank r's.

    Exchanges of tokens for heads meet by construction where the ranks of a group agree on it, and are left out then.
    """
    if all(_agrees(part, parts) for part in parts if isinstance(part, HeadProgram)):
        rounds = [part.inner.backward if backward else part.inner.forward for part in parts]
    else:
        rounds = [rounds_of(part, rank=rank, backward=backward) for rank, part in enumerate(parts)]
    if not in_step(rounds) and (stuck := stuck_at(rounds, attention_channel(rounds).matches())):
        rank, at = stuck
        step = rounds[rank][at]
        targets, sources = ([message.peer for message in each] for each in (step.sends, step.receives))
        raise ValueError(
            f"rank {rank} would wait forever at an exchange that sends to {targets} and receives from {sources}, "
            f"in {name}; the ranks' programs disagree, lower one plan for all"
        )


def _agrees(part: HeadProgram, parts: Sequence[AttentionProgram | HeadProgram]) -> bool:
    others, due = [parts[rank] for rank in part.ranks], (part.ranks, part.tokens)
    return all(isinstance(each, HeadProgram) and (each.ranks, each.tokens) == due for each in others)


def hand_overs_end(programs: Sequence[RankProgram]) -> bool:
    """True if the stages of one rank, alone, run to their end; `programs[p]` is that of stage p, each in order."""
    try:
        _StageReplay([replace(program, num_ranks=1) for program in programs]).run()
    except ValueError:
        return False
    return True


_HandOver = Send | Receive


@dataclass(frozen=True, slots=True)
class _Pass:
    """All ranks of a stage must come here, with the same words."""

    words: tuple[object, ...]


@dataclass(slots=True)
class _Device:
    """The program of one rank on one stage: operations still to run, and those posted, by flow."""

    program: RankProgram
    left: deque[_Pass | _HandOver]
    posted: dict[StageFlow, deque[_HandOver]] = field(default_factory=lambda: {flow: deque() for flow in StageFlow})


class _StageReplay:
    """All devices, each advanced as far as it gets."""

    def __init__(self, programs: Sequence[RankProgram]) -> None:
        self._num_ranks = programs[0].num_ranks
        self._devices = [_Device(program, _operations(program)) for program in programs]
        self._arrived = [0] * programs[0].num_stages
        self._ready = deque(range(len(programs)))

    def run(self) -> None:
        """
        Raises:
            ValueError: passes or hand-overs disagree, or a device would wait forever.
        """
        while self._ready:
            self._advance(self._ready.popleft())
        for device in self._devices:
            waiting = [f"at {_describe(each)}" for each in list(device.left)[:1]]
            waiting += [f"for {_describe(queue[0])} to leave" for queue in device.posted.values() if queue]
            if waiting:
                raise ValueError(f"{device.program.place} would wait forever {waiting[0]}; the programs disagree")

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
                    f"{device.program.place} would wait forever at {_describe(device.left[0])}, where "
                    f"{devices[0].program.place} comes to {_describe(devices[0].left[0])}; the programs disagree"
                )
        for device in devices:
            device.left.popleft()
        self._ready.extend(range(first, first + self._num_ranks))

    def _complete(self, number: int, flow: StageFlow) -> None:
        """Hand over what is first in line on both sides, from this device on to those whose turn comes by that."""
        turns = [number]
        while turns:
            one = turns.pop()
            queue = self._devices[one].posted[flow]
            if not queue:
                continue
            other = self._partner(one, queue[0])
            others = self._devices[other].posted[flow]
            if others and self._partner(other, others[0]) == one:
                self._hand_over((one, queue.popleft()), (other, others.popleft()))
                turns += [one, other]

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
        elif isinstance(item, _HandOver):
            found.append(item)
    return found


def _content(operation: _HandOver) -> str:
    return f"the {operation.flow.value} of microbatch {operation.microbatch}, {operation.num_tokens} tokens,"


def _describe(operation: _Pass | _HandOver) -> str:
    if isinstance(operation, _Pass):
        return "the pass (kind, microbatch, reduce, recomputed layers) " + repr(operation.words)
    way = "to" if isinstance(operation, Send) else "from"
    return f"{_content(operation)} {way} stage {operation.stage}"


T = TypeVar("T")

RankPair = tuple[int, int]
"""(source, target)."""
Match = tuple[int, int, int, int, T, T]
"""Source, target, round in which each of them posts the message, and the message as each of them has it."""
Content = tuple[Payload, int]
"""Payload and number of tokens of a message."""


class Channel(Generic[T]):
    """Messages that ranks send and expect, each as (round, message), in program order. The two ends of a message agree
    where `content` is the same."""

    def __init__(self, content: Callable[[T], Any] | None = None) -> None:
        self._content = content
        self.sent: dict[RankPair, list[tuple[int, T]]] = defaultdict(list)
        self.expected: dict[RankPair, list[tuple[int, T]]] = defaultdict(list)

    def matches(self, *, complete: bool = False) -> Iterator[Match[T]]:
        """All messages that meet, by (source, target), then order.

        Raises:
            ValueError: the two ends of a message disagree on its content, or (`complete`) it has only one; names both
                ranks.
        """
        content = self._content
        for pair in sorted(self.sent):
            source, target = pair
            for (at, sent), (due, expected) in zip(self.sent[pair], self.expected.get(pair, ()), strict=False):
                one, other = (content(sent), content(expected)) if content else (sent, expected)
                if one != other:
                    raise ValueError(
                        f"rank {source} sends {_words(one)} where rank {target} expects {_words(other)}; messages "
                        "match in order, lower one plan for all ranks"
                    )
                yield source, target, at, due, sent, expected
        if complete and (alone := self._unmatched()):
            source, target = alone[0]
            raise ValueError(
                f"rank {source} sends rank {target} {len(self.sent[source, target])} messages, which that expects "
                f"{len(self.expected[source, target])} of; lower one plan for all ranks"
            )

    def out_of_step(self) -> RankPair | None:
        """The first pair of ranks with a message that only one of them has, or that they post in different rounds; None
        if all ranks pass the rounds together.

        Raises:
            ValueError: as `matches`.
        """
        wrong = self._unmatched()
        wrong += [(source, target) for source, target, at, due, _, _ in self.matches() if at != due]
        return min(wrong, default=None)

    def _unmatched(self) -> list[RankPair]:
        """Pairs of ranks with a message that only one of them has."""
        pairs = self.sent.keys() | self.expected.keys()
        return sorted(each for each in pairs if len(self.sent.get(each, ())) != len(self.expected.get(each, ())))


def _words(content: Any) -> str:
    if isinstance(content, tuple):
        payload, num_tokens = content
        return f"{payload.value} of {num_tokens} tokens"
    return f"{content:g} bytes" if isinstance(content, float) else f"{content} rows"


def content_of(message: Message) -> Content:
    return message.payload, message.num_tokens


def post(steps: Sequence[AttentionRound], channel: Channel[T], *, as_posted: Callable[[Message], T], at: int) -> None:
    """Post the messages of round `at`; `steps[r]` is rank r's."""
    sent, expected = channel.sent, channel.expected
    for rank, step in enumerate(steps):
        for message in step.sends:
            sent[rank, message.peer].append((at, as_posted(message)))
        for message in step.receives:
            expected[message.peer, rank].append((at, as_posted(message)))


def attention_channel(rounds: Sequence[Sequence[AttentionRound]]) -> Channel[Message]:
    """The messages of one pass; `rounds[r]` are rank r's."""
    channel = Channel[Message](content_of)
    for at, steps in enumerate(zip_longest(*rounds, fillvalue=AttentionRound())):
        post(steps, channel, as_posted=lambda message: message, at=at)
    return channel


def in_step(rounds: Sequence[Sequence[AttentionRound]]) -> bool:
    """True if the messages of each round meet in that round, so that all ranks pass the rounds together.

    Round by round, not from the matches of the whole pass: a ring of many ranks has a great many messages.
    """
    for steps in zip_longest(*rounds, fillvalue=AttentionRound()):
        channel = Channel[Content]()
        post(steps, channel, as_posted=content_of, at=0)
        if channel.sent != channel.expected:
            return False
    return True


def stuck_at(rounds: Sequence[Sequence[AttentionRound]], matches: Iterable[Match[T]]) -> tuple[int, int] | None:
    """The first rank that never ends, and the round that it cannot leave, when sends are rendezvous: a message travels
    once both ends have come to its round, and a rank leaves a round when all of its messages travelled."""
    left = [[len(step.sends) + len(step.receives) for step in steps] for steps in rounds]
    at, waiting, moved = [0] * len(rounds), list(matches), True
    while moved:
        for rank, counts in enumerate(left):
            while at[rank] < len(counts) and counts[at[rank]] == 0:
                at[rank] += 1
        due, waiting = waiting, []
        for match in due:
            source, target, sent_round, expected_round, _, _ = match
            if at[source] >= sent_round and at[target] >= expected_round:
                left[source][sent_round] -= 1
                left[target][expected_round] -= 1
            else:
                waiting.append(match)
        moved = len(waiting) < len(due)
    return next(((rank, done) for rank, done in enumerate(at) if done < len(rounds[rank])), None)


def _check_exchange(items: Sequence[Encode]) -> None:
    number = items[0].microbatch
    counts = {len(item.features.rounds) for item in items}
    if len(counts) > 1:
        raise ValueError(
            f"microbatch {number}: features travel in {sorted(counts)} rounds, must be as many on all ranks; lower one "
            "plan for all"
        )
    channel = Channel[ReshuffleMessage](lambda message: message.num_tokens)
    for rank, item in enumerate(items):
        for at, step in enumerate(item.features.rounds):
            for message in (step.send, step.receive):
                if message and (not 0 <= message.peer < len(items) or message.peer == rank):
                    raise ValueError(
                        f"microbatch {number} round {at}: rank {rank} exchanges features with rank {message.peer}, "
                        f"must be another of {len(items)}; lower the plan again"
                    )
            if step.send:
                channel.sent[rank, step.send.peer].append((at, step.send))
            if step.receive:
                channel.expected[step.receive.peer, rank].append((at, step.receive))
    if ranks := channel.out_of_step():
        raise ValueError(
            f"microbatch {number}: ranks {ranks} disagree on the rounds in which features travel between them, one "
            "would wait forever; lower one plan for all"
        )
