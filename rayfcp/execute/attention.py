"""The one differentiable interpreter of attention programs: any placement of blocks, any rounds, by heads or not.

Forward: each round posts its messages, computes what earlier rounds brought, and merges (out, lse) in
fp32. Backward: the same rounds bring keys and values again; each call yields a partial dQ, kept here,
and a partial dK, dV, summed in fp32 in its slot and sent where the program says.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rayfcp.execute.heads import HeadExchange, ToHeads, ToTokens
from rayfcp.execute.kernels import AttentionKernel
from rayfcp.execute.merge import Merged, accumulator_dtype
from rayfcp.execute.ranges import add_rows, take_rows
from rayfcp.execute.schedule import KernelCall, ReadyHeads, ReadyProgram, ReadyRound, make_ready
from rayfcp.execute.traffic import Traffic
from rayfcp.execute.transport import Envelope, Pending, Transport
from rayfcp.program import AttentionProgram, HeadProgram, Message, Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionContext:
    """What a layer's attention needs besides its tensors; travels as a keyword argument of the layer.

    The first `recomputed_layers` layers keep only their input.
    """

    program: ReadyProgram | ReadyHeads
    transport: Transport
    kernel: AttentionKernel
    recomputed_layers: int = 0
    traffic: Traffic = field(default_factory=Traffic)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    program: AttentionProgram | HeadProgram | AttentionContext,
    *,
    scale: float | None = None,
    transport: Transport | None = None,
    kernel: AttentionKernel | None = None,
) -> Tensor:
    """Distributed attention of this rank's tokens, differentiable, exact.

    Args:
        query: `[tokens, heads, head_dim]`, tokens in the order of the program's load.
        key: `[tokens, kv_heads, head_dim]`; `kv_heads` divides `heads`.
        value: as `key`.
        program: this rank's attention program, or a context that holds one.
        scale: of the scores; `head_dim ** -0.5` if absent.
        transport: where the messages go (needed with a bare program).
        kernel: needed with a bare program.

    Returns:
        `[tokens, heads, head_dim]` in the dtype of `query`. Every rank of the plan must call, with the
        program lowered for it, the same number of times forward and backward.

    Raises:
        ValueError: the tensors do not have the program's tokens, their shapes disagree, or the program's degree of
            sharing out heads does not divide them.

    Source: Ring Attention; zig-zag placement and merging as in FCP (ring), Section 4.3; DeepSpeed-Ulysses.
    """
    if not isinstance(program, AttentionContext):
        if transport is None or kernel is None:
            raise ValueError("attention: a bare program needs transport= and kernel=; give both")
        program = AttentionContext(program=make_ready(program), transport=transport, kernel=kernel)
    _check_shapes(query, key, value=value, num_tokens=program.program.num_tokens)
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


def _check_shapes(query: Tensor, key: Tensor, *, value: Tensor, num_tokens: int) -> None:
    if query.shape[0] != num_tokens or key.shape[0] != num_tokens:
        raise ValueError(
            f"attention: query has {query.shape[0]} tokens and key {key.shape[0]}, the program has {num_tokens}; "
            "pass the tokens that the program loads, in its order"
        )
    if key.shape != value.shape or query.shape[-1] != key.shape[-1] or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"attention: query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}; want "
            "equal key and value, one head_dim, and heads a multiple of kv_heads"
        )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext, scale: float) -> Tensor:
        run = _Run(context, query, scale=scale)
        run.fill(0, key, value=value)
        merged = Merged.empty(query)
        for step in context.program.forward:
            pending = run.post(step)
            for call in step.calls:
                run.attend(call, merged)
            run.finish(step, pending)
        out, lse = merged.result(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.context, ctx.scale = context, scale
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        run = _Run(ctx.context, query, scale=ctx.scale)
        run.fill(0, key, value=value)
        dq = torch.zeros(query.shape, dtype=accumulator_dtype(query.dtype), device=query.device)
        run.grad_slot(0)
        for step in ctx.context.program.backward:
            pending = run.post(step)
            for call in step.calls:
                run.differentiate(call, dq, saved=(grads[0], out, lse))
            run.finish(step, pending)
        dk, dv = run.gradients[0]
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), None, None


class _Run:
    """State of one pass: keys and values per slot, their gradients, buffers under way."""

    def __init__(self, context: AttentionContext, query: Tensor, *, scale: float) -> None:
        self.slots: dict[int, tuple[Tensor, Tensor]] = {}
        self._slot_shapes: dict[int, torch.Size] = {}
        self.gradients: dict[int, Tensor] = {}
        self._context, self._query, self._scale = context, query, scale
        self._arriving: list[tuple[Message, Tensor]] = []
        self._leaving: list[Envelope] = []

    def fill(self, slot: int, key: Tensor, *, value: Tensor) -> None:
        """Keys and values of a slot are here."""
        self.slots[slot] = (key, value)
        self._slot_shapes[slot] = key.shape

    def post(self, step: ReadyRound) -> Pending:
        """Start the round's messages."""
        self._leaving = [(message.peer, self._payload(message)) for message in step.sends]
        self._arriving = [(message, self._buffer(message)) for message in step.receives]
        self._context.traffic.bytes_sent += sum(tensor.nbytes for _, tensor in self._leaving)
        return self._context.transport.post(
            self._leaving, [(message.peer, buffer) for message, buffer in self._arriving]
        )

    def finish(self, step: ReadyRound, pending: Pending) -> None:
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

    def attend(self, call: KernelCall, merged: Merged) -> None:
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

    def differentiate(self, call: KernelCall, dq: Tensor, *, saved: tuple[Tensor, Tensor, Tensor]) -> None:
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
        """dK, dV of a slot, `[2, tokens, kv_heads, head_dim]`, zero at first."""
        if slot not in self.gradients:
            self.gradients[slot] = torch.zeros(
                (2, *self._slot_shapes[slot]), dtype=accumulator_dtype(self._query.dtype), device=self._query.device
            )
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
