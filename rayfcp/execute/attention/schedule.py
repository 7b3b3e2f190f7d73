"""Kernel calls of an attention program, grouped once per microbatch and used by every layer; rows by ranges."""

import functools
import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rayfcp.execute.devices.backend import to_device
from rayfcp.execute.kernels import Pairs
from rayfcp.program import (
    Attend,
    AttentionProgram,
    AttentionRound,
    ContextSlot,
    Forward,
    HeadProgram,
    Message,
    Payload,
    Range,
    ReshuffleProgram,
)
from rayfcp.program.instructions import merged
from rayfcp.program.reshuffle import HiddenRounds, hide
from rayfcp.values import LayerKind

FEW = 4
"""Most ranges that are copied one by one, a launch each; more share one indexed launch, which also reads the row
numbers."""


@functools.lru_cache(maxsize=1024)
def rows_of(ranges: tuple[Range, ...], device: torch.device) -> Tensor:
    """Row numbers of `ranges`, int64, on the device; the layers of a microbatch share them."""
    rows = [np.arange(start, stop) for start, stop in ranges]
    return to_device(np.concatenate([np.arange(0), *rows]), dtype=torch.int64, device=device)


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
    """True if no row is in two of the ranges.

    >>> are_apart([(4, 6), (0, 3)]), are_apart([(0, 3), (2, 4)])
    (True, False)
    """
    placed = sorted(ranges)
    return all(first[1] <= second[0] for first, second in itertools.pairwise(placed))


def without(ranges: Iterable[Range], known: Sequence[Range]) -> tuple[Range, ...]:
    """Rows of `ranges`, range by range, that are in none of `known`, which is sorted and disjoint as from `union`.

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
    """One call of the kernel: queries `queries[i]`, which do not overlap, attend to keys `keys[i]` of slot `slots[i]`.
    `flipped` calls pass all their rows in reverse order. `num_pairs`: (query, key) pairs of all heads."""

    slots: tuple[int, ...]
    causal: bool
    flipped: bool
    queries: tuple[Range, ...]
    keys: tuple[Range, ...]
    num_pairs: float

    def pairs(self, scale: float) -> Pairs:
        """The pairs as the kernel takes them, in its order of rows."""
        lengths = (tuple(stop - start for start, stop in ranges) for ranges in (self.queries, self.keys))
        query, key = (each[::-1] if self.flipped else each for each in lengths)
        return Pairs(query_lengths=query, key_lengths=key, causal=self.causal, scale=scale)

    @property
    def key_runs(self) -> tuple[tuple[int, tuple[Range, ...]], ...]:
        """Ranges of keys in order, consecutive ones of the same slot together."""
        runs = itertools.groupby(zip(self.slots, self.keys, strict=True), key=operator.itemgetter(0))
        return tuple((slot, tuple(key for _, key in held)) for slot, held in runs)


Calls = tuple[KernelCall, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRound:
    """One round: messages, calls, and the slots that no later round reads."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    calls: Calls
    free: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenCalls:
    """Calls of one direction that run while round i of the way in, or of the way out, travels."""

    entering: tuple[Calls, ...]
    leaving: tuple[Calls, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshuffleSchedule:
    """A reshuffle around both directions of a program."""

    program: ReshuffleProgram
    forward: HiddenCalls
    backward: HiddenCalls


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSchedule:
    """Both directions of an attention program; `context` and `kept` are the program's. Without `reshuffle`, tokens come
    in the program's order."""

    num_tokens: int
    forward: tuple[ScheduledRound, ...]
    backward: tuple[ScheduledRound, ...]
    context: tuple[ContextSlot, ...] = ()
    kept: tuple[Range, ...] = ()
    reshuffle: ReshuffleSchedule | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSchedule:
    """A Ulysses program, and the attention between its exchanges."""

    program: HeadProgram
    attention: AttentionSchedule

    @property
    def num_tokens(self) -> int:
        return self.program.num_tokens

    @property
    def reshuffle(self) -> None:
        """Tokens come in the program's order."""


def make_schedule(
    program: AttentionProgram | HeadProgram, *, reshuffle: ReshuffleProgram | None = None
) -> AttentionSchedule | HeadSchedule:
    """Group pairs of ranges into kernel calls, find where slots end, and put local attention around a reshuffle.

    Raises:
        ValueError: the reshuffle is of another layout, or around a program that splits heads.
    """
    if reshuffle is not None and reshuffle.is_identity:
        reshuffle = None
    if not isinstance(program, HeadProgram):
        return _schedule(program, reshuffle=reshuffle, head_share=1.0)
    if reshuffle:
        raise ValueError(
            f"reshuffle: the program of rank {reshuffle.rank} splits heads over ranks {program.ranks}, around which "
            "nothing is reshuffled; plan with plan.primitives=ring, or bring the plan's own order"
        )
    inner = _schedule(program.attention, reshuffle=None, head_share=1.0 / program.degree)
    return HeadSchedule(program=program, attention=inner)


def make_schedules(forward: Forward) -> dict[LayerKind, AttentionSchedule | HeadSchedule]:
    """Schedules of the kinds of layers of a stage; kinds that run the same program share one."""
    schedules = {id(kind.attention): make_schedule(kind.attention) for kind in forward.kinds}
    return {each.kind: schedules[id(each.attention)] for each in forward.kinds}


def _schedule(program: AttentionProgram, *, reshuffle: ReshuffleProgram | None, head_share: float) -> AttentionSchedule:
    forward, backward, around = program.forward, program.backward, None
    if reshuffle:
        if program.num_tokens != max(reshuffle.num_placed, 1):
            raise ValueError(
                f"reshuffle: rank {reshuffle.rank} has {reshuffle.num_placed} tokens in its layout, the program "
                f"{program.num_tokens}; lower both from the same microbatch"
            )
        hidden = hide(program, reshuffle)
        forward, backward = (each.rounds for each in hidden)
        around = ReshuffleSchedule(
            program=reshuffle, forward=_hidden_calls(hidden[0]), backward=_hidden_calls(hidden[1])
        )
    return AttentionSchedule(
        num_tokens=program.num_tokens,
        forward=_rounds(forward, head_share=head_share),
        backward=_rounds(backward, head_share=head_share),
        context=program.context,
        kept=program.kept,
        reshuffle=around,
    )


def _hidden_calls(hidden: HiddenRounds) -> HiddenCalls:
    entering, leaving = (
        tuple(_calls(each, head_share=1.0) for each in rounds) for rounds in (hidden.entering, hidden.leaving)
    )
    return HiddenCalls(entering=entering, leaving=leaving)


def _rounds(rounds: Sequence[AttentionRound], *, head_share: float) -> tuple[ScheduledRound, ...]:
    last: dict[int, int] = {}
    for index, step in enumerate(rounds):
        reads = [message.slot for message in step.sends if message.payload is Payload.KV]
        for slot in (*reads, *(attend.slot for attend in step.attends)):
            last[slot] = index
    return tuple(
        ScheduledRound(
            sends=step.sends,
            receives=step.receives,
            calls=_calls(step.attends, head_share=head_share),
            free=tuple(slot for slot, end in sorted(last.items()) if end == index and slot != 0),
        )
        for index, step in enumerate(rounds)
    )


def _calls(attends: Sequence[Attend], *, head_share: float) -> Calls:
    """Group attends into as few calls as possible. Queries that attend to several ranges of keys go into several
    calls, so that a call writes each of its rows once."""
    calls: list[list[Attend]] = []
    for attend in sorted(attends, key=lambda each: (each.query, each.slot)):
        for call in calls:
            last = call[-1]
            same_kind = (last.causal, last.flipped) == (attend.causal, attend.flipped)
            if same_kind and last.query[1] <= attend.query[0]:
                call.append(attend)
                break
        else:
            calls.append([attend])
    return tuple(
        KernelCall(
            slots=tuple(attend.slot for attend in call),
            causal=call[0].causal,
            flipped=call[0].flipped,
            queries=tuple(attend.query for attend in call),
            keys=tuple(attend.key for attend in call),
            num_pairs=head_share * sum(attend.num_pairs for attend in call),
        )
        for call in calls
    )
