"""Lowering: from a plan to one program per stage and rank."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from rayfcp.plan.layout import layouts_of
from rayfcp.program.deadlock import hand_overs_end
from rayfcp.program.encoding import lower_encoding
from rayfcp.program.instructions import Backward, Forward, LayerKind, Piece, RankProgram
from rayfcp.program.lowered import attention_of
from rayfcp.program.staged import staged
from rayfcp.program.turns import Turns, in_turns, turns_of
from rayfcp.values import BatchPlan, Layout, Primitive, SequenceSpec

RUNTIME_PRIMITIVES = frozenset({Primitive.RING, Primitive.ULYSSES})
"""What training can run."""
ALL_PRIMITIVES = frozenset(Primitive)
"""What can be lowered, checked and simulated."""


def lower(
    plan: BatchPlan,
    sequences: Sequence[SequenceSpec],
    *,
    reduce_every: str = "step",
    primitives: Collection[Primitive] = RUNTIME_PRIMITIVES,
    windows_of_stage: Sequence[Sequence[int]] = (),
) -> tuple[RankProgram, ...]:
    """One program per stage and rank, that of rank r on stage p at index p x num_ranks + r.

    `sequences` are those that were planned, `sequences[i].id == i`. Gradients are reduced in the last
    backward pass (`reduce_every="step"`) or in each (`"microbatch"`). All ranks run the same number of
    passes: a rank without tokens in a microbatch runs one padding token. A group of one rank exchanges
    nothing, so that its primitive does not matter. That heads divide is the planner's to see to. All stages run the
    same attention in layers of one window; only which of the sequences' `windows` their layers have
    (`windows_of_stage`, all if absent), what they recompute, the order of their passes and their neighbours differ
    (`staged`). Sends follow their pass, or come somewhat later where stages would otherwise wait for each other
    (`turns`).

    Raises:
        ValueError: a group of several ranks has a primitive that is not in `primitives`; a stage names a window that
            the sequences do not; sequences disagree on these; a layout cannot be run (`lower_attention`,
            `lower_heads`), or an encoding (`lower_encoding`).
    """
    _check_primitives(plan, primitives)
    layouts = layouts_of(plan, sequences)
    of_stage = _windows(plan, sequences, windows_of_stage)
    windows = sorted({each for own in of_stage for each in own})
    passes = attention_of(plan, layouts, sequences=sequences, windows=windows)
    loads = [_pieces(layout, num_ranks=plan.num_ranks) for layout in layouts]
    encodes = lower_encoding(plan, layouts, sequences=sequences)
    plan_hash = plan.plan_hash
    programs = tuple(
        RankProgram(
            rank=rank,
            num_ranks=plan.num_ranks,
            stage=stage,
            num_stages=plan.num_stages,
            plan_hash=plan_hash,
            instructions=staged(
                plan,
                stage,
                pieces=[each[rank] for each in loads],
                encodes=[each[rank] if each else None for each in encodes],
                attention=[
                    [LayerKind(window=window, attention=passes[window][at][rank]) for window in of_stage[stage]]
                    for at in range(len(layouts))
                ],
                reduce_every=reduce_every,
            ),
        )
        for stage in range(plan.num_stages)
        for rank in range(plan.num_ranks)
    )
    return programs if hand_overs_end(programs[:: plan.num_ranks]) else _in_turns(programs, turns_of(plan))


def _windows(
    plan: BatchPlan, sequences: Sequence[SequenceSpec], of_stage: Sequence[Sequence[int]]
) -> list[tuple[int, ...]]:
    """Of each stage, ascending; those of a stage without layers are those of all."""
    if len(kinds := {sequence.windows for sequence in sequences}) > 1:
        raise ValueError(
            f"sequences have windows {sorted(kinds)}, must all have those of one model; give them the same"
        )
    known = tuple(window for each in kinds for window, _ in each) or (0,)
    found = [tuple(sorted(set(own))) or known for own in of_stage] or [known] * plan.num_stages
    if len(found) != plan.num_stages or not {window for own in found for window in own} <= set(known):
        raise ValueError(
            f"windows_of_stage is {tuple(of_stage)}, must name for each of {plan.num_stages} stages some of {known}, "
            "which the sequences have; take both from one model"
        )
    return found


def _in_turns(programs: Sequence[RankProgram], turns: Turns) -> tuple[RankProgram, ...]:
    """With sends where they hold nobody up; as they are where stages wait for each other however these are posted."""
    if len(turns) < programs[0].num_stages * _num_passes(programs[0]):
        return tuple(programs)
    return tuple(
        replace(each, instructions=in_turns(each.instructions, stage=each.stage, turns=turns)) for each in programs
    )


def _num_passes(program: RankProgram) -> int:
    return sum(isinstance(item, Forward | Backward) for item in program.instructions)


def _check_primitives(plan: BatchPlan, primitives: Collection[Primitive]) -> None:
    for number, microbatch in enumerate(plan.microbatches):
        for index, group in enumerate(microbatch.groups):
            if group.degree > 1 and group.primitive not in primitives:
                raise ValueError(
                    f"microbatch {number} group {index}: primitive is {group.primitive.value}, must be one of "
                    f"{sorted(each.value for each in primitives)}; plan with these (plan.primitives)"
                )


def _pieces(layout: Layout, *, num_ranks: int) -> list[tuple[Piece, ...]]:
    """What each rank loads."""
    pieces: list[list[Piece]] = [[] for _ in range(num_ranks)]
    for block in layout.blocks:
        pieces[block.rank].append(Piece(sequence=block.sequence, start=block.start, stop=block.stop))
    return [tuple(each) for each in pieces]
