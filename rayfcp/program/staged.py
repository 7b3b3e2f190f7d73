"""The instructions of one rank on one stage, in the order of the plan's actions."""

from collections.abc import Sequence

from rayfcp.program.encode import Encode
from rayfcp.program.instructions import (
    Backward,
    Flow,
    Forward,
    Free,
    Instruction,
    LayerKind,
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
    attention: Sequence[Sequence[LayerKind]],
    reduce_every: str,
    encodes: Sequence[Encode | None] = (),
) -> tuple[Instruction, ...]:
    """What a stage does; `pieces[m]`, `encodes[m]` and `attention[m]`, of the kinds of layers that the stage has, are
    the rank's of microbatch m.

    A forward pass is preceded by its load, by what it encodes, and by what the stage before sends, followed by what
    goes to the next stage; a backward pass likewise, the other way. What a microbatch kept for later slices goes after
    its backward pass.
    """
    actions = _actions(plan, stage)
    last = [action.microbatch for action, _ in actions if action.backward][-1]
    before, after = _neighbours(stage, num_stages=plan.num_stages)
    instructions: list[Instruction] = []
    for action, recomputed_layers in actions:
        at, (kind, *others) = action.microbatch, attention[action.microbatch]
        program = kind.attention
        taken, given, flow = (after, before, Flow.GRADIENT) if action.backward else (before, after, Flow.ACTIVATION)
        if not action.backward:
            instructions.append(Load(microbatch=at, pieces=pieces[at]))
            instructions += [each for each in encodes[at : at + 1] if each]
        if taken is not None:
            instructions.append(Receive(microbatch=at, flow=flow, stage=taken, num_tokens=program.num_tokens))
        if action.backward:
            instructions.append(Backward(microbatch=at, reduce=reduce_every == "microbatch" or at == last))
        else:
            instructions.append(
                Forward(
                    microbatch=at,
                    attention=program,
                    recomputed_layers=recomputed_layers,
                    window=kind.window,
                    others=tuple(others),
                )
            )
        if given is not None:
            instructions.append(Send(microbatch=at, flow=flow, stage=given, num_tokens=program.num_tokens))
        if action.backward and any(each.attention.inner.kept for each in attention[at]):
            instructions.append(Free(microbatch=at))
    return tuple(instructions)


def _neighbours(stage: int, *, num_stages: int) -> tuple[int | None, int | None]:
    """The stage before and the stage after, if any.

    >>> _neighbours(0, num_stages=2), _neighbours(1, num_stages=2)
    ((None, 1), (0, None))
    """
    return stage - 1 if stage > 0 else None, stage + 1 if stage + 1 < num_stages else None


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
