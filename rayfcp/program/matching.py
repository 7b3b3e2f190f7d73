"""Matching of messages on a channel without tags: the k-th message that a rank sends another meets the k-th that this
one expects. The progress check, the validator and the simulator share it."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, Generic, TypeVar

from rayfcp.program.instructions import AttentionRound, Message, Payload

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
