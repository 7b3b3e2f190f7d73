"""The one differentiable interpreter of attention programs: any placement of blocks, any rounds, by heads or not.

Forward: each round posts its messages, computes what earlier rounds brought, and merges (out, lse) in
fp32. Backward: the same rounds bring keys and values again; each call yields a partial dQ, kept here,
and a partial dK, dV, summed in fp32 in its slot and sent where the program says. Context slots, gradients
included, lie in the store of what earlier microbatches kept (`rayfcp.execute.context`).

With a reshuffle tensors come and go in the loop's order. Exchanges before and after the rounds carry queries,
keys, values and outputs forward, their gradients backward; local attends run meanwhile (`rayfcp.program.hiding`).
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rayfcp.execute.checks import check_shapes, check_tokens
from rayfcp.execute.context import ContextStore
from rayfcp.execute.heads import HeadExchange, ToHeads, ToTokens
from rayfcp.execute.kernels import AttentionKernel
from rayfcp.execute.merge import Merged, accumulator_dtype
from rayfcp.execute.ranges import add_rows, take_rows
from rayfcp.execute.reshuffle import exchange, keep_in, keep_out
from rayfcp.execute.schedule import KernelCall, ReadyExchange, ReadyHeads, ReadyProgram, ReadyRound, make_ready
from rayfcp.execute.traffic import Traffic
from rayfcp.execute.transport import Envelope, Pending, Transport
from rayfcp.program import AttentionProgram, HeadProgram, Message, Payload, ReshuffleProgram


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionContext:
    """What a layer's attention needs besides its tensors; travels as a keyword argument of the layer.

    The first `recomputed_layers` layers of the stage keep only their input; `recomputed`: this layer, number `layer`
    of the model, does. `store`: what microbatches keep for later ones, this one being number `microbatch`.
    """

    program: ReadyProgram | ReadyHeads
    transport: Transport
    kernel: AttentionKernel
    recomputed_layers: int = 0
    store: ContextStore = field(default_factory=ContextStore)
    microbatch: int = 0
    layer: int = 0
    recomputed: bool = False
    traffic: Traffic = field(default_factory=Traffic)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    program: AttentionProgram | HeadProgram | AttentionContext,
    *,
    scale: float | None = None,
    reshuffle: ReshuffleProgram | None = None,
    transport: Transport | None = None,
    kernel: AttentionKernel | None = None,
) -> Tensor:
    """Distributed attention of this rank's tokens, differentiable, exact.

    Args:
        query: `[tokens, heads, head_dim]`, tokens in the order of the program's load; with a reshuffle in the order
            in which the loop brings them (no token or one of padding if it brings none).
        key: `[tokens, kv_heads, head_dim]`; `kv_heads` divides `heads`.
        value: as `key`.
        program: this rank's attention program, or a context that holds one.
        scale: of the scores; `head_dim ** -0.5` if absent.
        reshuffle: this rank's, if the loop brings its own layout; all ranks pass theirs or none does. A context has
            its own (`make_ready`).
        transport: where the messages go (needed with a bare program).
        kernel: needed with a bare program.

    Returns:
        `[tokens, heads, head_dim]` in the dtype and order of `query`; padding's output is of no meaning. Every rank
        of the plan must call, with the program lowered for it, the same number of times forward and backward.

    Raises:
        ValueError: the tensors do not have the program's tokens, their shapes or dtypes disagree, the program's degree
            of sharing out heads does not divide them, earlier keys and values are not kept, or the reshuffle is of
            another rank or layout or around a program that shares out heads.

    Source: Ring Attention; zig-zag placement and merging as in FCP (ring), Section 4.3; DeepSpeed-Ulysses; reshuffling
    as in FCP (block), Section 4.3.
    """
    if not isinstance(program, AttentionContext):
        if transport is None or kernel is None:
            raise ValueError("attention: a bare program needs transport= and kernel=; give both")
        ready = make_ready(program, reshuffle=reshuffle)
        program = AttentionContext(program=ready, transport=transport, kernel=kernel)
    elif reshuffle is not None:
        raise ValueError("attention: reshuffle= beside a context; make_ready(program, reshuffle=...) for the context")
    check_tokens(query, key, program=program.program, rank=program.transport.rank)
    check_shapes(query, key, value=value)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if isinstance(program.program, ReadyHeads):
        return _by_heads(query, key, value, program, program.program, scale=scale)
    return _Attention.apply(query, key, value, program, scale)  # type: ignore[no-any-return, no-untyped-call]


def _by_heads(
    query: Tensor, key: Tensor, value: Tensor, context: AttentionContext, program: ReadyHeads, *, scale: float
) -> Tensor:
    exchange = HeadExchange(
        program.program,
        heads=query.shape[1],
        kv_heads=key.shape[1],
        transport=context.transport,
        traffic=context.traffic,
    )
    gathered: Tensor = ToHeads.apply(query, key, value, exchange)  # type: ignore[no-untyped-call]
    parts = gathered.split([exchange.head_share, exchange.kv_share, exchange.kv_share], dim=1)
    inner = replace(context, program=program.attention)
    out = _Attention.apply(*parts, inner, scale)  # type: ignore[no-untyped-call]
    return ToTokens.apply(out, exchange)  # type: ignore[no-any-return, no-untyped-call]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext, scale: float) -> Tensor:
        around, theirs = context.program.reshuffle, (query, key, value)
        q, k, v = keep_in(around.program, theirs) if around else theirs
        run = _Run(context, q, scale=scale)
        run.fill(0, k, value=v)
        run.keep()
        merged = Merged.empty(q)
        attend = functools.partial(run.attend, merged=merged)
        if around:
            run.exchange(around.forward.entering, lambda: theirs, targets=(q, k, v), compute=attend)
        run.rounds(context.program.forward, attend)
        if around:
            home = query.new_zeros(query.shape)
            run.exchange(around.forward.leaving, lambda: (merged.out,), targets=(home,), compute=attend)
        out, lse = merged.result(query.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.context, ctx.scale = context, scale
        if not around:
            return out
        keep_out(around.program, (out,), theirs=(home,))
        return home

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        around = ctx.context.program.reshuffle
        grad_out = keep_in(around.program, grads)[0] if around else grads[0]
        run = _Run(ctx.context, q, scale=ctx.scale)
        run.fill(0, k, value=v)
        dq = torch.zeros(q.shape, dtype=accumulator_dtype(q.dtype), device=q.device)
        ours = (dq, *run.grad_slot(0))
        differentiate = functools.partial(run.differentiate, dq=dq, saved=(grad_out, out, lse))
        if around:
            run.exchange(around.backward.entering, lambda: grads, targets=(grad_out,), compute=differentiate)
        run.rounds(ctx.context.program.backward, differentiate)
        if not around:
            return *(each.to(q.dtype) for each in ours), None, None
        theirs = [q.new_zeros((len(grads[0]), *each.shape[1:])) for each in ours]
        run.exchange(around.backward.leaving, lambda: ours, targets=theirs, compute=differentiate)
        keep_out(around.program, ours, theirs=theirs)
        return *theirs, None, None


class _Run:
    """State of one pass: keys and values per slot, their gradients, buffers under way."""

    def __init__(self, context: AttentionContext, query: Tensor, *, scale: float) -> None:
        program = context.program
        assert isinstance(program, ReadyProgram)
        self._earlier = {each.slot: ((each.microbatch, context.layer), each.span) for each in program.context}
        self._kept, self._at = program.kept, (context.microbatch, context.layer)
        self.slots = {slot: context.store.read(*held) for slot, held in self._earlier.items()}
        self._slot_shapes: dict[int, torch.Size] = {}
        self.gradients: dict[int, Tensor] = {}
        self._context, self._query, self._scale = context, query, scale
        self._arriving: list[tuple[Message, Tensor]] = []
        self._leaving: list[Envelope] = []

    def fill(self, slot: int, key: Tensor, *, value: Tensor) -> None:
        """Keys and values of a slot are here."""
        self.slots[slot] = (key, value)
        self._slot_shapes[slot] = key.shape

    def keep(self) -> None:
        """What later microbatches need of slot 0."""
        if self._kept:
            key, value = self.slots[0]
            self._context.store.put(self._at, self._kept, key=key, value=value, alone=self._context.recomputed)

    def rounds(self, steps: Sequence[ReadyRound], compute: Callable[[KernelCall], None]) -> None:
        """Run rounds in order: each posts its messages, computes, and waits."""
        for step in steps:
            pending = self._post(step)
            for call in step.calls:
                compute(call)
            self._finish(step, pending)

    def exchange(
        self,
        steps: Sequence[ReadyExchange],
        sources: Callable[[], Sequence[Tensor]],
        *,
        targets: Sequence[Tensor],
        compute: Callable[[KernelCall], None],
    ) -> None:
        """Run rounds of a reshuffle (`rayfcp.execute.reshuffle.exchange`)."""
        context = self._context
        exchange(steps, sources, targets=targets, compute=compute, transport=context.transport, traffic=context.traffic)

    def _post(self, step: ReadyRound) -> Pending:
        """Start the round's messages."""
        self._leaving = [(message.peer, self._payload(message)) for message in step.sends]
        self._arriving = [(message, self._buffer(message)) for message in step.receives]
        self._context.traffic.bytes_sent += sum(tensor.nbytes for _, tensor in self._leaving)
        return self._context.transport.post(
            self._leaving, [(message.peer, buffer) for message, buffer in self._arriving]
        )

    def _finish(self, step: ReadyRound, pending: Pending) -> None:
        """Wait for the round's messages, put them in their slots, drop what is not needed any more."""
        self._context.traffic.wait(pending)
        for message, buffer in self._arriving:
            if message.payload is Payload.KV:
                self.fill(message.slot, buffer[0], value=buffer[1])
            else:
                slot = self.grad_slot(message.slot)
                for target, source in zip(slot, buffer, strict=True):
                    add_rows(target, message.ranges, source=source)
        self._leaving = []
        for slot in step.free:
            self.slots.pop(slot, None)

    def attend(self, call: KernelCall, *, merged: Merged) -> None:
        """Forward of one kernel call, merged into what is known."""
        self._context.traffic.cells += call.num_cells
        key, value = self.slots[call.slot]
        out, lse = self._context.kernel.forward(
            take_rows(self._query, call.queries),
            take_rows(key, call.keys),
            take_rows(value, call.keys),
            query_lengths=call.query_lengths,
            key_lengths=call.key_lengths,
            causal=call.causal,
            scale=self._scale,
        )
        merged.add(call.queries, out, lse=lse)

    def differentiate(self, call: KernelCall, *, dq: Tensor, saved: tuple[Tensor, Tensor, Tensor]) -> None:
        """Backward of one kernel call, added to dQ and to the slot's dK, dV."""
        self._context.traffic.cells += call.num_cells
        key, value = self.slots[call.slot]
        grad_out, out, lse = (take_rows(tensor, call.queries) for tensor in saved)
        partial_dq, dk, dv = self._context.kernel.backward(
            grad_out,
            take_rows(self._query, call.queries),
            take_rows(key, call.keys),
            take_rows(value, call.keys),
            out,
            lse,
            query_lengths=call.query_lengths,
            key_lengths=call.key_lengths,
            causal=call.causal,
            scale=self._scale,
        )
        add_rows(dq, call.queries, source=partial_dq)
        slot = self.grad_slot(call.slot)
        add_rows(slot[0], call.keys, source=dk)
        add_rows(slot[1], call.keys, source=dv)

    def grad_slot(self, slot: int) -> Tensor:
        """dK, dV of a slot, `[2, tokens, kv_heads, head_dim]`: at first zero, in slot 0 what later microbatches gave,
        and in a context slot what is summed in the store so far."""
        if slot in self._earlier:
            return self._context.store.gradient(*self._earlier[slot])
        if slot not in self.gradients:
            gradient = torch.zeros(
                (2, *self._slot_shapes[slot]), dtype=accumulator_dtype(self._query.dtype), device=self._query.device
            )
            if slot == 0 and self._kept:
                self._context.store.settle(self._at, gradient)
            self.gradients[slot] = gradient
        return self.gradients[slot]

    def _payload(self, message: Message) -> Tensor:
        if message.payload is Payload.GRAD:
            gradient = self.grad_slot(message.slot)
            del self.gradients[message.slot]
            return gradient
        key, value = self.slots[message.slot]
        return torch.stack([take_rows(key, message.ranges), take_rows(value, message.ranges)])

    def _buffer(self, message: Message) -> Tensor:
        key = self.slots[0][0]
        dtype = key.dtype if message.payload is Payload.KV else accumulator_dtype(key.dtype)
        return torch.empty((2, message.num_tokens, *key.shape[1:]), dtype=dtype, device=key.device)
