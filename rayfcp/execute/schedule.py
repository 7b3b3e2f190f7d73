"""An attention program made ready to run many times: attends grouped into kernel calls, and the last
round in which each slot is needed. Computed once per microbatch, used by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass

from rayfcp.program import Attend, AttentionProgram, AttentionRound, HeadProgram, Message, Payload, Range


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCall:
    """Attends of one slot and one mask, for one call of the kernel; each token range at most once as query.
    `num_cells`: in cells of all heads."""

    slot: int
    causal: bool
    queries: tuple[Range, ...]
    keys: tuple[Range, ...]
    num_cells: float

    @property
    def query_lengths(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.queries)

    @property
    def key_lengths(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyRound:
    """One round: messages, calls, and the slots that nobody needs after it."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    calls: tuple[KernelCall, ...]
    free: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyProgram:
    """Both directions of an attention program."""

    num_tokens: int
    forward: tuple[ReadyRound, ...]
    backward: tuple[ReadyRound, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyHeads:
    """A program whose ranks share out heads, and the attention between its exchanges."""

    program: HeadProgram
    attention: ReadyProgram

    @property
    def num_tokens(self) -> int:
        return self.program.num_tokens


def make_ready(program: AttentionProgram | HeadProgram) -> ReadyProgram | ReadyHeads:
    """Group attends into calls and find where slots end."""
    if isinstance(program, HeadProgram):
        return ReadyHeads(program=program, attention=_ready(program.attention, share=1.0 / program.degree))
    return _ready(program, share=1.0)


def _ready(program: AttentionProgram, *, share: float) -> ReadyProgram:
    """`share`: of the heads."""
    return ReadyProgram(
        num_tokens=program.num_tokens,
        forward=_rounds(program.forward, share=share),
        backward=_rounds(program.backward, share=share),
    )


def _rounds(rounds: Sequence[AttentionRound], *, share: float) -> tuple[ReadyRound, ...]:
    last: dict[int, int] = {}
    for index, step in enumerate(rounds):
        reads = [message.slot for message in step.sends if message.payload is Payload.KV]
        for slot in (*reads, *(attend.slot for attend in step.attends)):
            last[slot] = index
    return tuple(
        ReadyRound(
            sends=step.sends,
            receives=step.receives,
            calls=tuple(_calls(step.attends, share=share)),
            free=tuple(slot for slot, end in sorted(last.items()) if end == index and slot != 0),
        )
        for index, step in enumerate(rounds)
    )


def _calls(attends: Sequence[Attend], *, share: float) -> list[KernelCall]:
    """As few calls as possible. Queries that attend to several ranges of one slot go into several calls,
    so that a call writes each of its rows once."""
    calls: list[list[Attend]] = []
    for attend in attends:
        for call in calls:
            last = call[-1]
            if (last.slot, last.causal) == (attend.slot, attend.causal) and last.query[1] <= attend.query[0]:
                call.append(attend)
                break
        else:
            calls.append([attend])
    return [
        KernelCall(
            slot=call[0].slot,
            causal=call[0].causal,
            queries=tuple(attend.query for attend in call),
            keys=tuple(attend.key for attend in call),
            num_cells=share * sum(attend.num_cells for attend in call),
        )
        for call in calls
    ]
