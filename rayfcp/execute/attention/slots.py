"""Memory of messages, used again and again within a pass.

Sums of rows to which kernels' calls add in any order, without zeros to start from where a first term comes.

Merging of partial attention results by their logsumexp, in fp32.

Keys and values that microbatches keep for later slices of their sequences, and the gradients that come back.

Source: InfiniPipe, Section 3.1 (split chunks): a later slice attends to the keys and values of earlier ones.

Keys and values of a pass of attention by slot, sums of their gradients, and messages that fill and leave slots.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from rayfcp.execute.attention.schedule import (
    FEW,
    KernelCall,
    ReadyProgram,
    add_rows,
    are_apart,
    copy_rows,
    put_rows,
    rows_of,
    take_rows,
    without,
)
from rayfcp.program import Message, Payload, Range
from rayfcp.program.columns import merged, union


@dataclass(slots=True)
class _Buffer:
    """Raw bytes; `used`: an event behind the last computation that used them, on an accelerator."""

    memory: Tensor
    used: Any = None


class Buffers:
    """A pool. Sizes are rounded up to eighths of powers of two, so that messages of about one size serve each other.

    On an accelerator, where memory is used by a queue of computations and by one of messages, a buffer waits on the
    device for whoever used it last; hosts never wait.
    """

    def __init__(self) -> None:
        self._free: list[_Buffer] = []
        self._taken: dict[int, _Buffer] = {}

    def take(self, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Contiguous memory of any content, for what is enqueued from here on."""
        num_bytes = prod(shape) * dtype.itemsize
        if not num_bytes:
            return torch.empty(shape, dtype=dtype, device=device)
        buffer = self._find(num_bytes, device)
        if buffer is None:
            buffer = _Buffer(memory=torch.empty(rounded(num_bytes), dtype=torch.uint8, device=device))
        if buffer.used is not None:
            buffer.used.wait()
            buffer.used = None
        self._taken[buffer.memory.data_ptr()] = buffer
        return buffer.memory[:num_bytes].view(dtype).view(*shape)

    def give(self, tensor: Tensor, *, computed: bool) -> None:
        """The holder needs it no more, what is enqueued so far apart; memory from elsewhere is left alone.

        `computed`: computations used it, and not only messages, which the pool's user has waited for.
        """
        buffer = self._taken.pop(tensor.untyped_storage().data_ptr(), None)
        if buffer is None:
            return
        if computed and tensor.device.type != "cpu":
            buffer.used = getattr(torch, tensor.device.type).Event()
            buffer.used.record()
        self._free.append(buffer)

    def clear(self) -> None:
        """Let all memory go, once the device is done with what is enqueued so far."""
        for buffer in (*self._free, *self._taken.values()):
            if buffer.memory.device.type != "cpu":
                buffer.memory.record_stream(getattr(torch, buffer.memory.device.type).current_stream())
        self._free.clear()
        self._taken.clear()

    def _find(self, num_bytes: int, device: torch.device) -> _Buffer | None:
        """The one that has been free for longest of those that fit."""
        for at, buffer in enumerate(self._free):
            if num_bytes <= len(buffer.memory) <= 2 * num_bytes and buffer.memory.device == device:
                return self._free.pop(at)
        return None


def rounded(num_bytes: int) -> int:
    """Up to the next eighth of a power of two, at least 512.

    >>> rounded(1), rounded(5000), rounded(100_000)
    (512, 5120, 106496)
    """
    step = max(1 << max((num_bytes - 1).bit_length() - 4, 0), 512)
    return -(-num_bytes // step) * step


Tensors = tuple[Tensor, ...]


class RowSums:
    """Sums of several tensors with the same rows, `[rows, ...]` each.

    The first terms of a row are copied, later ones added. A first term that has all rows in order is kept as it is, in
    its own dtype, until another comes: one call over all rows costs nothing.

    Args:
        make: memory for all sums, of any content, in the dtype in which terms are added.
        num_rows: of each tensor.
    """

    def __init__(self, make: Callable[[], Tensors], *, num_rows: int) -> None:
        self._make, self._all = make, ((0, num_rows),)
        self._sums: Tensors = ()
        self._only: Tensors = ()
        self._known: tuple[Range, ...] = ()

    def add(self, ranges: Sequence[Range], *terms: Tensor) -> None:
        """Add terms to the rows `ranges`, which may repeat; each term has them one after the other."""
        if not self._known and not self._sums and merged(list(ranges)) == self._all:
            self._only, self._known = terms, self._all
            return
        rows = union(ranges)
        fresh = without(rows, self._known)
        alone = fresh == rows and are_apart(ranges)
        for target, term in zip(self.partial, terms, strict=True):
            if alone:
                put_rows(target, ranges, source=term)
            else:
                _clear(target, fresh)
                add_rows(target, ranges, source=term)
        self._known = union((*self._known, *rows))

    @property
    def partial(self) -> Tensors:
        """The sums so far, which go on growing in place; rows without a term hold anything."""
        if not self._sums:
            self._sums = self._make()
            for target, only in zip(self._sums, self._only, strict=False):
                target.copy_(only)
            self._only = ()
        return self._sums

    @property
    def whole(self) -> Tensors:
        """The sums, zero where there was no term."""
        for target in self.partial:
            _clear(target, without(self._all, self._known))
        self._known = self._all
        return self._sums

    def result(self, dtype: torch.dtype) -> Tensors:
        """The sums in a dtype."""
        return tuple(each.to(dtype) for each in self._only or self.whole)


def _clear(target: Tensor, ranges: Sequence[Range]) -> None:
    for start, stop in ranges:
        target[start:stop] = 0


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, otherwise fp32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


class Merged:
    """What is known so far of attention of `query`: out `[tokens, heads, head_dim]`, logsumexp `[tokens, heads]`.

    A row's first result is copied, later ones are merged in place. A first result that has all rows in order is kept
    as it is, in its own dtype, until another comes.
    """

    def __init__(self, query: Tensor) -> None:
        self._query, self._all = query, ((0, len(query)),)
        self._dtype = accumulator_dtype(query.dtype)
        self._out: Tensor | None = None
        self._lse: Tensor | None = None
        self._known: tuple[Range, ...] = ()

    def add(self, ranges: Sequence[Range], out: Tensor, *, lse: Tensor) -> None:
        """Merge the result of further keys for the rows `ranges`, none twice.

        out = out_a + sigmoid(lse_b - lse_a) (out_b - out_a), lse = log(exp(lse_a) + exp(lse_b)): exact for
        lse_a = -inf, and no exponential of a large number.
        """
        joined, rows = merged(list(ranges)), union(ranges)
        if not self._known and joined == self._all:
            self._out, self._lse, self._known = out, lse, self._all
            return
        fresh = without(rows, self._known)
        known_out, known_lse = self._sums()
        if fresh == rows:
            put_rows(known_out, joined, source=out)
            put_rows(known_lse, joined, source=lse)
        else:
            self._clear(fresh)
            _merge_rows(known_out, known_lse, joined, out=out.to(self._dtype), lse=lse)
        self._known = union((*self._known, *rows))

    @property
    def out(self) -> Tensor:
        """So far; rows that nothing was added to hold anything."""
        return self._sums()[0] if self._out is None else self._out

    def result(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """out in a dtype, and logsumexp. Rows that no key was seen for have 0 and -inf."""
        missing = without(self._all, self._known)
        if missing:
            self._sums()
            self._clear(missing)
            self._known = self._all
        assert self._out is not None and self._lse is not None
        return self._out.to(dtype), self._lse

    def _sums(self) -> tuple[Tensor, Tensor]:
        """What can be written to, in the dtype of sums."""
        query = self._query
        if self._out is None or self._lse is None:
            self._out = torch.empty(query.shape, dtype=self._dtype, device=query.device)
            self._lse = torch.empty(query.shape[:2], dtype=self._dtype, device=query.device)
        elif self._out.dtype is not self._dtype:
            self._out = self._out.to(self._dtype)
        return self._out, self._lse

    def _clear(self, ranges: Sequence[Range]) -> None:
        assert self._out is not None and self._lse is not None
        for start, stop in ranges:
            self._out[start:stop] = 0
            self._lse[start:stop] = float("-inf")


def _merge_rows(known_out: Tensor, known_lse: Tensor, ranges: Sequence[Range], *, out: Tensor, lse: Tensor) -> None:
    """Merge rows into `known_out` and `known_lse`, in place."""
    if len(ranges) > FEW:
        index = rows_of(tuple(ranges), out.device)
        old_out, old_lse = known_out.index_select(0, index), known_lse.index_select(0, index)
        _merge(old_out, old_lse, out=out, lse=lse)
        known_out.index_copy_(0, index, old_out)
        known_lse.index_copy_(0, index, old_lse)
        return
    at = 0
    for start, stop in ranges:
        rows = slice(at, at + stop - start)
        _merge(known_out[start:stop], known_lse[start:stop], out=out[rows], lse=lse[rows])
        at = rows.stop


def _merge(known_out: Tensor, known_lse: Tensor, *, out: Tensor, lse: Tensor) -> None:
    known_out.lerp_(out, torch.sigmoid(lse - known_lse).unsqueeze(-1))
    known_lse.copy_(torch.logaddexp(known_lse, lse))


Place = tuple[int, int]
"""(microbatch, layer)."""


@dataclass(slots=True)
class _Rows:
    """Rows `[start, stop)` of a slot 0: keys, values, and once a later slice gave some, gradients of both."""

    start: int
    stop: int
    key: Tensor
    value: Tensor
    num_bytes: int
    gradient: Tensor | None = None


class ContextStore:
    """What the microbatches of one rank keep, from their forward pass until their backward pass.

    `num_bytes`: gradients, and keys and values that nothing else holds; `peak_bytes`: the most so far.
    """

    def __init__(self) -> None:
        self._kept: dict[Place, list[_Rows]] = {}
        self.num_bytes = self.peak_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, at: Place, ranges: Sequence[Range], *, key: Tensor, value: Tensor, alone: bool) -> None:
        """Keep `ranges` of `key` and `value`, `[tokens, kv_heads, head_dim]`; a second time nothing changes.

        `alone`: autograd does not hold them, because the layer is recomputed. Then rows of a larger tensor are copied,
        so that the rest of it goes; otherwise they are views of what is there anyway.
        """
        if at in self._kept:
            return
        rows = []
        for start, stop in merged(list(ranges)):
            key_rows, value_rows = (_own(each[start:stop].detach(), alone=alone) for each in (key, value))
            num_bytes = key_rows.nbytes + value_rows.nbytes if alone else 0
            rows.append(_Rows(start=start, stop=stop, key=key_rows, value=value_rows, num_bytes=num_bytes))
            self._count(num_bytes)
        self._kept[at] = rows

    def read(self, at: Place, span: Range) -> tuple[Tensor, Tensor]:
        """Keys and values of rows `span`: views.

        Raises:
            ValueError: they are not kept.
        """
        rows, start, stop = self._find(at, span)
        return rows.key[start:stop], rows.value[start:stop]

    def gradient(self, at: Place, span: Range) -> Tensor:
        """dK, dV of rows `span`, `[2, tokens, kv_heads, head_dim]` in fp32 (fp64 for fp64), zero at first: a view, to
        which later slices add in place.

        Raises:
            ValueError: they are not kept.
        """
        rows, start, stop = self._find(at, span)
        if rows.gradient is None:
            rows.gradient = torch.zeros(
                (2, *rows.key.shape), dtype=accumulator_dtype(rows.key.dtype), device=rows.key.device
            )
            rows.num_bytes += rows.gradient.nbytes
            self._count(rows.gradient.nbytes)
        return rows.gradient[:, start:stop]

    def settle(self, at: Place, gradient: Tensor) -> None:
        """The layer runs backward itself: add what later slices gave to `gradient` of its slot 0, and let go."""
        for rows in self._kept.pop(at, ()):
            if rows.gradient is not None:
                gradient[:, rows.start : rows.stop] += rows.gradient
            self._count(-rows.num_bytes)

    def free(self, microbatch: int) -> None:
        """Let go of whatever a microbatch keeps."""
        for at in [each for each in self._kept if each[0] == microbatch]:
            self._count(-sum(rows.num_bytes for rows in self._kept.pop(at)))

    def _find(self, at: Place, span: Range) -> tuple[_Rows, int, int]:
        for rows in self._kept.get(at, ()):
            if rows.start <= span[0] and span[1] <= rows.stop:
                return rows, span[0] - rows.start, span[1] - rows.start
        raise ValueError(
            f"attention: microbatch {at[0]} keeps no tokens [{span[0]}, {span[1]}) in layer {at[1]}; run it forward "
            "before, and backward after, the microbatches that attend to it"
        )

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)


def _own(tensor: Tensor, *, alone: bool) -> Tensor:
    if not alone or tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


class Slots:
    """Slot 0 is this rank's own, context slots are in the store, all others are what messages bring.

    Args:
        program: that says which slots are in the store, and what of slot 0 goes there.
        at: microbatch and layer.
        buffers: memory of messages, and of gradients that become messages.
    """

    def __init__(self, program: ReadyProgram, *, store: ContextStore, at: Place, buffers: Buffers) -> None:
        self._earlier = {each.slot: ((each.microbatch, at[1]), each.span) for each in program.context}
        self._kept, self._store, self._at, self._buffers = program.kept, store, at, buffers
        self._held = {slot: store.read(*where) for slot, where in self._earlier.items()}
        self._messages: dict[int, Tensor] = {}
        self._shapes: dict[int, torch.Size] = {}
        self._gradients: dict[int, RowSums] = {}
        self._stacks: dict[int, Tensor] = {}

    def fill(self, slot: int, key: Tensor, *, value: Tensor) -> None:
        """Keys and values of a slot are here, `[tokens, kv_heads, head_dim]`."""
        self._held[slot] = (key, value)
        self._shapes[slot] = key.shape

    def keep(self, *, alone: bool) -> None:
        """Leave what later microbatches need of slot 0 in the store; `alone` as there."""
        if self._kept:
            key, value = self._held[0]
            self._store.put(self._at, self._kept, key=key, value=value, alone=alone)

    def keys_of(self, call: KernelCall) -> tuple[Tensor, Tensor]:
        """Keys and values of a call, pair by pair: views where one slot has them in one piece."""
        runs = call.key_runs
        parts = [[take_rows(each, ranges) for each in self._held[slot]] for slot, ranges in runs]
        if len(parts) == 1:
            return parts[0][0], parts[0][1]
        key, value = (torch.cat(each) for each in zip(*parts, strict=True))
        return key, value

    def add_gradients(self, call: KernelCall, dk: Tensor, *, dv: Tensor) -> None:
        """Of the keys and values of a call."""
        at = 0
        for slot, ranges in call.key_runs:
            stop = at + sum(last - first for first, last in ranges)
            self._add(slot, ranges, dk[at:stop], dv=dv[at:stop])
            at = stop

    def _add(self, slot: int, ranges: Sequence[Range], dk: Tensor, *, dv: Tensor) -> None:
        if slot not in self._earlier:
            self.gradient(slot).add(ranges, dk, dv)
            return
        for target, source in zip(self._store.gradient(*self._earlier[slot]), (dk, dv), strict=True):
            add_rows(target, ranges, source=source)

    def gradient(self, slot: int) -> RowSums:
        """Sums of dK, dV of a slot that is not in the store; in slot 0 with what later microbatches gave."""
        if slot in self._gradients:
            return self._gradients[slot]
        key = self._held[0][0]
        shape, dtype = (2, *self._shapes[slot]), accumulator_dtype(key.dtype)

        def stacked() -> tuple[Tensor, ...]:
            make = self._buffers.take if slot else torch.empty  # slot 0's goes to autograd, the others' into messages
            self._stacks[slot] = make(shape, dtype=dtype, device=key.device)
            return self._stacks[slot].unbind()

        sums = self._gradients[slot] = RowSums(stacked, num_rows=shape[1])
        if slot == 0 and self._kept:
            sums.whole  # noqa: B018  zeros, to which the store adds
            self._store.settle(self._at, self._stacks[0])
        return sums

    def complete(self, messages: Sequence[Message]) -> None:
        """Sums that leave with these messages become whole here, among the computations that they are part of: their
        terms' memory is used again by what is computed next."""
        for message in messages:
            if message.payload is Payload.GRAD:
                self.gradient(message.slot).whole  # noqa: B018  all rows of the stack

    def payload(self, message: Message) -> Tensor:
        """What a message carries, `[2, tokens, kv_heads, head_dim]`; a gradient, which is complete, is gone from here
        with it. Keys and values that leave as they came are not copied."""
        if message.payload is Payload.GRAD:
            del self._gradients[message.slot]
            return self._stacks.pop(message.slot)
        came = self._messages.get(message.slot)
        if came is not None and merged(list(message.ranges)) == ((0, came.shape[1]),):
            return came
        packed = self.room(message)
        for target, source in zip(packed, self._held[message.slot], strict=True):
            copy_rows(source, message.ranges, target=target)
        return packed

    def room(self, message: Message) -> Tensor:
        """Memory for what a message carries."""
        key = self._held[0][0]
        dtype = key.dtype if message.payload is Payload.KV else accumulator_dtype(key.dtype)
        return self._buffers.take((2, message.num_tokens, *key.shape[1:]), dtype=dtype, device=key.device)

    def arrived(self, message: Message, carried: Tensor) -> None:
        """A message is here: keys and values fill their slot, a gradient is added to its slot's."""
        if message.payload is Payload.KV:
            self.fill(message.slot, carried[0], value=carried[1])
            self._messages[message.slot] = carried
            return
        if message.slot not in self._earlier:
            self.gradient(message.slot).partial  # noqa: B018  what came is not kept, so it must be copied
        self._add(message.slot, message.ranges, carried[0], dv=carried[1])
        self._buffers.give(carried, computed=True)

    def left(self, message: Message, carried: Tensor) -> None:
        """A message is with its receiver."""
        if self._messages.get(message.slot) is not carried:
            self._buffers.give(carried, computed=message.payload is Payload.GRAD)

    def free(self, slots: Sequence[int]) -> None:
        """Nobody needs keys and values of these any more."""
        for slot in slots:
            self._held.pop(slot, None)
            if slot in self._messages:
                self._buffers.give(self._messages.pop(slot), computed=True)

    def close(self) -> None:
        """The pass is over; sums that somebody holds stay."""
        self.free(list(self._messages))
        self._gradients.clear()  # which know the way back here, so that nothing would go before a collection
