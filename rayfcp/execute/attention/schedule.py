"""Rows of packed tensors by half-open ranges: few of them as views, many by one index on the device.

An attention program made ready to run many times: attends grouped into kernel calls, and the last
round in which each slot is needed. Computed once per microbatch, used by every layer.
"""

import functools
import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rayfcp.execute.devices.device import moved
from rayfcp.program import (
    Attend,
    AttentionProgram,
    AttentionRound,
    ContextSlot,
    Forward,
    HeadProgram,
    Message,
    Parcel,
    Payload,
    Range,
    ReshuffleProgram,
    ReshuffleRound,
)
from rayfcp.program.columns import merged
from rayfcp.program.reshuffle import HiddenRounds, hide

FEW = 4
"""Ranges that are worth a launch each."""


@functools.lru_cache(maxsize=1024)
def rows_of(ranges: tuple[Range, ...], device: torch.device) -> Tensor:
    """Numbers of the rows, int64, on the device; the layers of a microbatch share them."""
    return moved(np.concatenate([np.arange(start, stop) for start, stop in ranges]), dtype=torch.int64, device=device)


def take_rows(tensor: Tensor, ranges: Sequence[Range]) -> Tensor:
    """Rows of `tensor` at `ranges`, in order: a view where the ranges touch, else a copy."""
    joined = merged(list(ranges))
    if len(joined) == 1:
        return tensor[joined[0][0] : joined[0][1]]
    if len(joined) <= FEW:
        return torch.cat([tensor[start:stop] for start, stop in joined])
    return tensor.index_select(0, rows_of(joined, tensor.device))


def copy_rows(source: Tensor, ranges: Sequence[Range], *, target: Tensor) -> None:
    """All of `target` = source[ranges], in order."""
    joined = merged(list(ranges))
    if len(joined) == 1:
        target.copy_(source[joined[0][0] : joined[0][1]])
    else:
        torch.index_select(source, 0, rows_of(joined, source.device), out=target)


def add_rows(target: Tensor, ranges: Sequence[Range], *, source: Tensor) -> None:
    """target[ranges] += source, in place; ranges may repeat."""
    joined = merged(list(ranges))
    if len(joined) > FEW and are_apart(joined):
        target.index_add_(0, rows_of(joined, target.device), source.to(target.dtype))
        return
    at = 0
    for start, stop in joined:
        target[start:stop] += source[at : at + stop - start]
        at += stop - start


def put_rows(target: Tensor, ranges: Sequence[Range], *, source: Tensor) -> None:
    """target[ranges] = source, in place; no row twice."""
    joined = merged(list(ranges))
    if len(joined) > FEW:
        target.index_copy_(0, rows_of(joined, target.device), source.to(target.dtype))
        return
    at = 0
    for start, stop in joined:
        target[start:stop] = source[at : at + stop - start]
        at += stop - start


def are_apart(ranges: Sequence[Range]) -> bool:
    """Whether no row is in two of them.

    >>> are_apart([(4, 6), (0, 3)]), are_apart([(0, 3), (2, 4)])
    (True, False)
    """
    placed = sorted(ranges)
    return all(first[1] <= second[0] for first, second in itertools.pairwise(placed))


def without(ranges: Iterable[Range], known: Sequence[Range]) -> tuple[Range, ...]:
    """Rows of `ranges` that are in none of `known`, which is as `union` gives it, range by range.

    >>> without([(0, 10), (3, 4)], ((2, 4), (8, 12)))
    ((0, 2), (4, 8))
    """
    found = []
    for start, stop in ranges:
        at = start
        for first, last in known:
            if last <= at or first >= stop:
                continue
            if first > at:
                found.append((at, first))
            at = last
        if at < stop:
            found.append((at, stop))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCall:
    """Attends of one kind, for one call of the kernel; each token range at most once as query. Attend i has the keys
    `keys[i]` of slot `slots[i]`. The rows of `flipped` calls, all of them, go to the kernel from the last to the first.
    `num_cells`: in cells of all heads."""

    slots: tuple[int, ...]
    causal: bool
    flipped: bool
    queries: tuple[Range, ...]
    keys: tuple[Range, ...]
    num_cells: float

    @property
    def query_lengths(self) -> tuple[int, ...]:
        """As the kernel gets them."""
        return _lengths(self.queries, flipped=self.flipped)

    @property
    def key_lengths(self) -> tuple[int, ...]:
        """As the kernel gets them."""
        return _lengths(self.keys, flipped=self.flipped)

    @property
    def key_runs(self) -> tuple[tuple[int, tuple[Range, ...]], ...]:
        """Ranges of keys in order, those of one slot that follow each other together."""
        runs = itertools.groupby(zip(self.slots, self.keys, strict=True), key=operator.itemgetter(0))
        return tuple((slot, tuple(key for _, key in held)) for slot, held in runs)


def _lengths(ranges: Sequence[Range], *, flipped: bool) -> tuple[int, ...]:
    lengths = tuple(stop - start for start, stop in ranges)
    return lengths[::-1] if flipped else lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyRound:
    """One round: messages, calls, and the slots that nobody needs after it."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    calls: tuple[KernelCall, ...]
    free: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyExchange:
    """One round of a reshuffle in one direction: parcels, and the calls that run while they travel."""

    send: Parcel | None
    receive: Parcel | None
    calls: tuple[KernelCall, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyExchanges:
    """What runs before and after the rounds of one direction."""

    entering: tuple[ReadyExchange, ...]
    leaving: tuple[ReadyExchange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyReshuffle:
    """A reshuffle around both directions of a program."""

    program: ReshuffleProgram
    forward: ReadyExchanges
    backward: ReadyExchanges


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyProgram:
    """Both directions of an attention program. Without `reshuffle` tokens come in the program's order. `context` and
    `kept` are the program's."""

    num_tokens: int
    forward: tuple[ReadyRound, ...]
    backward: tuple[ReadyRound, ...]
    context: tuple[ContextSlot, ...] = ()
    kept: tuple[Range, ...] = ()
    reshuffle: ReadyReshuffle | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyHeads:
    """A program whose ranks share out heads, and the attention between its exchanges."""

    program: HeadProgram
    attention: ReadyProgram

    @property
    def num_tokens(self) -> int:
        return self.program.num_tokens

    @property
    def reshuffle(self) -> None:
        """Tokens come in the program's order."""


def make_ready(
    program: AttentionProgram | HeadProgram, *, reshuffle: ReshuffleProgram | None = None
) -> ReadyProgram | ReadyHeads:
    """Group attends into calls, find where slots end, and put local attends around a reshuffle.

    Raises:
        ValueError: a reshuffle is of another layout, or around a program that shares out heads.
    """
    around = None if reshuffle is None or reshuffle.is_identity else reshuffle
    if not isinstance(program, HeadProgram):
        return _ready(program, around=around, share=1.0)
    if around:
        raise ValueError(
            f"reshuffle: the program of rank {around.rank} shares out heads with ranks {program.ranks}, around which "
            "nothing is reshuffled; plan with plan.primitives=ring, or bring the plan's own order"
        )
    return ReadyHeads(program=program, attention=_ready(program.attention, around=None, share=1.0 / program.degree))


def make_kinds_ready(forward: Forward) -> dict[int, ReadyProgram | ReadyHeads]:
    """Of the kinds of layers of a stage, by window; kinds that run the same program share it."""
    ready = {id(kind.attention): make_ready(kind.attention) for kind in forward.kinds}
    return {kind.window: ready[id(kind.attention)] for kind in forward.kinds}


def _ready(program: AttentionProgram, *, around: ReshuffleProgram | None, share: float) -> ReadyProgram:
    """`share`: of the heads."""
    forward, backward, ready = program.forward, program.backward, None
    if around:
        hidden = _hidden(program, around)
        forward, backward = (each.rounds for each in hidden)
        ready = ReadyReshuffle(
            program=around,
            forward=_exchanges(hidden[0], around.rounds),
            backward=_exchanges(hidden[1], around.rounds),
        )
    return ReadyProgram(
        num_tokens=program.num_tokens,
        forward=_rounds(forward, share=share),
        backward=_rounds(backward, share=share),
        context=program.context,
        kept=program.kept,
        reshuffle=ready,
    )


def _hidden(program: AttentionProgram, reshuffle: ReshuffleProgram) -> tuple[HiddenRounds, HiddenRounds]:
    if program.num_tokens != max(reshuffle.num_placed, 1):
        raise ValueError(
            f"reshuffle: rank {reshuffle.rank} has {reshuffle.num_placed} tokens in its layout, the program "
            f"{program.num_tokens}; lower both from the same microbatch"
        )
    return hide(program, reshuffle)


def _exchanges(hidden: HiddenRounds, rounds: Sequence[ReshuffleRound]) -> ReadyExchanges:
    """In, then out: the same rounds transposed."""
    entering = (
        ReadyExchange(send=step.send, receive=step.receive, calls=tuple(_calls(attends, share=1.0)))
        for step, attends in zip(rounds, hidden.entering, strict=True)
    )
    leaving = (
        ReadyExchange(send=step.receive, receive=step.send, calls=tuple(_calls(attends, share=1.0)))
        for step, attends in zip(rounds, hidden.leaving, strict=True)
    )
    return ReadyExchanges(entering=tuple(entering), leaving=tuple(leaving))


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
    """As few calls as possible. Queries that attend to several ranges of keys go into several calls, so that a call
    writes each of its rows once."""
    calls: list[list[Attend]] = []
    for attend in sorted(attends, key=lambda each: (each.query, each.slot)):
        for call in calls:
            last = call[-1]
            alike = (last.causal, last.flipped) == (attend.causal, attend.flipped)
            if alike and last.query[1] <= attend.query[0]:
                call.append(attend)
                break
        else:
            calls.append([attend])
    return [
        KernelCall(
            slots=tuple(attend.slot for attend in call),
            causal=call[0].causal,
            flipped=call[0].flipped,
            queries=tuple(attend.query for attend in call),
            keys=tuple(attend.key for attend in call),
            num_cells=share * sum(attend.num_cells for attend in call),
        )
        for call in calls
    ]
