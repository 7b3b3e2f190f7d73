"""Differentiable linear recurrences over ranks.

Kernels take the states before segments and are differentiated as they are: what passes between ranks, states forward
and their gradients backward, is found beside them. So sequences that are not cut and first parts of others, before
which the state is 0, cost no more than on one rank; the others cost their summaries (`summarize`).
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rayfcp.execute.attention.function import AttentionContext
from rayfcp.execute.attention.kept import once
from rayfcp.execute.attention.schedule import take_rows, write_rows
from rayfcp.execute.attention.slots import StateName
from rayfcp.execute.kernels.recurrence import Gated, pick_recurrence
from rayfcp.execute.recurrence.scan import StateScan
from rayfcp.execute.recurrence.schedule import Item, ScanSchedule, Segments, StateForm
from rayfcp.execute.recurrence.summaries import Summaries, state_gradients, summarize
from rayfcp.program.scan import ChainEnd, ScanProgram
from rayfcp.values import RecurrentKind


def linear_recurrence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor | None = None,
    *,
    context: AttentionContext,
    kind: RecurrentKind,
    scale: float = 1.0,
) -> Tensor:
    """Outputs of a recurrence over this rank's tokens, differentiable; see `Gated` for what it computes.

    Args:
        query: `[tokens, key_heads, dk]`, tokens in the order of the program's load.
        key: as `query`; `key_heads` divides `heads`.
        value: `[tokens, heads, dv]`, in the dtype of `query` and `key`.
        log_decay: `[tokens, heads]`, or `[tokens, heads, dk]`; at most 0, in any dtype.
        beta: `[tokens, heads]` for delta rules, which have a key of norm 1; None for gated linear attention, Mamba-2
            and lightning attention.
        context: of the layer.
        kind: of the layer; the context has its program.
        scale: factor of the outputs.

    Returns:
        `[tokens, heads, dv]` in the dtype of `value`. Every rank of the plan must call the same number of times forward
        and backward, once in a layer.

    Raises:
        ValueError: the tensors do not have the program's tokens, or their shapes or dtypes disagree.
    """
    schedule = context.scan_of(kind)
    inputs = Gated(query=query, key=key, value=value, log_decay=log_decay, beta=beta, scale=scale)
    _check(inputs, schedule.program)
    return _Layer(schedule, inputs, context=context).run()


def _check(inputs: Gated, scan: ScanProgram) -> None:
    query, key, value, log_decay, *_ = inputs.tensors
    tokens = {len(each) for each in inputs.tensors}
    if tokens != {scan.num_tokens}:
        raise ValueError(
            f"recurrence: tensors have {sorted(tokens)} tokens, the program of rank {scan.rank} loads "
            f"{scan.num_tokens}; pass the tokens that the program loads, in its order"
        )
    heads, dk = value.shape[1], key.shape[2]
    gates = {(*value.shape[:2],), (*value.shape[:2], dk)}
    beta = (*value.shape[:2],) if inputs.beta is None else tuple(inputs.beta.shape)
    if (
        query.shape != key.shape
        or heads % key.shape[1]
        or tuple(log_decay.shape) not in gates
        or beta != value.shape[:2]
    ):
        raise ValueError(
            f"recurrence: query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}, log_decay "
            f"{tuple(log_decay.shape)}, beta {beta}; want query and key [tokens, key_heads, dk], value [tokens, heads, "
            "dv] with heads a multiple of key_heads, log_decay [tokens, heads] or [tokens, heads, dk], beta [tokens, "
            "heads]"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"recurrence: query is {query.dtype}, key {key.dtype}, value {value.dtype}, must be one dtype; cast them"
        )


class _Layer:
    """The recurrence of one layer in one microbatch."""

    def __init__(self, schedule: ScanSchedule, inputs: Gated, *, context: AttentionContext) -> None:
        self._schedule, self._inputs, self._context = schedule, inputs, context
        self._kernel = pick_recurrence(inputs.value.device.type)
        heads, *state = inputs.state_shape
        transition = (state[0],) * 2 if inputs.beta is not None else inputs.log_decay.shape[2:]
        self._form = StateForm(
            heads=heads,
            transition=tuple(transition),
            state=tuple(state),
            dtype=inputs.state_dtype,
            device=inputs.value.device,
        )

    def run(self) -> Tensor:
        """Outputs."""
        schedule, inputs = self._schedule, self._inputs
        if not schedule.program.chains:
            return self._call(schedule.every, state=None)[0]
        is_delta = inputs.beta is not None
        first, rest = (schedule.opening, schedule.later) if is_delta else (None, schedule.every)
        results = [self._call(first, state=None)] if first and first.items else []
        with torch.no_grad():  # of delta rules, kernels make the states behind first parts beside their outputs
            shared = once("states", lambda: self._states([each for _, each in results]), kept=self._context.kept)
        before, *saved = shared
        if rest.items:
            results.append(self._call(rest, state=self._before(rest, before)))
        called = [each for each in (first, rest) if each and each.items]
        back = _Back(schedule, called, form=self._form, scale=inputs.scale, context=self._context)
        saved = saved if is_delta else [*saved, inputs.query.detach(), inputs.log_decay.detach()]
        return _Joined.apply(back, saved, *chain(*results))  # type: ignore[no-any-return, no-untyped-call]

    def _call(self, segments: Segments, *, state: Tensor | None) -> tuple[Tensor, Tensor]:
        return self._kernel(self._inputs.rows(segments.rows), lengths=segments.lengths, state=state)

    def _states(self, opened: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """States before `later` segments, and what the backward pass needs of the exchange: this rank's shares of
        transitions, and of delta rules P. `opened`: states behind first parts, of delta rules."""
        schedule, store = self._schedule, self._context.store
        increments = {
            item: state for states in opened for item, state in zip(schedule.opening.items, states, strict=True)
        }
        of = schedule.leading if self._inputs.beta is None else schedule.later
        parts = Summaries()
        if of.items:
            parts = summarize(self._kernel, self._inputs.rows(of.rows), lengths=of.lengths)
        increments |= dict(zip(of.items, parts.increments, strict=True))
        for head in schedule.program.heads:
            increments[_item(head)] = store.state((head.microbatch, self._context.layer), _name(head))
        rounds = StateScan(schedule.rounds(self._form), context=self._context)
        states, kept = rounds.states(dict(zip(of.items, parts.transitions, strict=True)), increments)
        for tail in schedule.program.tails:
            own = self._context.microbatch, self._context.layer
            store.put_state(own, _name(tail), state=states[_item(tail)])
        before = [states[each] for each in schedule.later.items]
        none = self._form.empty(0, self._form.heads, *self._form.state)
        return torch.stack(before) if before else none, *kept, *parts.readouts

    def _before(self, segments: Segments, before: Tensor) -> Tensor | None:
        """States before segments, from those before `later` ones."""
        if len(before) in (0, len(segments.items)):
            return before if len(before) else None
        own, zero = dict(zip(self._schedule.later.items, before, strict=True)), torch.zeros_like(before[0])
        return torch.stack([own.get(each, zero) for each in segments.items])


class _Joined(torch.autograd.Function):
    """Outputs of calls of a kernel, with the states behind their segments, as outputs of all tokens in their order."""

    @staticmethod
    def forward(ctx: Any, back: "_Back", saved: Sequence[Tensor], *results: Tensor) -> Tensor:
        ctx.back = back
        ctx.save_for_backward(*saved)
        return back.joined(results[::2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.back.gradients(ctx.saved_tensors, grad_out)


class _Back:
    """The exchange of gradients of states of one layer. It holds no tensors: those of recomputed layers are freed.

    Gradients of the states behind segments come before kernels are differentiated, once each: R, the gradient of the
    state before a segment through its own outputs, is `P^T dO`.
    """

    def __init__(
        self,
        schedule: ScanSchedule,
        called: Sequence[Segments],
        *,
        form: StateForm,
        scale: float,
        context: AttentionContext,
    ) -> None:
        self._schedule, self._called, self._form, self._scale = schedule, called, form, scale
        self._store, self._layer, self._microbatch = context.store, context.layer, context.microbatch
        self._scan = StateScan(schedule.rounds(form), context=context)

    def joined(self, outs: Sequence[Tensor]) -> Tensor:
        """Rows of calls in their order in slot 0."""
        if len(outs) == 1:
            return outs[0]
        found = outs[0].new_empty(self._schedule.program.num_tokens, *outs[0].shape[1:])
        for each, out in zip(self._called, outs, strict=True):
            write_rows(found, each.rows, source=out)
        return found

    def gradients(self, saved: Sequence[Tensor], grad_out: Tensor) -> list[Tensor | None]:
        """Those of each call's outputs and states."""
        form, schedule = self._form, self._schedule
        count = len(schedule.rounds(form).kept_parts)
        adjoints = self._adjoints(saved[count:], grad_out)
        for tail in schedule.program.tails:
            adjoints[_item(tail)] = self._store.settle_state((self._microbatch, self._layer), _name(tail))
        behind = self._scan.gradients(adjoints, saved[:count])
        for head in schedule.program.heads:
            at = (head.microbatch, self._layer)
            self._store.put_state_gradient(at, _name(head), gradient=behind[_item(head)])
        zero = form.empty(form.heads, *form.state).zero_()
        grads = list[Tensor | None]()
        for each in self._called:
            states = [behind.get(item, zero) for item in each.items]
            is_any = any(item in behind for item in each.items)
            grads += take_rows(grad_out, each.rows), torch.stack(states) if is_any else None
        return grads

    def _adjoints(self, readout: Sequence[Tensor], grad_out: Tensor) -> dict[Item, Tensor]:
        """Gradients of the states before `later` segments through their own outputs."""
        later = self._schedule.later
        if not later.items:
            return {}
        own = [each if len(each) == sum(later.lengths) else take_rows(each, later.rows) for each in readout]
        grad = take_rows(grad_out, later.rows)
        found = state_gradients(
            grad,
            readout=own[0],
            log_decay=own[1] if len(own) > 1 else None,
            lengths=later.lengths,
            scale=self._scale,
            dtype=self._form.dtype,
        )
        return dict(zip(later.items, found, strict=True))


def _item(end: ChainEnd) -> Item:
    return end.chain, end.part


def _name(end: ChainEnd) -> StateName:
    return "state", end.sequence
