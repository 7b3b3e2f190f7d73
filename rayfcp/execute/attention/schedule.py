"""Kernel calls of an attention program, grouped once per microbatch and used by every layer; rows by ranges."""

import functools
import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayfcp.execute.devices.backend import backend_of, to_device
from rayfcp.execute.kernels import Pairs, Scores
from rayfcp.program import (
    Attend,
    AttentionProgram,
    AttentionRound,
    ContextSlot,
    HeadProgram,
    Message,
    Payload,
    Range,
    ReshuffleProgram,
)
from rayfcp.program.instructions import merged

FEW = 4
"""Most ranges that are copied one by one, a launch each; more share one indexed launch, which also reads the row
numbers."""


def rows_of(ranges: tuple[Range, ...], device: torch.device) -> Tensor:
    """Row numbers of `ranges`, int64, on the device; the layers of a microbatch share them. Each stream has its own:
    numbers made in one are not ordered against what another reads, nor is their end."""
    streams = backend_of(device).streams
    return _rows_of(ranges, device, None if streams is None else streams.current_stream())


@functools.lru_cache(maxsize=1024)
def _rows_of(ranges: tuple[Range, ...], device: torch.device, stream: Any) -> Tensor:  # noqa: ARG001  part of the key
    rows = [np.arange(start, stop) for start, stop in ranges]
    return to_device(np.concatenate([np.arange(0), *rows]), dtype=torch.int64, device=device)


def take_rows(tensor: Tensor, ranges: Sequence[Range]) -> Tensor:
    """Rows of `tensor` at `ranges`, in order: a view where the ranges touch, else a copy."""
    joined = merged(ranges)
    if len(joined) == 1:
        return tensor[joined[0][0] : joined[0][1]]
    if len(joined) <= FEW:
        return torch.cat([tensor[start:stop] for start, stop in joined])
    return tensor.index_select(0, rows_of(joined, tensor.device))


def copy_rows(source: Tensor, ranges: Sequence[Range], *, target: Tensor) -> None:
    """All of `target` = source[ranges], in order."""
    joined = merged(ranges)
    if len(joined) == 1:
        target.copy_(source[joined[0][0] : joined[0][1]])
    else:
        torch.index_select(source, 0, rows_of(joined, source.device), out=target)


def write_rows(target: Tensor, ranges: Sequence[Range], *, source: Tensor, add: bool = False) -> None:
    """target[ranges] = source, in place, no row twice; or, with `add`, += source, where ranges may repeat."""
    joined = merged(ranges)
    if len(joined) > FEW and (not add or are_apart(joined)):
        write = target.index_add_ if add else target.index_copy_
        write(0, rows_of(joined, target.device), source.to(target.dtype))
        return
    for (start, stop), rows in zip(joined, source.split([stop - start for start, stop in joined]), strict=True):
        if add:
            target[start:stop] += rows
        else:
            target[start:stop] = rows


def are_apart(ranges: Sequence[Range]) -> bool:
    """True if no row is in two of the ranges."""
    return all(first[1] <= second[0] for first, second in itertools.pairwise(sorted(ranges)))


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


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """`[tokens, width]`: rows of tensors `[tokens, heads, head_dim]` of the same tokens, which may differ in both."""
    if len({each.shape[2] for each in parts}) == 1:
        return torch.cat(list(parts), dim=1).flatten(1)  # reads strided heads in place
    return torch.cat([each.flatten(1) for each in parts], dim=1)


def apart(rows: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The parts, views of `side_by_side` of tensors of `shapes` `(heads, head_dim)`."""
    parts = rows.split([heads * head_dim for heads, head_dim in shapes], dim=1)
    return [part.unflatten(1, tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of sums of tensors of `dtype`: fp64 for fp64, otherwise fp32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


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

    def pairs(self, scores: Scores) -> Pairs:
        """The pairs as the kernel takes them, in its order of rows."""
        lengths = (tuple(stop - start for start, stop in ranges) for ranges in (self.queries, self.keys))
        query, key = (each[::-1] if self.flipped else each for each in lengths)
        return Pairs(
            query_lengths=query,
            key_lengths=key,
            causal=self.causal,
            scale=scores.scale,
            softcap=scores.softcap,
        )

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
class AttentionSchedule:
    """Both directions of an attention program; `context` and `kept` are the program's.

    Attention takes `num_tokens` tokens in the program's order, or, with `reshuffle`, in the loop's. `heads`: exchanges
    tokens for heads around the rounds (Ulysses).
    """

    num_tokens: int
    forward: tuple[ScheduledRound, ...]
    backward: tuple[ScheduledRound, ...]
    context: tuple[ContextSlot, ...]
    kept: tuple[Range, ...]
    heads: HeadProgram | None
    reshuffle: ReshuffleProgram | None


def make_schedule(
    program: AttentionProgram | HeadProgram, *, reshuffle: ReshuffleProgram | None = None
) -> AttentionSchedule:
    """Group pairs of ranges into kernel calls and find where slots end.

    Raises:
        ValueError: the reshuffle is of another layout, or around a program that splits heads.
    """
    if reshuffle is not None and reshuffle.is_identity:
        reshuffle = None
    heads = program if isinstance(program, HeadProgram) else None
    if heads and reshuffle:
        raise ValueError(
            f"reshuffle: the program of rank {reshuffle.rank} splits heads over ranks {heads.ranks}, around which "
            "nothing is reshuffled; plan with plan.primitives=ring, or bring the plan's own order"
        )
    if reshuffle and program.num_tokens != max(reshuffle.num_placed, 1):
        raise ValueError(
            f"reshuffle: rank {reshuffle.rank} has {reshuffle.num_placed} tokens in its layout, the program "
            f"{program.num_tokens}; lower both from the same microbatch"
        )
    share = 1.0 / heads.degree if heads else 1.0
    return AttentionSchedule(
        num_tokens=(reshuffle or program).num_tokens,
        forward=_rounds(program.inner.forward, head_share=share),
        backward=_rounds(program.inner.backward, head_share=share),
        context=program.inner.context,
        kept=program.inner.kept,
        heads=heads,
        reshuffle=reshuffle,
    )


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
