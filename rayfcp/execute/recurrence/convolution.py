"""Differentiable causal convolutions over ranks: rows before a segment come from where they are, and their gradients go
back there (`rayfcp.program.scan`)."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rayfcp.execute.attention.function import AttentionContext
from rayfcp.execute.attention.kept import once
from rayfcp.execute.attention.schedule import copy_rows, take_rows, write_rows
from rayfcp.execute.kernels.convolution import ACTIVATIONS, pick_convolution
from rayfcp.execute.recurrence.messages import Incoming, Outgoing, exchange
from rayfcp.execute.recurrence.schedule import ScanSchedule
from rayfcp.program import Range
from rayfcp.program.scan import ScanProgram
from rayfcp.values import RecurrentKind


def causal_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    context: AttentionContext,
    kind: RecurrentKind,
    activation: str | None,
) -> Tensor:
    """A depthwise convolution of each token with the `kind.halo` tokens before it in its sequence, differentiable.

    Args:
        x: `[tokens, channels]`, tokens in the order of the program's load.
        weight: `[channels, width]`, width `kind.halo` + 1; the last column is that of the token itself.
        bias: `[channels]`, or None.
        context: of the layer.
        kind: of the layer; the context has its program.
        activation: "silu", or None; "swish" is the same as "silu".

    Returns:
        `[tokens, channels]` in the dtype of `x`. Tokens before a sequence's first are zero. Every rank of the plan must
        call the same number of times forward and backward; a layer may have several convolutions.

    Raises:
        ValueError: the tensors do not have the program's tokens, the kind's width or the same channels, or the
            activation is another.
    """
    schedule = context.scan_of(kind)
    _check(x, weight, bias=bias, scan=schedule.program, activation=activation)
    rows: Tensor = _WithHalo.apply(x, _Halos(schedule, context=context))  # type: ignore[no-untyped-call]
    out = pick_convolution(x.device.type)(rows, weight, bias, activation=activation)
    return take_rows(out, schedule.places.behind)


class _WithHalo(torch.autograd.Function):
    """Rows of all segments behind those before them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, halos: "_Halos") -> Tensor:
        ctx.halos, places = halos, halos.places
        buffer = halos.buffer(x)
        rows = x.new_zeros(places.num_rows, x.shape[1])
        write_rows(rows, places.own, source=x)
        write_rows(rows, places.halo, source=take_rows(buffer, places.buffer))
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor) -> tuple[Tensor | None, ...]:
        halos, places = ctx.halos, ctx.halos.places
        gradient = grad_rows.new_zeros(halos.num_source_rows, grad_rows.shape[1])
        write_rows(gradient, [each.rows for each in halos.scan.segments], source=take_rows(grad_rows, places.own))
        buffer = grad_rows.new_zeros(halos.scan.num_halo_rows, grad_rows.shape[1])
        write_rows(buffer, places.buffer, source=take_rows(grad_rows, places.halo))
        return halos.give_back(buffer, gradient=gradient), None


class _Halos:
    """Exchange of the rows before segments and tails in one convolution, and of their gradients."""

    def __init__(self, schedule: ScanSchedule, *, context: AttentionContext) -> None:
        self.scan, self.places, self._context = schedule.program, schedule.places, context
        self.num_source_rows = max([self.scan.num_tokens, *(each.rows[1] for each in self.scan.heads)])
        self._name = context.name_of_call("convolution")
        self._leaving, self._arriving, self._local = schedule.copies

    def buffer(self, x: Tensor) -> Tensor:
        """The halo buffer; what later slices need of it is kept."""
        (buffer,) = once(self._name, lambda: (self._fetch(x),), kept=self._context.kept)
        return buffer

    def _fetch(self, x: Tensor) -> Tensor:
        store, layer = self._context.store, self._context.layer
        kept = (store.state((each.microbatch, layer), (self._name, each.sequence)) for each in self.scan.heads)
        source = torch.cat([x, *kept]) if self.scan.heads else x
        buffer = x.new_empty(self.scan.num_halo_rows, x.shape[1])
        for each in self._local:
            write_rows(buffer, each.target, source=take_rows(source, each.source))
        sends = [
            Outgoing(each.receiver, (each.num_tokens, x.shape[1]), partial(_pack, source, each.source))
            for each in self._leaving
        ]
        receives = [Incoming(each.sender, (each.num_tokens, x.shape[1])) for each in self._arriving]
        for each, rows in zip(self._arriving, exchange(sends, receives, like=x, context=self._context), strict=True):
            write_rows(buffer, each.target, source=rows)
        for tail in self.scan.tails:
            own = buffer[slice(*tail.rows)].clone()
            store.put_state((self._context.microbatch, layer), (self._name, tail.sequence), state=own)
        return buffer

    def give_back(self, buffer: Tensor, *, gradient: Tensor) -> Tensor:
        """Gradient of this rank's tokens: `gradient` of them, zero in rows of heads, and of what others had of them in
        their halo buffers; `buffer`: gradient of this rank's. Gradients of heads are brought to the store."""
        store, layer = self._context.store, self._context.layer
        for tail in self.scan.tails:
            buffer[slice(*tail.rows)] = store.settle_state(
                (self._context.microbatch, layer), (self._name, tail.sequence)
            )
        channels = buffer.shape[1]
        sends = [
            Outgoing(each.sender, (each.num_tokens, channels), partial(_pack, buffer, each.target))
            for each in self._arriving
        ]
        receives = [Incoming(each.receiver, (each.num_tokens, channels)) for each in self._leaving]
        came = exchange(sends, receives, like=buffer, context=self._context)
        local = [take_rows(buffer, each.target) for each in self._local]
        for each, rows in zip((*self._local, *self._leaving), (*local, *came), strict=True):
            write_rows(gradient, each.source, source=rows, add=True)
        for head in self.scan.heads:
            own = gradient[slice(*head.rows)]
            store.put_state_gradient((head.microbatch, layer), (self._name, head.sequence), gradient=own)
        return gradient[: self.scan.num_tokens]


def _pack(source: Tensor, ranges: Sequence[Range], target: Tensor) -> None:
    copy_rows(source, ranges, target=target)


def _check(x: Tensor, weight: Tensor, *, bias: Tensor | None, scan: ScanProgram, activation: str | None) -> None:
    if len(x) != scan.num_tokens:
        raise ValueError(
            f"convolution: x has {len(x)} tokens, the program of rank {scan.rank} loads {scan.num_tokens}; pass the "
            "tokens that the program loads, in its order"
        )
    due = (x.shape[1], scan.kind.halo + 1)
    if tuple(weight.shape) != due or (bias is not None and tuple(bias.shape) != due[:1]):
        raise ValueError(
            f"convolution: x {tuple(x.shape)}, weight {tuple(weight.shape)}, bias "
            f"{None if bias is None else tuple(bias.shape)}; want weight {due}, as wide as the kind's halo and "
            f"one, and bias {due[:1]}"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"convolution: activation is {activation!r}, must be one of {ACTIVATIONS}; choose one of them")
