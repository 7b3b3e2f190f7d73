"""Exchanges of rows between a training loop's token order and the plan's."""

from collections.abc import Sequence

from torch import Tensor

from rayfcp.execute.attention.schedule import apart, side_by_side, take_rows, write_rows
from rayfcp.execute.parallel.transport import AttentionStats, Envelope, Transport
from rayfcp.program import ReshuffleProgram


def to_plan(
    program: ReshuffleProgram, given: Sequence[Tensor], *, transport: Transport, stats: AttentionStats
) -> list[Tensor]:
    """Tensors of the same tokens, `[tokens, heads of each, head_dim]`, in the plan's order; padding is zero."""
    return _moved(program, given, num_rows=max(program.num_placed, 1), transport=transport, stats=stats)


def to_loop(
    program: ReshuffleProgram, placed: Sequence[Tensor], *, num_rows: int, transport: Transport, stats: AttentionStats
) -> list[Tensor]:
    """Tensors in the loop's order, `num_rows` each; rows of padding are zero."""
    return _moved(program, placed, num_rows=num_rows, transport=transport, stats=stats, back=True)


def _moved(
    program: ReshuffleProgram,
    sources: Sequence[Tensor],
    *,
    num_rows: int,
    transport: Transport,
    stats: AttentionStats,
    back: bool = False,
) -> list[Tensor]:
    """Copy the rows that stay on this rank and exchange the others; a message holds its tokens of all tensors,
    side by side. `back`: from the plan's order to the loop's."""
    targets = [each.new_zeros((num_rows, *each.shape[1:])) for each in sources]
    for in_loop, in_plan in program.kept:
        old, new = (in_plan, in_loop) if back else (in_loop, in_plan)
        for target, source in zip(targets, sources, strict=True):
            target[slice(*new)] = source[slice(*old)]
    shapes = [tuple(each.shape[1:]) for each in targets]
    for step in program.rounds:
        sent, received = (step.receive, step.send) if back else (step.send, step.receive)
        sends: list[Envelope] = []
        receives: list[Envelope] = []
        if sent:
            sends.append((sent.peer, side_by_side([take_rows(each, sent.ranges) for each in sources])))
        if received:
            width = sum(heads * head_dim for heads, head_dim in shapes)
            receives.append((received.peer, targets[0].new_empty((received.num_tokens, width))))
        stats.wait(stats.post(sends, receives, transport=transport))
        if received:
            for target, part in zip(targets, apart(receives[0][1], shapes), strict=True):
                write_rows(target, received.ranges, source=part)
    return targets
