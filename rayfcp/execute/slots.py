"""Keys and values of a pass of attention by slot, sums of their gradients, and messages that fill and leave slots."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rayfcp.execute.buffers import Buffers
from rayfcp.execute.context import ContextStore, Place
from rayfcp.execute.merge import accumulator_dtype
from rayfcp.execute.ranges import add_rows, copy_rows, take_rows
from rayfcp.execute.schedule import KernelCall, ReadyProgram
from rayfcp.execute.sums import RowSums
from rayfcp.program import Message, Payload, Range
from rayfcp.program.placed import merged


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
