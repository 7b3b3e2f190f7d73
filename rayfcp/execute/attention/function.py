"""What a layer's attention needs besides its tensors.

What attention is called with must agree with its program.

The one differentiable interpreter of attention programs: any placement of blocks, any rounds, by heads or not.

Forward: each round posts its messages, computes what earlier rounds brought, and merges (out, lse) in
fp32. Backward: the same rounds bring keys and values again; each call yields a partial dQ, kept here,
and a partial dK, dV, summed in fp32 in its slot and sent where the program says. Context slots, gradients
included, lie in the store of what earlier microbatches kept (`rayfcp.execute.attention.slots`).

With a reshuffle tensors come and go in the loop's order. Exchanges before and after the rounds carry queries,
keys, values and outputs forward, their gradients backward; local attends run meanwhile (`rayfcp.program.reshuffle`).
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rayfcp.execute.attention.heads import HeadExchange, ToHeads, ToTokens
from rayfcp.execute.attention.reshuffle import exchange, keep_in, keep_out
from rayfcp.execute.attention.schedule import (
    KernelCall,
    ReadyExchange,
    ReadyHeads,
    ReadyProgram,
    ReadyRound,
    make_ready,
    take_rows,
)
from rayfcp.execute.attention.slots import ContextStore, Merged, RowSums, Slots, accumulator_dtype
from rayfcp.execute.kernels import AttentionKernel, Pairs, pick_kernel
from rayfcp.execute.parallel.transport import Traffic, Transport, default_transport
from rayfcp.program import AttentionProgram, HeadProgram, Payload, ReshuffleProgram


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionContext:
    """What a layer's attention needs besides its tensors; travels as a keyword argument of the layer.

    `program`: of the layer; the model is given that of its stage's first kind of layers, with window `window`, and in
    `others` those of other kinds by their windows. A layer takes its own by `of_window`.
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
    window: int = 0
    others: Mapping[int, ReadyProgram | ReadyHeads] = field(default_factory=dict)

    def of_window(self, window: int) -> "AttentionContext":
        """For a layer with this window (0: none).

        Raises:
            ValueError: the stage's program was not lowered for such layers.
        """
        if window == self.window:
            return self
        if window not in self.others:
            raise ValueError(
                f"attention: a layer has window {window}, the program is of layers with windows "
                f"{sorted({self.window, *self.others})} (0: none); give sequences the model's windows and lower again"
            )
        return replace(self, program=self.others[window])


def check_tokens(query: Tensor, key: Tensor, *, program: ReadyProgram | ReadyHeads, rank: int) -> None:
    """As many tokens as the program loads, or the loop brings."""
    around = program.reshuffle
    if around and around.program.rank != rank:
        raise ValueError(
            f"attention: the reshuffle is of rank {around.program.rank}, this is rank {rank}; pass "
            "the one lowered for this rank"
        )
    due = around.program.num_tokens if around else program.num_tokens
    found = (query.shape[0], key.shape[0])
    if found != (due, due) and not (around and due == 0 and found == (1, 1)):
        owner, remedy = ("reshuffle", "brings") if around else ("program", "loads")
        raise ValueError(
            f"attention: query has {found[0]} tokens and key {found[1]}, the {owner} has {due}; "
            f"pass the tokens that the {owner} {remedy}, in its order"
        )


def check_shapes(query: Tensor, key: Tensor, *, value: Tensor) -> None:
    """Shapes and dtypes that agree."""
    if key.shape != value.shape or query.shape[-1] != key.shape[-1] or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"attention: query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}; want "
            "equal key and value, one head_dim, and heads a multiple of kv_heads"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"attention: query is {query.dtype}, key {key.dtype}, value {value.dtype}, must be one dtype; cast them"
        )


__all__ = ["AttentionContext", "attention"]


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
        transport: where the messages of a bare program go; the default process group if absent, whose rank r is rank r
            of the plan.
        kernel: of a bare program; the best one for the tensors' device if absent.

    Returns:
        `[tokens, heads, head_dim]` in the dtype and order of `query`; padding's output is of no meaning. Every rank
        of the plan must call, with the program lowered for it, the same number of times forward and backward.

    Raises:
        ValueError: the tensors do not have the program's tokens, their shapes or dtypes disagree, the program's degree
            of sharing out heads does not divide them, earlier keys and values are not kept, there is no process group
            to send by, or the reshuffle is of another rank or layout or around a program that shares out heads.

    Source: Ring Attention; zig-zag placement and merging as in FCP (ring), Section 4.3; DeepSpeed-Ulysses; reshuffling
    as in FCP (block), Section 4.3.
    """
    if not isinstance(program, AttentionContext):
        program = AttentionContext(
            program=make_ready(program, reshuffle=reshuffle),
            transport=transport or default_transport(),
            kernel=kernel or pick_kernel(query.device.type),
        )
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
        run.slots.fill(0, k, value=v)
        run.slots.keep(alone=context.recomputed)
        merged = Merged(q)
        attend = functools.partial(run.attend, merged=merged)
        if around:
            run.exchange(around.forward.entering, lambda: theirs, targets=(q, k, v), compute=attend)
        run.rounds(run.program.forward, attend)
        if around:
            home = query.new_zeros(query.shape)
            run.exchange(around.forward.leaving, lambda: (merged.out,), targets=(home,), compute=attend)
        run.slots.close()
        out, lse = merged.result(query.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.context, ctx.scale = context, scale
        if not around:
            return out
        keep_out(around.program, (out,), theirs=(home,))
        return home

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        around = ctx.context.program.reshuffle
        grad_out = keep_in(around.program, grads)[0] if around else grads[0]
        run = _Run(ctx.context, q, scale=ctx.scale)
        run.slots.fill(0, k, value=v)
        dq = RowSums(
            lambda: (torch.empty(q.shape, dtype=accumulator_dtype(q.dtype), device=q.device),), num_rows=len(q)
        )
        differentiate = functools.partial(run.differentiate, dq=dq, saved=(grad_out, out, lse))
        if around:
            run.exchange(around.backward.entering, lambda: grads, targets=(grad_out,), compute=differentiate)
        run.rounds(run.program.backward, differentiate)
        sums = (dq, run.slots.gradient(0))
        if around:
            theirs = [q.new_zeros((len(grads[0]), *each.shape[1:])) for each in (q, k, v)]
            ours = functools.partial(_partial, sums)
            run.exchange(around.backward.leaving, ours, targets=theirs, compute=differentiate)
            keep_out(around.program, [each for sum_ in sums for each in sum_.whole], theirs=theirs)
        run.slots.close()
        if around:
            return *theirs, None, None
        return *(each for sum_ in sums for each in sum_.result(q.dtype)), None, None


def _partial(sums: Sequence[RowSums]) -> list[Tensor]:
    return [each for sum_ in sums for each in sum_.partial]


class _Run:
    """State of one pass: keys and values per slot, their gradients, buffers under way."""

    def __init__(self, context: AttentionContext, query: Tensor, *, scale: float) -> None:
        program = context.program
        assert isinstance(program, ReadyProgram)
        at = (context.microbatch, context.layer)
        self.program = program
        self.slots = Slots(program, store=context.store, at=at, buffers=context.traffic.buffers)
        self._context, self._query, self._scale = context, query, scale
        self._has_posted = False

    def rounds(self, steps: Sequence[ReadyRound], compute: Callable[[KernelCall], None]) -> None:
        """Run rounds in order: each posts its messages, computes, and waits."""
        for step in steps:
            with self._posted(step):
                for call in step.calls:
                    compute(call)
            self.slots.free(step.free)

    def exchange(
        self,
        steps: Sequence[ReadyExchange],
        sources: Callable[[], Sequence[Tensor]],
        *,
        targets: Sequence[Tensor],
        compute: Callable[[KernelCall], None],
    ) -> None:
        """Run rounds of a reshuffle (`rayfcp.execute.attention.reshuffle.exchange`)."""
        context = self._context
        exchange(steps, sources, targets=targets, compute=compute, transport=context.transport, traffic=context.traffic)

    @contextmanager
    def _posted(self, step: ReadyRound) -> Iterator[None]:
        """The round's messages travel inside; behind, they are in their slots. Packed and posted beside computations;
        behind those so far only where what leaves is computed in this pass: the first time, and gradients."""
        context, slots = self._context, self.slots
        waits = not self._has_posted or any(message.payload is Payload.GRAD for message in step.sends)
        self._has_posted = True
        slots.complete(step.sends)
        with context.transport.beside(after_compute=waits):
            leaving = [(message, slots.payload(message)) for message in step.sends]
            arriving = [(message, slots.room(message)) for message in step.receives]
            sends, receives = ([(message.peer, tensor) for message, tensor in each] for each in (leaving, arriving))
            pending = context.transport.post(sends, receives)
        context.traffic.bytes_sent += sum(tensor.nbytes for _, tensor in leaving)
        yield
        context.traffic.wait(pending)
        for message, tensor in arriving:
            slots.arrived(message, tensor)
        for message, tensor in leaving:
            slots.left(message, tensor)

    def _pairs(self, call: KernelCall) -> Pairs:
        return Pairs(
            query_lengths=call.query_lengths, key_lengths=call.key_lengths, causal=call.causal, scale=self._scale
        )

    def attend(self, call: KernelCall, *, merged: Merged) -> None:
        """Forward of one kernel call, merged into what is known."""
        self._context.traffic.cells += call.num_cells
        out, lse = self._context.kernel.forward(
            _turned(take_rows(self._query, call.queries), call),
            *(_turned(each, call) for each in self.slots.keys_of(call)),
            pairs=self._pairs(call),
        )
        merged.add(call.queries, _turned(out, call), lse=_turned(lse, call))

    def differentiate(self, call: KernelCall, *, dq: RowSums, saved: tuple[Tensor, Tensor, Tensor]) -> None:
        """Backward of one kernel call, added to dQ and to the slots' dK, dV."""
        self._context.traffic.cells += call.num_cells
        grad_out, out, lse = (_turned(take_rows(tensor, call.queries), call) for tensor in saved)
        key, value = (_turned(each, call) for each in self.slots.keys_of(call))
        partial_dq, dk, dv = self._context.kernel.backward(
            grad_out,
            _turned(take_rows(self._query, call.queries), call),
            key,
            value,
            out,
            lse,
            pairs=self._pairs(call),
        )
        del key, value  # before sums get memory
        dq.add(call.queries, _turned(partial_dq, call))
        self.slots.add_gradients(call, _turned(dk, call), dv=_turned(dv, call))


def _turned(rows: Tensor, call: KernelCall) -> Tensor:
    """Rows as the kernel gets and gives them, and back."""
    return rows.flip(0) if call.flipped else rows
