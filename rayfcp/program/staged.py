"""The instructions of one rank on one stage, in the order of the plan's actions."""

from collections.abc import Iterator, Sequence

from rayfcp.program.instructions import (
    AttentionProgram,
    Backward,
    Flow,
    Forward,
    Free,
    HeadProgram,
    Instruction,
    Load,
    Piece,
    Receive,
    Send,
)
from rayfcp.values import Action, BatchPlan


def staged(
    plan: BatchPlan,
    stage: int,
    *,
    pieces: Sequence[tuple[Piece, ...]],
    attention: Sequence[AttentionProgram | HeadProgram],
    reduce_every: str,
) -> tuple[Instruction, ...]:
    """What a stage does; `pieces[m]` and `attention[m]` are the rank's of microbatch m.

    A forward pass is preceded by its load and by what the stage before sends, followed by what goes to the next stage;
    a backward pass likewise, the other way. What a microbatch kept for later slices goes after its backward pass.
    """
    actions = _actions(plan, stage)
    last = [action.microbatch for action, _ in actions if action.backward][-1]
    instructions: list[Instruction] = []
    for action, recomputed_layers in actions:
        at, program = action.microbatch, attention[action.microbatch]
        if not action.backward:
            instructions.append(Load(microbatch=at, pieces=pieces[at]))
            instructions += _received(plan, stage - 1, at, flow=Flow.ACTIVATION, program=program)
            instructions.append(Forward(microbatch=at, attention=program, recomputed_layers=recomputed_layers))
            instructions += _sent(plan, stage + 1, at, flow=Flow.ACTIVATION, program=program)
            continue
        instructions += _received(plan, stage + 1, at, flow=Flow.GRADIENT, program=program)
        instructions.append(Backward(microbatch=at, reduce=reduce_every == "microbatch" or at == last))
        instructions += _sent(plan, stage - 1, at, flow=Flow.GRADIENT, program=program)
        if program.inner.kept:
            instructions.append(Free(microbatch=at))
    return tuple(instructions)


def _actions(plan: BatchPlan, stage: int) -> list[tuple[Action, int]]:
    """Passes in order, with the layers that their microbatch recomputes. Without stages, microbatch by microbatch."""
    if not plan.pipelines:
        return [
            (Action(microbatch=at, backward=backward), plan.recomputed_layers)
            for at in range(len(plan.microbatches))
            for backward in (False, True)
        ]
    return [
        (action, pipeline.recomputed_layers[stage][action.microbatch - pipeline.start])
        for pipeline in plan.pipelines
        for action in pipeline.actions[stage]
    ]


def _received(
    plan: BatchPlan, stage: int, microbatch: int, *, flow: Flow, program: AttentionProgram | HeadProgram
) -> Iterator[Receive]:
    if 0 <= stage < plan.num_stages:
        yield Receive(microbatch=microbatch, flow=flow, stage=stage, num_tokens=program.num_tokens)


def _sent(
    plan: BatchPlan, stage: int, microbatch: int, *, flow: Flow, program: AttentionProgram | HeadProgram
) -> Iterator[Send]:
    if 0 <= stage < plan.num_stages:
        yield Send(microbatch=microbatch, flow=flow, stage=stage, num_tokens=program.num_tokens)
