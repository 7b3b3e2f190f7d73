"""An attention program made ready to run many times: attends grouped into kernel calls, and the last
round in which each slot is needed. Computed once per microbatch, used by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass

from rayfcp.program import Attend, AttentionProgram, AttentionRound, HeadProgram, Message, Payload, Range


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCall:
    """Attends of one slot and one mask, for one call of the kernel; each token range at most once as query."""

    slot: int
    causal: bool
    queries: tuple[Range, ...]
    keys: tuple[Range, ...]
    num_cells: int

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


def make_ready(program: AttentionProgram | HeadProgram) -> ReadyProgram:
    """Group attends into calls and find where slots end.

    Raises:
        ValueError: the program is of a Ulysses group; the interpreter runs rings only.
    """
    if isinstance(program, HeadProgram):
        raise ValueError(
            f"the program of ranks {program.ranks} is of primitive ulysses, the interpreter runs ring only; "
            "plan with plan.primitives=ring"
        )
    return ReadyProgram(
        num_tokens=program.num_tokens,
        forward=_rounds(program.forward),
        backward=_rounds(program.backward),
    )


def _rounds(rounds: Sequence[AttentionRound]) -> tuple[ReadyRound, ...]:
    last: dict[int, int] = {}
    for index, step in enumerate(rounds):
        reads = [message.slot for message in step.sends if message.payload is Payload.KV]
        for slot in (*reads, *(attend.slot for attend in step.attends)):
            last[slot] = index
    return tuple(
        ReadyRound(
            sends=step.sends,
            receives=step.receives,
            calls=tuple(_calls(step.attends)),
            free=tuple(slot for slot, end in sorted(last.items()) if end == index and slot != 0),
        )
        for index, step in enumerate(rounds)
    )


def _calls(attends: Sequence[Attend]) -> list[KernelCall]:
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
            num_cells=sum(attend.num_cells for attend in call),
        )
        for call in calls
    ]
