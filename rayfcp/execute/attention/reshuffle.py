"""Exchanges of rows between a training loop's token order and the plan's."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rayfcp.execute.attention.schedule import take_rows, write_rows
from rayfcp.execute.parallel.transport import AttentionStats, Envelope, Transport
from rayfcp.program import ReshuffleProgram

Tensors = Sequence[Tensor]
"""Tensors of the same tokens and head_dim, `[tokens, heads of each, head_dim]`."""


def to_plan(program: ReshuffleProgram, given: Tensors, *, transport: Transport, stats: AttentionStats) -> list[Tensor]:
    """Tensors in the plan's order; rows of padding are zero."""
    placed = max(program.num_placed, 1)
    targets = [each.new_zeros((placed, *each.shape[1:])) for each in given]
    for target, source in zip(targets, given, strict=True):
        for in_loop, in_plan in program.kept:
            target[slice(*in_plan)] = source[slice(*in_loop)]
    _exchange(program, given, targets=targets, transport=transport, stats=stats)
    return targets


def to_loop(
    program: ReshuffleProgram, placed: Tensors, *, num_rows: int, transport: Transport, stats: AttentionStats
) -> list[Tensor]:
    """Tensors in the loop's order, `num_rows` each; rows of padding are zero."""
    targets = [each.new_zeros((num_rows, *each.shape[1:])) for each in placed]
    for target, source in zip(targets, placed, strict=True):
        for in_loop, in_plan in program.kept:
            target[slice(*in_loop)] = source[slice(*in_plan)]
    _exchange(program, placed, targets=targets, transport=transport, stats=stats, back=True)
    return targets


def _exchange(
    program: ReshuffleProgram,
    sources: Tensors,
    *,
    targets: Tensors,
    transport: Transport,
    stats: AttentionStats,
    back: bool = False,
) -> None:
    """Send rows of `sources` to rows of other ranks' `targets`. `back`: from the plan's order to the loop's.

    A message holds its tokens of all tensors, concatenated over heads.
    """
    heads = [tensor.shape[1] for tensor in targets]
    for step in program.rounds:
        sent, received = (step.receive, step.send) if back else (step.send, step.receive)
        sends: list[Envelope] = []
        receives: list[Envelope] = []
        if sent:
            sends.append((sent.peer, torch.cat([take_rows(tensor, sent.ranges) for tensor in sources], dim=1)))
        if received:
            shape = (received.num_tokens, sum(heads), targets[0].shape[2])
            receives.append((received.peer, targets[0].new_empty(shape)))
        stats.wait(stats.post(sends, receives, transport=transport))
        if received:
            for target, part in zip(targets, receives[0][1].split(heads, dim=1), strict=True):
                write_rows(target, received.ranges, source=part)
