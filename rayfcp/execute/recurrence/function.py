"""Differentiable linear recurrences over ranks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rayfcp.execute.attention.function import AttentionContext
from rayfcp.execute.attention.kept import once
from rayfcp.execute.attention.schedule import take_rows, write_rows
from rayfcp.execute.attention.slots import LayerKey, StateName
from rayfcp.execute.kernels import Lengths
from rayfcp.execute.kernels.recurrence import Gated, RecurrenceKernel, differentiate, pick_recurrence
from rayfcp.execute.recurrence.scan import Item, StateForm, StateScan
from rayfcp.execute.recurrence.summaries import Readout, Summaries, readouts, summarize
from rayfcp.program import Range
from rayfcp.program.scan import ChainEnd, ScanProgram, Segment
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
    scan = context.scan_of(kind)
    inputs = Gated(query=query, key=key, value=value, log_decay=log_decay, beta=beta, scale=scale)
    _check(inputs, scan)
    if not scan.chains:
        return pick_recurrence(value.device.type)(inputs, lengths=_lengths(scan.segments), state=None)[0]
    layer = _Layer(scan, context=context)
    return _Recurrence.apply(query, key, value, log_decay, beta, scale, layer)  # type: ignore[no-any-return, no-untyped-call]


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


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor | None,
        scale: float,
        layer: "_Layer",
    ) -> Tensor:
        inputs = Gated(query=query, key=key, value=value, log_decay=log_decay, beta=beta, scale=scale)
        out, *saved = once("recurrence", lambda: layer.forward(inputs), kept=layer.context.kept)
        ctx.save_for_backward(query, key, value, log_decay, beta, *saved)
        ctx.scale, ctx.layer = scale, layer
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, log_decay, beta, *saved = ctx.saved_tensors
        inputs = Gated(query=query, key=key, value=value, log_decay=log_decay, beta=beta, scale=ctx.scale)
        grads = ctx.layer.backward(inputs, saved, grad_out=grad_out)
        return *grads, *[None] * (7 - len(grads))


class _Layer:
    """The recurrence of one layer in one microbatch. What both passes share are the states before the parts of this
    rank but first ones, then its shares of transitions, then, for delta rules, the readouts of the same parts."""

    def __init__(self, scan: ScanProgram, *, context: AttentionContext) -> None:
        self.context, self._scan = context, scan
        self._cut = [each for each in scan.segments if each.chain >= 0]
        self._whole = [each for each in scan.segments if each.chain < 0]
        self._continued = [each for each in self._cut if each.part > 0]

    def forward(self, inputs: Gated) -> tuple[Tensor, ...]:
        """Outputs, and what is shared with `backward`."""
        kernel, out = pick_recurrence(inputs.value.device.type), torch.empty_like(inputs.value)

        def compute(segments: Sequence[Segment]) -> None:
            if segments:
                local, _ = kernel(inputs.rows(_rows(segments)), lengths=_lengths(segments), state=None)
                write_rows(out, _rows(segments), source=local)

        parts = self._summaries(kernel, inputs)
        is_delta = inputs.beta is not None
        if parts.out is not None:
            write_rows(out, _rows(self._cut), source=parts.out)
        transitions, increments = (
            {_item(each): of for each, of in zip(self._cut, found, strict=True)}
            for found in (parts.transitions, parts.increments)
        )
        for head in self._scan.heads:
            increments[_item(head)] = self.context.store.state((head.microbatch, self.context.layer), _name(head))
        states, kept = self._rounds(inputs).states(
            transitions, increments, meanwhile=lambda: compute(self._whole if is_delta else self._scan.segments)
        )
        for tail in self._scan.tails:
            self.context.store.put_state(self._own, _name(tail), state=states[_item(tail)])
        before = [states[_item(each)] for each in self._continued]
        readouts = [of for each, of in zip(self._cut, parts.readouts, strict=True) if each.part > 0]
        for each, readout, state in zip(self._continued, readouts, before, strict=True):
            out[slice(*each.rows)] += readout.of_state(state).to(out.dtype)
        return out, *before, *kept, *([each.rows for each in readouts] if is_delta else [])

    def backward(self, inputs: Gated, shared: Sequence[Tensor], *, grad_out: Tensor) -> list[Tensor]:
        """Gradients of `inputs.tensors`."""
        kernel, rounds = pick_recurrence(inputs.value.device.type), self._rounds(inputs)
        grads = [torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in inputs.tensors]

        def compute(segments: Sequence[Segment], **states: Tensor | None) -> None:
            if not segments:
                return
            rows, lengths = _rows(segments), _lengths(segments)
            own, grad = inputs.rows(rows), take_rows(grad_out, rows)
            found = differentiate(kernel, own, lengths=lengths, grad_out=grad, **states)
            for target, source in zip(grads, found, strict=True):
                write_rows(target, rows, source=source)

        count, num_kept = len(self._continued), len(rounds.kept_parts)
        before, kept, rows = shared[:count], shared[count : count + num_kept], shared[count + num_kept :]
        readouts = [Readout(rows=each) for each in rows] if inputs.beta is not None else self._closed_readouts(inputs)
        adjoints = {
            _item(each): of.adjoint(grad_out[slice(*each.rows)], dtype=inputs.state_dtype)
            for each, of in zip(self._continued, readouts, strict=True)
        }
        for tail in self._scan.tails:
            adjoints[_item(tail)] = self.context.store.settle_state(self._own, _name(tail))
        behind = rounds.gradients(adjoints, kept, meanwhile=lambda: compute(self._whole, state=None, grad_state=None))
        for head in self._scan.heads:
            at = (head.microbatch, self.context.layer)
            self.context.store.put_state_gradient(at, _name(head), gradient=behind[_item(head)])
        zero = inputs.value.new_zeros(inputs.state_shape, dtype=inputs.state_dtype)
        states = dict(zip(map(_item, self._continued), before, strict=True))
        compute(
            self._cut,
            **{
                name: torch.stack([found.get(_item(each), zero) for each in self._cut]) if self._cut else None
                for name, found in (("state", states), ("grad_state", behind))
            },
        )
        return grads

    def _closed_readouts(self, inputs: Gated) -> list[Readout]:
        if not self._continued:
            return []
        return readouts(inputs.rows(_rows(self._continued)), lengths=_lengths(self._continued))

    def _summaries(self, kernel: RecurrenceKernel, inputs: Gated) -> Summaries:
        if not self._cut:
            return Summaries(transitions=(), increments=(), readouts=(), out=None)
        return summarize(kernel, inputs.rows(_rows(self._cut)), lengths=_lengths(self._cut))

    def _rounds(self, inputs: Gated) -> StateScan:
        heads, *state = inputs.state_shape
        transition = (state[0],) * 2 if inputs.beta is not None else inputs.log_decay.shape[2:]
        like = torch.empty(0, dtype=inputs.state_dtype, device=inputs.value.device)
        form = StateForm(heads=heads, transition=tuple(transition), state=tuple(state), like=like)
        return StateScan(self._scan, context=self.context, form=form)

    @property
    def _own(self) -> LayerKey:
        return self.context.microbatch, self.context.layer


def _rows(segments: Sequence[Segment]) -> list[Range]:
    return [each.rows for each in segments]


def _lengths(segments: Sequence[Segment]) -> Lengths:
    return tuple(stop - start for start, stop in _rows(segments))


def _item(part: Segment | ChainEnd) -> Item:
    return part.chain, part.part


def _name(end: ChainEnd) -> StateName:
    return "state", end.sequence
