"""Memory of an attention pass: keys, values and gradients by slot, merged results, and reused message buffers.

A slot holds *parts* of its tokens, `[tokens, heads, head_dim]` each: keys and values, or latents and the rotated keys
that heads share, from which keys and values are made for one call at a time (`rayfcp.execute.attention.latents`).
Messages have all parts one after the other.

`ContextStore` keeps keys and values of a microbatch for later slices of its sequences, and takes the gradients that
come back (InfiniPipe, Section 3.1, split chunks).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from rayfcp.execute.attention.latents import Latents
from rayfcp.execute.attention.schedule import (
    FEW,
    AttentionSchedule,
    KernelCall,
    accumulator_dtype,
    are_apart,
    copy_rows,
    rows_of,
    take_rows,
    without,
    write_rows,
)
from rayfcp.execute.devices.backend import backend_of
from rayfcp.program import Message, Payload, Range
from rayfcp.program.instructions import merged, union


@dataclass(slots=True)
class _Buffer:
    """Raw bytes. `used`: on an accelerator, an event behind the last computation that used them."""

    memory: Tensor
    used: Any = None


class Buffers:
    """Pool of message memory. Sizes are rounded up to eighths of powers of two, so that messages of similar size reuse
    each other's memory.

    On an accelerator the compute stream and the message stream share this memory, and torch's allocator orders frees
    against one stream only. So the pool keeps the memory, and the stream that takes a buffer waits for the event behind
    its last use; the host never waits.
    """

    def __init__(self) -> None:
        self._free: list[_Buffer] = []
        self._taken: dict[int, _Buffer] = {}

    def take(self, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Contiguous uninitialized memory, for work that is enqueued on the current stream from here on."""
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
        """Return memory to the pool; work enqueued so far may still use it. Memory from elsewhere is ignored.

        `computed`: computations on the current stream used it. Messages alone need no event: whoever gives their
        memory back has waited for them.
        """
        buffer = self._taken.pop(tensor.untyped_storage().data_ptr(), None)
        if buffer is None:
            return
        streams = backend_of(tensor.device).streams
        if computed and streams is not None:
            buffer.used = streams.Event()
            buffer.used.record()
        self._free.append(buffer)

    def clear(self) -> None:
        """Free all memory, as soon as the device is done with what the compute stream holds so far."""
        for buffer in (*self._free, *self._taken.values()):
            streams = backend_of(buffer.memory.device).streams
            if streams is not None:
                buffer.memory.record_stream(streams.current_stream())
        self._free.clear()
        self._taken.clear()

    def _find(self, num_bytes: int, device: torch.device) -> _Buffer | None:
        """The fitting buffer that has been free for longest: its event is the likeliest to be over."""
        for at, buffer in enumerate(self._free):
            if num_bytes <= len(buffer.memory) <= 2 * num_bytes and buffer.memory.device == device:
                return self._free.pop(at)
        return None


def rounded(num_bytes: int) -> int:
    """`num_bytes` up to the next eighth of a power of two, at least 512."""
    step = max(1 << max((num_bytes - 1).bit_length() - 4, 0), 512)
    return -(-num_bytes // step) * step


Tensors = tuple[Tensor, ...]


class RowSums:
    """Sums of several tensors with the same `num_rows` rows, `[rows, ...]` each, in memory from `make`.

    The first term of a row is copied, later ones are added: sums need no zeros. A first term that has all rows in order
    is kept as it is, in its own dtype, until another comes: one call over all rows costs nothing.
    """

    def __init__(self, make: Callable[[], Tensors], *, num_rows: int) -> None:
        self._make, self._all = make, ((0, num_rows),)
        self._sums: Tensors = ()
        self._only: Tensors = ()
        self._known: tuple[Range, ...] = ()

    def add(self, ranges: Sequence[Range], *terms: Tensor) -> None:
        """Add terms to the rows `ranges`, which may repeat; each term has these rows concatenated."""
        if not self._known and not self._sums and merged(ranges) == self._all:
            self._only, self._known = terms, self._all
            return
        rows = union(ranges)
        fresh = without(rows, self._known)
        alone = fresh == rows and are_apart(ranges)
        for target, term in zip(self.partial, terms, strict=True):
            if not alone:
                _clear(target, fresh)
            write_rows(target, ranges, source=term, add=not alone)
        self._known = union((*self._known, *rows))

    @property
    def partial(self) -> Tensors:
        """The sums so far, which are updated in place; rows without a term are undefined."""
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
        """The sums, zero where there was no term, cast to `dtype`."""
        return tuple(each.to(dtype) for each in self._only or self.whole)


def _clear(target: Tensor, ranges: Sequence[Range]) -> None:
    for start, stop in ranges:
        target[start:stop] = 0


class MergedAttention:
    """Attention of `query` over the keys so far: out `[tokens, heads, value_dim]`, logsumexp `[tokens, heads]`, merged
    in the accumulator dtype. First results are treated as in `RowSums`."""

    def __init__(self, query: Tensor, *, value_dim: int) -> None:
        self._query, self._all = query, ((0, len(query)),)
        self._shape = (*query.shape[:2], value_dim)
        self._dtype = accumulator_dtype(query.dtype)
        self._out: Tensor | None = None
        self._lse: Tensor | None = None
        self._known: tuple[Range, ...] = ()

    def add(self, ranges: Sequence[Range], out: Tensor, *, lse: Tensor) -> None:
        """Merge the result of further keys for the rows `ranges`, no row twice.

        out = out_a + sigmoid(lse_b - lse_a) (out_b - out_a), lse = log(exp(lse_a) + exp(lse_b)): exact for
        lse_a = -inf, and no exponential of a large number.
        """
        joined, rows = merged(ranges), union(ranges)
        if not self._known and joined == self._all:
            self._out, self._lse, self._known = out, lse, self._all
            return
        fresh = without(rows, self._known)
        if fresh == rows:
            for target, source in zip(self._sums(), (out, lse), strict=True):
                write_rows(target, joined, source=source)
        else:
            self._clear(fresh)
            _merge_rows(*self._sums(), joined, out=out, lse=lse)
        self._known = union((*self._known, *rows))

    def result(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Output in `dtype`, and logsumexp; 0 and -inf in rows that attended to no key."""
        missing = without(self._all, self._known)
        self._clear(missing)
        self._known = self._all
        assert self._out is not None and self._lse is not None
        return self._out.to(dtype), self._lse

    def _sums(self) -> tuple[Tensor, Tensor]:
        """Writable output and logsumexp, in the accumulator dtype."""
        query = self._query
        if self._out is None or self._lse is None:
            self._out = torch.empty(self._shape, dtype=self._dtype, device=query.device)
            self._lse = torch.empty(self._shape[:2], dtype=self._dtype, device=query.device)
        elif self._out.dtype is not self._dtype:
            self._out = self._out.to(self._dtype)
        return self._out, self._lse

    def _clear(self, ranges: Sequence[Range]) -> None:
        for start, stop in ranges:
            out, lse = self._sums()
            out[start:stop], lse[start:stop] = 0, float("-inf")


def _merge_rows(known_out: Tensor, known_lse: Tensor, ranges: Sequence[Range], *, out: Tensor, lse: Tensor) -> None:
    fused = backend_of(out.device).merge_kernel() if known_out.dtype is torch.float32 else None
    if fused is not None:
        rows = rows_of(tuple(ranges), out.device) if len(ranges) > 1 else ranges[0][0]
        fused(known_out, known_lse, rows=rows, out=out, lse=lse)
        return
    out = out.to(known_out.dtype)
    if len(ranges) > FEW:
        index = rows_of(tuple(ranges), out.device)
        old_out, old_lse = known_out.index_select(0, index), known_lse.index_select(0, index)
        merge_by_operators(old_out, old_lse, out=out, lse=lse)
        known_out.index_copy_(0, index, old_out)
        known_lse.index_copy_(0, index, old_lse)
        return
    at = 0
    for start, stop in ranges:
        own = slice(at, at + stop - start)
        merge_by_operators(known_out[start:stop], known_lse[start:stop], out=out[own], lse=lse[own])
        at = own.stop


def merge_by_operators(known_out: Tensor, known_lse: Tensor, *, out: Tensor, lse: Tensor) -> None:
    """Merge `out` and `lse` into `known_out` and `known_lse`, of as many rows, by torch's operators."""
    known_out.lerp_(out, torch.sigmoid(lse - known_lse).unsqueeze(-1))
    known_lse.copy_(torch.logaddexp(known_lse, lse))


LayerKey = tuple[int, int]
"""(microbatch, layer)."""


@dataclass(slots=True)
class _ContextRows:
    """Rows `[start, stop)` of the parts of a slot 0, and the gradients that later slices have added."""

    start: int
    stop: int
    parts: Tensors
    gradients: Tensors = ()


StateName = tuple[str, int]
"""(what, sequence)."""


class ContextStore:
    """Parts of tokens, and states of recurrent layers, that the microbatches of one rank keep from their forward to
    their backward pass; `alone`: until they are freed, as no backward pass comes and autograd holds nothing."""

    def __init__(self, *, alone: bool = False) -> None:
        self._kept: dict[LayerKey, list[_ContextRows]] = {}
        self._states: dict[LayerKey, dict[StateName, Tensor]] = {}
        self._state_gradients: dict[LayerKey, dict[StateName, Tensor]] = {}
        self._alone = alone

    def __len__(self) -> int:
        return len(self._kept) + len(self._states) + len(self._state_gradients)

    def put(self, at: LayerKey, ranges: Sequence[Range], *, parts: Tensors, recomputed: bool) -> None:
        """Keep `ranges` of the rows of `parts`; a recomputation changes nothing.

        `recomputed`: autograd does not hold the tensors, since the layer is recomputed. Rows of a larger tensor are
        copied then, so that the rest of it is freed; otherwise they are views of what autograd holds anyway.
        """
        if at in self._kept:
            return
        self._kept[at] = []
        for start, stop in merged(ranges):
            own = (_own(each[start:stop].detach(), recomputed=recomputed or self._alone) for each in parts)
            self._kept[at].append(_ContextRows(start=start, stop=stop, parts=tuple(own)))

    def read(self, at: LayerKey, span: Range) -> Tensors:
        """Parts of rows `span`, as views; a ValueError if they are not kept."""
        rows, start, stop = self._find(at, span)
        return tuple(each[start:stop] for each in rows.parts)

    def gradients(self, at: LayerKey, span: Range) -> Tensors:
        """Views of the gradients of the parts of rows `span` in the accumulator dtype, zero at first; later slices add
        to them in place."""
        rows, start, stop = self._find(at, span)
        if not rows.gradients:
            rows.gradients = tuple(torch.zeros_like(each, dtype=accumulator_dtype(each.dtype)) for each in rows.parts)
        return tuple(each[start:stop] for each in rows.gradients)

    def settle(self, at: LayerKey, gradients: Tensors) -> None:
        """Add the gradients of later slices to `gradients` of the layer's slot 0, and forget the layer: it runs
        backward itself now."""
        for rows in self._kept.pop(at, ()):
            for target, source in zip(gradients, rows.gradients, strict=False):
                target[rows.start : rows.stop] += source

    def put_state(self, at: LayerKey, name: StateName, *, state: Tensor) -> None:
        """Keep a tensor for the next slice of a sequence; a recomputation changes nothing."""
        self._states.setdefault(at, {}).setdefault(name, state.detach())

    def state(self, at: LayerKey, name: StateName) -> Tensor:
        """A state that is kept; a ValueError if it is not."""
        if name not in self._states.get(at, {}):
            raise ValueError(
                f"recurrence: microbatch {at[0]} keeps no {name[0]} of sequence {name[1]} in layer {at[1]}; run it "
                "forward before, and backward after, the microbatch with the sequence's next slice"
            )
        return self._states[at][name]

    def put_state_gradient(self, at: LayerKey, name: StateName, *, gradient: Tensor) -> None:
        """Bring the gradient of a state that is kept; there is one next slice, so it comes once."""
        self._state_gradients.setdefault(at, {})[name] = gradient

    def settle_state(self, at: LayerKey, name: StateName) -> Tensor:
        """The gradient of a state that is kept, zero if the next slice brought none; and forget both."""
        state = self.state(at, name)
        gradient = self._state_gradients.get(at, {}).pop(name, None)
        for held in (self._states, self._state_gradients):
            if at in held:
                held[at].pop(name, None)
                if not held[at]:
                    del held[at]
        return torch.zeros_like(state) if gradient is None else gradient

    def free(self, microbatch: int) -> None:
        """Forget what a microbatch keeps."""
        held: tuple[dict[LayerKey, Any], ...] = (self._kept, self._states, self._state_gradients)
        for each in held:
            for at in [key for key in each if key[0] == microbatch]:
                del each[at]

    def _find(self, at: LayerKey, span: Range) -> tuple[_ContextRows, int, int]:
        for rows in self._kept.get(at, ()):
            if rows.start <= span[0] and span[1] <= rows.stop:
                return rows, span[0] - rows.start, span[1] - rows.start
        raise ValueError(
            f"attention: microbatch {at[0]} keeps no tokens [{span[0]}, {span[1]}) in layer {at[1]}; run it forward "
            "before, and backward after, the microbatches that attend to it"
        )


def _own(tensor: Tensor, *, recomputed: bool) -> Tensor:
    if not recomputed or tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


class Slots:
    """Parts and gradient sums of one pass of `layer` by slot: slot 0, whose `own` parts are given, is this rank's,
    context slots lie in the store, messages bring all others. `buffers`: memory of messages, and of gradients that
    become messages. `latents`: makes keys and values of the parts."""

    def __init__(
        self,
        schedule: AttentionSchedule,
        *,
        own: Tensors,
        store: ContextStore,
        layer: LayerKey,
        buffers: Buffers,
        latents: Latents | None,
    ) -> None:
        self._earlier = {each.slot: ((each.microbatch, layer[1]), each.span) for each in schedule.context}
        self._kept, self._store, self._layer, self._buffers = schedule.kept, store, layer, buffers
        self._held = {slot: store.read(*where) for slot, where in self._earlier.items()}
        self._held[0], self._lengths = own, {0: len(own[0])}
        self._latents = latents
        self._messages: dict[int, Tensor] = {}
        self._gradients: dict[int, RowSums] = {}
        self._stacks: dict[int, Tensor] = {}

    def keep(self, *, recomputed: bool) -> None:
        """Keep rows of slot 0 in the store that later microbatches need."""
        if self._kept:
            self._store.put(self._layer, self._kept, parts=self._held[0], recomputed=recomputed)

    def keys_of(self, call: KernelCall) -> Tensors:
        """Keys and values of a call, pair by pair: views where one slot has them contiguously."""
        parts = self._parts(call)
        return parts if self._latents is None else self._latents.expand(*parts)

    def _parts(self, call: KernelCall) -> Tensors:
        found = [[take_rows(each, ranges) for each in self._held[slot]] for slot, ranges in call.key_runs]
        return tuple(found[0]) if len(found) == 1 else tuple(torch.cat(each) for each in zip(*found, strict=True))

    def add_gradients(self, call: KernelCall, dk: Tensor, *, dv: Tensor) -> None:
        """Add gradients of the keys and values of a call to those of their slots."""
        terms = (dk, dv) if self._latents is None else self._latents.collapse(*self._parts(call), dk=dk, dv=dv)
        at = 0
        for slot, ranges in call.key_runs:
            stop = at + sum(last - first for first, last in ranges)
            self._add(slot, ranges, *(each[at:stop] for each in terms))
            at = stop

    def _add(self, slot: int, ranges: Sequence[Range], *terms: Tensor) -> None:
        """Add gradients of the parts of rows of a slot."""
        if slot not in self._earlier:
            self.gradient(slot).add(ranges, *terms)
            return
        for target, source in zip(self._store.gradients(*self._earlier[slot]), terms, strict=True):
            write_rows(target, ranges, source=source, add=True)

    def gradient(self, slot: int) -> RowSums:
        """Gradient sums of a slot outside the store; slot 0's start with the gradients of later microbatches."""
        if slot in self._gradients:
            return self._gradients[slot]
        num_tokens, dtype = self._lengths[slot], accumulator_dtype(self._held[0][0].dtype)

        def stacked() -> Tensors:
            # Slot 0's gradient is handed to autograd, which keeps it; the others are sent, and their memory reused.
            make = self._buffers.take if slot else torch.empty
            self._stacks[slot] = make((self._elements(num_tokens),), dtype=dtype, device=self._held[0][0].device)
            return self._parts_of(self._stacks[slot])

        sums = self._gradients[slot] = RowSums(stacked, num_rows=num_tokens)
        if slot == 0 and self._kept:
            self._store.settle(self._layer, sums.whole)
        return sums

    def _elements(self, num_tokens: int) -> int:
        return num_tokens * sum(prod(each.shape[1:]) for each in self._held[0])

    def _parts_of(self, memory: Tensor) -> Tensors:
        """Views of the parts that lie in `memory`, one after the other."""
        num_tokens = len(memory) // self._elements(1)
        shapes = [(num_tokens, *each.shape[1:]) for each in self._held[0]]
        return tuple(part.view(at) for part, at in zip(memory.split([prod(at) for at in shapes]), shapes, strict=True))

    def complete(self, messages: Sequence[Message]) -> None:
        """Finish sums that leave with these messages. On the compute stream, before the message stream takes over: the
        memory of their terms is reused by what is computed next."""
        for message in messages:
            if message.payload is Payload.GRAD:
                self.gradient(message.slot).whole  # noqa: B018  all rows of the stack

    def payload(self, message: Message) -> Tensor:
        """Contents of a message, one-dimensional. A gradient, complete by now, leaves its slot. Parts that are passed
        on as received are not copied."""
        if message.payload is Payload.GRAD:
            del self._gradients[message.slot]
            return self._stacks.pop(message.slot)
        came = self._messages.get(message.slot)
        if came is not None and merged(message.ranges) == ((0, self._lengths[message.slot]),):
            return came
        packed = self.allocate(message)
        for target, source in zip(self._parts_of(packed), self._held[message.slot], strict=True):
            copy_rows(source, message.ranges, target=target)
        return packed

    def allocate(self, message: Message) -> Tensor:
        """Memory for the contents of a message."""
        key = self._held[0][0]
        dtype = key.dtype if message.payload is Payload.KV else accumulator_dtype(key.dtype)
        return self._buffers.take((self._elements(message.num_tokens),), dtype=dtype, device=key.device)

    def on_received(self, message: Message, carried: Tensor) -> None:
        """Fill a slot with received parts, or add a received gradient to its slot's."""
        if message.payload is Payload.KV:
            self._held[message.slot], self._lengths[message.slot] = self._parts_of(carried), message.num_tokens
            self._messages[message.slot] = carried
            return
        if message.slot not in self._earlier:
            self.gradient(message.slot).partial  # noqa: B018  its memory is given back below, so the first term must be copied
        self._add(message.slot, message.ranges, *self._parts_of(carried))
        self._buffers.give(carried, computed=True)

    def on_sent(self, message: Message, carried: Tensor) -> None:
        """Reuse the memory of a sent message, unless a slot still has it."""
        if self._messages.get(message.slot) is not carried:
            self._buffers.give(carried, computed=message.payload is Payload.GRAD)

    def free(self, slots: Sequence[int]) -> None:
        """Forget parts of slots that the rest of the pass does not read."""
        for slot in slots:
            self._held.pop(slot, None)
            if slot in self._messages:
                self._buffers.give(self._messages.pop(slot), computed=True)

    def close(self) -> None:
        """End the pass; sums that the caller holds stay valid."""
        self.free(list(self._messages))
        self._gradients.clear()  # their `make` refers to these slots: a cycle would hold all tensors until a collection
