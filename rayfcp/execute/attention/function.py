"""Differentiable distributed attention: the interpreter of attention programs, whatever the scheme.

Forward: each round posts its messages, computes on what earlier rounds brought, and merges (out, lse) in fp32.
Backward: the same rounds bring keys and values again; each call yields a partial dQ, which stays, and a partial dK, dV,
summed in fp32 in its slot and sent where the program says. Slots of earlier microbatches, gradients included, lie in
the `ContextStore` (`rayfcp.execute.attention.slots`).

With a reshuffle, tensors come and go in the loop's order: exchanges before and after the rounds carry queries, keys,
values and outputs forward and their gradients backward. Nothing is computed meanwhile (`rayfcp.program.reshuffle`).
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rayfcp.execute.attention.heads import HeadExchange, ToHeads, ToTokens
from rayfcp.execute.attention.kept import KeptResults, Results, once
from rayfcp.execute.attention.latents import Latents
from rayfcp.execute.attention.reshuffle import to_loop, to_plan
from rayfcp.execute.attention.schedule import (
    AttentionSchedule,
    KernelCall,
    ScheduledRound,
    accumulator_dtype,
    apart,
    make_schedule,
    take_rows,
)
from rayfcp.execute.attention.slots import ContextStore, MergedAttention, RowSums, Slots, Tensors
from rayfcp.execute.kernels import AttentionKernel, Scores, pick_kernel
from rayfcp.execute.parallel.transport import AttentionStats, Transport, default_transport
from rayfcp.execute.recurrence.schedule import ScanSchedule
from rayfcp.program import AttentionProgram, Forward, HeadProgram, Payload, ReshuffleProgram
from rayfcp.values import FULL, LayerKind, RecurrentKind


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionContext:
    """Arguments of a layer's attention besides its tensors; a keyword argument of the layer call.

    `schedule` belongs to layers of `kind`, at first the stage's first; `others` has those of all kinds (see `of_kind`),
    `scans` the programs of recurrent kinds. The
    first `recomputed_layers` layers of the stage keep only their input; `recomputed` says whether this layer, number
    `layer` of the model, is one of them, which with `keeps_attention` has `kept` for the results of its attention.
    `store`: keys and values that microbatches keep for later ones, this one being number `microbatch`. `calls`: those
    of a layer's functions in one run of the layer, by name.
    """

    schedule: AttentionSchedule
    transport: Transport
    kernel: AttentionKernel
    recomputed_layers: int = 0
    store: ContextStore = field(default_factory=ContextStore)
    microbatch: int = 0
    layer: int = 0
    recomputed: bool = False
    stats: AttentionStats = field(default_factory=AttentionStats)
    kind: LayerKind = FULL
    others: Mapping[LayerKind, AttentionSchedule] = field(default_factory=dict)
    scans: Mapping[RecurrentKind, ScanSchedule] = field(default_factory=dict)
    keeps_attention: bool = False
    kept: KeptResults | None = None
    calls: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, item: Forward, **others: Any) -> "AttentionContext":
        """The context of a forward pass for layers of its first kind; `others`: the remaining fields. Kinds of layers
        that run the same program share a schedule."""
        made = {id(each.attention): make_schedule(each.attention) for each in item.kinds}
        schedules = {each.kind: made[id(each.attention)] for each in item.kinds}
        return cls(
            schedule=schedules[item.kind],
            recomputed_layers=item.recomputed_layers,
            microbatch=item.microbatch,
            kind=item.kind,
            others=schedules,
            scans={each.kind: ScanSchedule(program=each) for each in item.scans},
            keeps_attention=item.keeps_attention,
            **others,
        )

    def of_kind(self, kind: LayerKind) -> "AttentionContext":
        """The context of layers of a kind; a ValueError if the stage's program was not lowered for such layers."""
        if kind == self.kind:
            return self
        if kind not in self.others:
            raise ValueError(
                f"attention: a layer has {kind}, the program is of layers with "
                f"{', '.join(map(str, sorted({self.kind, *self.others})))}; give sequences the model's layer_kinds and "
                "lower again"
            )
        return replace(self, schedule=self.others[kind], kind=kind)

    def name_of_call(self, what: str) -> str:
        """A name of this call of a function of the layer, the same when the layer is recomputed."""
        self.calls[what] += 1
        return f"{what} {self.calls[what]}"

    def scan_of(self, kind: RecurrentKind) -> ScanSchedule:
        """The program of recurrent layers of a kind; a ValueError if the stage's was not lowered for such layers."""
        if kind not in self.scans:
            raise ValueError(
                f"recurrence: a layer has {kind!r}, the program is of {sorted(self.scans)}; give sequences the model's "
                "layer_kinds and lower again"
            )
        return self.scans[kind]


def _check_tokens(query: Tensor, key: Tensor, *, context: AttentionContext) -> None:
    reshuffle, rank, due = context.schedule.reshuffle, context.transport.rank, context.schedule.num_tokens
    if reshuffle and reshuffle.rank != rank:
        raise ValueError(
            f"attention: the reshuffle is of rank {reshuffle.rank}, this is rank {rank}; pass the one lowered for this "
            "rank"
        )
    given = (query.shape[0], key.shape[0])
    if given != (due, due) and not (reshuffle and due == 0 and given == (1, 1)):
        owner, verb = ("reshuffle", "brings") if reshuffle else ("program", "loads")
        raise ValueError(
            f"attention: query has {given[0]} tokens and key {given[1]}, the {owner} has {due}; "
            f"pass the tokens that the {owner} {verb}, in its order"
        )


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, *, up: Tensor | None) -> None:
    given = {"query": query, "key": key, "value": value} | ({} if up is None else {"up_projection": up})
    if up is None:
        fits, want = (
            query.shape[2] == key.shape[2] and query.shape[1] % key.shape[1] == 0,
            ("as many heads in key and value, one head_dim in query and key, and heads a multiple of kv_heads"),
        )
    else:
        heads, rows, latent = up.shape
        nope_dim = query.shape[2] - value.shape[2]
        fits, want = (
            heads == query.shape[1] and key.shape[1:] == (1, latent) and 0 <= nope_dim < rows,
            (
                "one head of latents and of rotated keys, as latents and queries are wide, and an up-projection "
                "[heads, nope + value_dim, latent]"
            ),
        )
    if key.shape[:2] != value.shape[:2] or not fits:
        found = ", ".join(f"{name} {tuple(each.shape)}" for name, each in given.items())
        raise ValueError(f"attention: {found}; want {want}")
    if len({each.dtype for each in given.values()}) > 1:
        found = ", ".join(f"{name} {each.dtype}" for name, each in given.items() if each is not query)
        raise ValueError(f"attention: query is {query.dtype}, {found}, must be one dtype; cast them")


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    program: AttentionProgram | HeadProgram | AttentionContext,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    up_projection: Tensor | None = None,
    reshuffle: ReshuffleProgram | None = None,
    transport: Transport | None = None,
    kernel: AttentionKernel | None = None,
) -> Tensor:
    """Exact distributed attention of this rank's tokens, differentiable.

    Args:
        query: `[tokens, heads, head_dim]`, tokens in the order of the program's load; with a reshuffle in the loop's
            order (no token, or one of padding, if the loop has none).
        key: `[tokens, kv_heads, head_dim]`; `kv_heads` divides `heads`.
        value: `[tokens, kv_heads, value_dim]`.
        program: this rank's attention program, or a context that holds one.
        scale: factor of the scores; `head_dim ** -0.5` if absent.
        softcap: c, where scaled scores s become `c tanh(s / c)`; 0 for none. The kernel must have it.
        sinks: `[heads]`, a score for each head that every query has beside those of its keys, without a value
            (gpt-oss); differentiable.
        up_projection: `[heads, nope + value_dim, latent]`, of multi-head latent attention; differentiable. `key` is
            then the latents, `[tokens, 1, latent]`, and `value` the rotated keys that heads share,
            `[tokens, 1, head_dim - nope]`. They travel, and who attends to them makes keys and values of them
            (`rayfcp.execute.attention.latents`).
        reshuffle: this rank's, if the loop brings its own layout; all ranks pass theirs or none does. A context has
            its own (`make_schedule`).
        transport: carries the messages of a bare program; the default process group if absent, whose rank r is rank r
            of the plan.
        kernel: of a bare program; the best one for the tensors' device if absent.

    Returns:
        `[tokens, heads, value_dim]` in the dtype and order of `query`; the output of padding is undefined. Every rank
        of the plan must call, with the program lowered for it, the same number of times forward and backward.

    Raises:
        ValueError: the tensors do not have the program's tokens, their shapes or dtypes disagree, the Ulysses degree
            does not divide the heads, earlier keys and values are not kept, there is no process group, or the reshuffle
            is of another rank or layout or around a program that splits heads.

    Source: Ring Attention; zig-zag placement and merging as in FCP (ring), Section 4.3; DeepSpeed-Ulysses; reshuffling
    as in FCP (block), Section 4.3.
    """
    if isinstance(program, AttentionContext):
        context = program
        if reshuffle is not None:
            raise ValueError(
                f"attention: the reshuffle of rank {reshuffle.rank} is given with a context; give the context "
                "make_schedule(program, reshuffle=...)"
            )
    else:
        context = AttentionContext(
            schedule=make_schedule(program, reshuffle=reshuffle),
            transport=transport or default_transport(),
            kernel=kernel or pick_kernel(query.device.type),
        )
    _check_tokens(query, key, context=context)
    _check_shapes(query, key, value, up=up_projection)
    scores = Scores(scale=query.shape[-1] ** -0.5 if scale is None else scale, softcap=softcap)
    weights = (up_projection, sinks)
    if context.schedule.heads is None:
        return _Attention.apply(query, key, value, *weights, context, scores)  # type: ignore[no-any-return, no-untyped-call]
    return _by_heads((query, key, value), weights, context=context, scores=scores)


def _by_heads(
    tensors: Tensors, weights: tuple[Tensor | None, Tensor | None], *, context: AttentionContext, scores: Scores
) -> Tensor:
    """Attention between the exchanges of tokens for heads and back. `weights`: of the heads, which come first."""
    assert context.schedule.heads is not None, "the program shares out heads"
    heads = HeadExchange(
        context.schedule.heads,
        query=tensors[0],
        keys=tensors[1:],
        transport=context.transport,
        stats=context.stats,
        kept=context.kept,
    )
    gathered: Tensor = ToHeads.apply(heads, *tensors)  # type: ignore[no-untyped-call]
    own = [None if each is None else each[slice(*heads.own_heads)] for each in weights]
    out = _Attention.apply(*apart(gathered, heads.shares), *own, context, scores)  # type: ignore[no-untyped-call]
    return ToTokens.apply(out, heads)  # type: ignore[no-any-return, no-untyped-call]


def with_sinks(out: Tensor, lse: Tensor, *, sinks: Tensor) -> Results:
    """Output and logsumexp of `[tokens, heads]` queries that also see their head's sink, a score without a value: one
    more term of the sum, applied once, after all keys. Rows without keys: 0 and the sink."""
    sinks = sinks.to(lse.dtype)
    return out * torch.sigmoid(lse - sinks).unsqueeze(-1).to(out.dtype), torch.logaddexp(lse, sinks)


def gradient_of_sinks(grad_out: Tensor, out: Tensor, *, lse: Tensor, sinks: Tensor) -> Tensor:
    """Gradient of the sinks through this rank's queries, `[heads]`; `out` and `lse` are those of `with_sinks`."""
    products = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -(torch.exp(sinks.to(lse.dtype) - lse) * products).sum(0).to(sinks.dtype)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        up: Tensor | None,
        sinks: Tensor | None,
        context: AttentionContext,
        scores: Scores,
    ) -> Tensor:
        q, k, v = query, key, value
        schedule, transport, stats = context.schedule, context.transport, context.stats
        if schedule.reshuffle:
            q, k, v = to_plan(schedule.reshuffle, (query, key, value), transport=transport, stats=stats)
        out, lse = once(
            "attention", lambda: _attended(_Pass(context, q, keys=(k, v), up=up, scores=scores)), kept=context.kept
        )
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks=sinks)
        ctx.save_for_backward(q, k, v, up, sinks, out, lse)
        ctx.context, ctx.scores = context, scores
        if schedule.reshuffle:
            return to_loop(schedule.reshuffle, (out,), num_rows=len(query), transport=transport, stats=stats)[0]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, up, sinks, out, lse), context, num_rows = ctx.saved_tensors, ctx.context, len(grad_out)
        schedule, transport, stats = context.schedule, context.transport, context.stats
        if schedule.reshuffle:
            (grad_out,) = to_plan(schedule.reshuffle, (grad_out,), transport=transport, stats=stats)
        run = _Pass(context, q, keys=(k, v), up=up, scores=ctx.scores)
        dq = RowSums(
            lambda: (torch.empty(q.shape, dtype=accumulator_dtype(q.dtype), device=q.device),), num_rows=len(q)
        )
        run.rounds(schedule.backward, functools.partial(run.differentiate, dq=dq, saved=(grad_out, out, lse)))
        grads = [each for total in (dq, run.slots.gradient(0)) for each in total.result(q.dtype)]
        run.slots.close()
        if schedule.reshuffle:
            grads = to_loop(schedule.reshuffle, grads, num_rows=num_rows, transport=transport, stats=stats)
        up_grad = None if run.latents is None else run.latents.gradient
        sink_grads = None if sinks is None else gradient_of_sinks(grad_out, out, lse=lse, sinks=sinks)
        return *grads, up_grad, sink_grads, None, None


def _attended(run: "_Pass") -> Results:
    """Run the forward rounds; output and logsumexp."""
    context = run.context
    held = context.kept is not None and context.schedule.heads is not None  # keys and values by heads are kept whole
    run.slots.keep(recomputed=context.recomputed and not held)
    merged = MergedAttention(run.query, value_dim=run.value_dim)
    run.rounds(context.schedule.forward, functools.partial(run.attend, merged=merged))
    run.slots.close()
    return merged.result(run.query.dtype)


class _Pass:
    """State of one forward or backward pass of one layer: keys and values per slot, and their gradients. `keys`: keys
    and values of own tokens, or with `up` their latents and shared rotated keys."""

    def __init__(
        self,
        context: AttentionContext,
        query: Tensor,
        *,
        keys: tuple[Tensor, Tensor],
        up: Tensor | None,
        scores: Scores,
    ) -> None:
        nope_dim = query.shape[2] - keys[1].shape[2]
        self.latents = None if up is None else Latents(up, nope_dim=nope_dim)
        self.value_dim = keys[1].shape[2] if up is None else up.shape[1] - nope_dim
        self.slots = Slots(
            context.schedule,
            own=keys,
            store=context.store,
            layer=(context.microbatch, context.layer),
            buffers=context.stats.buffers,
            latents=self.latents,
        )
        self.context, self.query, self._scores = context, query, scores
        self._has_posted = False

    def rounds(self, rounds: Sequence[ScheduledRound], compute: Callable[[KernelCall], None]) -> None:
        """Run rounds in order: each posts its messages, computes, and waits."""
        for step in rounds:
            with self._posted(step):
                for call in step.calls:
                    compute(call)
            self.slots.free(step.free)

    @contextmanager
    def _posted(self, step: ScheduledRound) -> Iterator[None]:
        """Context in which the round's messages travel; afterwards they are in their slots.

        Messages are packed and posted on their own stream. It must wait for the compute stream where that writes what
        is sent: before the first round (slot 0 comes from the layer's projections) and for gradients. Keys and values
        that are passed on came by this stream itself.
        """
        context, slots = self.context, self.slots
        waits = not self._has_posted or any(message.payload is Payload.GRAD for message in step.sends)
        self._has_posted = True
        slots.complete(step.sends)
        with context.transport.message_stream(after_compute=waits):
            leaving = [(message, slots.payload(message)) for message in step.sends]
            arriving = [(message, slots.allocate(message)) for message in step.receives]
            sends, receives = ([(message.peer, tensor) for message, tensor in each] for each in (leaving, arriving))
            pending = context.stats.post(sends, receives, transport=context.transport)
        yield
        context.stats.wait(pending)
        for message, tensor in arriving:
            slots.on_received(message, tensor)
        for message, tensor in leaving:
            slots.on_sent(message, tensor)

    def attend(self, call: KernelCall, *, merged: MergedAttention) -> None:
        """Forward of one kernel call, merged into the results so far."""
        self.context.stats.pairs += call.num_pairs
        out, lse = self.context.kernel.forward(
            _flipped(take_rows(self.query, call.queries), call),
            *(_flipped(each, call) for each in self.slots.keys_of(call)),
            pairs=call.pairs(self._scores),
        )
        merged.add(call.queries, _flipped(out, call), lse=_flipped(lse, call))

    def differentiate(self, call: KernelCall, *, dq: RowSums, saved: tuple[Tensor, Tensor, Tensor]) -> None:
        """Backward of one kernel call, added to dQ and to the slots' dK and dV."""
        self.context.stats.pairs += call.num_pairs
        grad_out, out, lse = (_flipped(take_rows(tensor, call.queries), call) for tensor in saved)
        key, value = (_flipped(each, call) for each in self.slots.keys_of(call))
        partial_dq, dk, dv = self.context.kernel.backward(
            grad_out,
            _flipped(take_rows(self.query, call.queries), call),
            key,
            value,
            out,
            lse,
            pairs=call.pairs(self._scores),
        )
        del key, value  # copies of rows are freed before sums allocate
        dq.add(call.queries, _flipped(partial_dq, call))
        self.slots.add_gradients(call, _flipped(dk, call), dv=_flipped(dv, call))


def _flipped(rows: Tensor, call: KernelCall) -> Tensor:
    """Rows in the kernel's order, and back: flipped calls run from the last row to the first."""
    return rows.flip(0) if call.flipped else rows
