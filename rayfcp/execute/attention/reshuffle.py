"""Rows of tensors on their way between a loop's order and the plan's."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rayfcp.execute.attention.schedule import KernelCall, ReadyExchange, put_rows, take_rows
from rayfcp.execute.parallel.transport import Envelope, Traffic, Transport
from rayfcp.program import Parcel, ReshuffleProgram

Tensors = Sequence[Tensor]
"""Of the same tokens and head_dim, `[tokens, heads of each, head_dim]`."""


def keep_in(program: ReshuffleProgram, theirs: Tensors) -> list[Tensor]:
    """The plan's rows that are on this rank already; all others, and a padding row, are zero."""
    placed = max(program.num_placed, 1)
    ours = [tensor.new_zeros((placed, *tensor.shape[1:])) for tensor in theirs]
    for target, source in zip(ours, theirs, strict=True):
        for there, here in program.kept:
            target[slice(*here)] = source[slice(*there)]
    return ours


def keep_out(program: ReshuffleProgram, ours: Tensors, *, theirs: Tensors) -> None:
    """Rows that need not travel, back into the loop's order."""
    for source, target in zip(ours, theirs, strict=True):
        for there, here in program.kept:
            target[slice(*there)] = source[slice(*here)]


def exchange(
    steps: Sequence[ReadyExchange],
    sources: Callable[[], Tensors],
    *,
    targets: Tensors,
    compute: Callable[[KernelCall], None],
    transport: Transport,
    traffic: Traffic,
) -> None:
    """Rows of `sources` go to rows of other ranks' `targets`, in the dtype of these, while `compute` runs the calls.

    A parcel holds its tokens of all tensors, side by side over heads. The calls of a round neither read rows that it or
    a later round brings nor write rows that it or an earlier one takes away (`rayfcp.program.reshuffle`).
    """
    for step in steps:
        leaving: list[Envelope] = []
        arriving: list[Envelope] = []
        if step.send:
            leaving.append((step.send.peer, _packed(step.send, sources(), dtype=targets[0].dtype)))
        if step.receive:
            arriving.append((step.receive.peer, _empty(step.receive, targets)))
        traffic.bytes_sent += sum(tensor.nbytes for _, tensor in leaving)
        pending = transport.post(leaving, arriving)
        for call in step.calls:
            compute(call)
        traffic.wait(pending)
        if step.receive:
            parts = arriving[0][1].split([tensor.shape[1] for tensor in targets], dim=1)
            for target, part in zip(targets, parts, strict=True):
                put_rows(target, step.receive.ranges, source=part)


def _packed(parcel: Parcel, tensors: Tensors, *, dtype: torch.dtype) -> Tensor:
    return torch.cat([take_rows(tensor, parcel.ranges).to(dtype) for tensor in tensors], dim=1)


def _empty(parcel: Parcel, tensors: Tensors) -> Tensor:
    heads = sum(tensor.shape[1] for tensor in tensors)
    return tensors[0].new_empty((parcel.num_tokens, heads, tensors[0].shape[2]))
