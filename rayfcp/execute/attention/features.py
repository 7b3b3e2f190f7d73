"""Features of pictures on their way from the ranks that encode them to those of their tokens."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rayfcp.execute.attention.reshuffle import exchange, keep_in, keep_out
from rayfcp.execute.attention.schedule import KernelCall, ReadyExchange, rows_of
from rayfcp.execute.parallel.transport import Traffic, Transport
from rayfcp.program import Range, ReshuffleProgram


def handed_out(features: Tensor, program: ReshuffleProgram, *, transport: Transport, traffic: Traffic) -> Tensor:
    """Rows of `features`, `[tokens encoded, width]`, to the ranks of their tokens; what this rank gets,
    `[tokens placed, width]`. Differentiable: gradients take the same way back. Every rank must call it, and its result
    must stand in the graph of every rank or, with frozen encoders, of none.

    Raises:
        ValueError: the encoder gave other rows than the program has.
    """
    if len(features) != program.num_tokens:
        raise ValueError(
            f"encode: rank {program.rank} has features of {len(features)} tokens, its program {program.num_tokens}; "
            "give the pictures that were planned, in the sizes that were planned"
        )
    return _HandOut.apply(features, program, transport, traffic)  # type: ignore[no-any-return, no-untyped-call]


def row_numbers(ranges: tuple[Range, ...], device: torch.device) -> Tensor:
    """Of all rows of `ranges`, int64."""
    return rows_of(ranges, device) if ranges else torch.empty(0, dtype=torch.int64, device=device)


class _HandOut(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, features: Tensor, program: ReshuffleProgram, transport: Transport, traffic: Traffic
    ) -> Tensor:
        ctx.program, ctx.transport, ctx.traffic = program, transport, traffic
        theirs = (features.unsqueeze(1),)
        ours = keep_in(program, theirs)
        steps = [ReadyExchange(send=step.send, receive=step.receive, calls=()) for step in program.rounds]
        exchange(steps, lambda: theirs, targets=ours, compute=_nothing, transport=transport, traffic=traffic)
        return ours[0][: program.num_placed].squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        program: ReshuffleProgram = ctx.program
        ours = (gradient.unsqueeze(1),)
        theirs = (gradient.new_zeros(program.num_tokens, 1, gradient.shape[1]),)
        steps = [ReadyExchange(send=step.receive, receive=step.send, calls=()) for step in program.rounds]
        exchange(steps, lambda: ours, targets=theirs, compute=_nothing, transport=ctx.transport, traffic=ctx.traffic)
        keep_out(program, ours, theirs=theirs)
        return theirs[0].squeeze(1), None, None, None


def _nothing(_: KernelCall) -> None:
    """There is nothing to compute beside features."""
