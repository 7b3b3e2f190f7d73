"""Exchanges of rows between a training loop's token order and the plan's."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rayfcp.execute.attention.schedule import Calls, KernelCall, take_rows, write_rows
from rayfcp.execute.parallel.transport import AttentionStats, Envelope, Transport
from rayfcp.program import ReshuffleProgram

Tensors = Sequence[Tensor]
"""Tensors of the same tokens and head_dim, `[tokens, heads of each, head_dim]`."""


def kept_rows(program: ReshuffleProgram, sources: Tensors) -> list[Tensor]:
    """Tensors in the plan's order that hold the rows already on this rank; all other rows, and padding, are zero."""
    placed = max(program.num_placed, 1)
    targets = [source.new_zeros((placed, *source.shape[1:])) for source in sources]
    for target, source in zip(targets, sources, strict=True):
        for in_loop, in_plan in program.kept:
            target[slice(*in_plan)] = source[slice(*in_loop)]
    return targets


def copy_kept(program: ReshuffleProgram, sources: Tensors, *, targets: Tensors) -> None:
    """Copy rows that stay on this rank back into the loop's order."""
    for source, target in zip(sources, targets, strict=True):
        for in_loop, in_plan in program.kept:
            target[slice(*in_loop)] = source[slice(*in_plan)]


def exchange(
    program: ReshuffleProgram,
    sources: Callable[[], Tensors],
    *,
    targets: Tensors,
    transport: Transport,
    stats: AttentionStats,
    back: bool = False,
    calls: Sequence[Calls] = (),
    compute: Callable[[KernelCall], None] = lambda _: None,
) -> None:
    """Send rows of `sources` to rows of other ranks' `targets`, in the dtype of these, while `compute` runs the calls
    of each round, if there are any. `back`: from the plan's order to the loop's.

    A message holds its tokens of all tensors, concatenated over heads. The calls of a round neither read rows that this
    or a later round receives nor write rows that this or an earlier one sends (`rayfcp.program.reshuffle`).
    """
    heads = [tensor.shape[1] for tensor in targets]
    for step, own_calls in zip(program.rounds, calls or [()] * len(program.rounds), strict=True):
        sent, received = (step.receive, step.send) if back else (step.send, step.receive)
        sends: list[Envelope] = []
        receives: list[Envelope] = []
        if sent:
            rows = [take_rows(tensor, sent.ranges).to(targets[0].dtype) for tensor in sources()]
            sends.append((sent.peer, torch.cat(rows, dim=1)))
        if received:
            shape = (received.num_tokens, sum(heads), targets[0].shape[2])
            receives.append((received.peer, targets[0].new_empty(shape)))
        pending = stats.post(sends, receives, transport=transport)
        for call in own_calls:
            compute(call)
        stats.wait(pending)
        if received:
            for target, part in zip(targets, receives[0][1].split(heads, dim=1), strict=True):
                write_rows(target, received.ranges, source=part)
