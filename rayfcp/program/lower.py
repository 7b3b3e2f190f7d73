"""Lowering: from a plan to one program per rank."""

from collections.abc import Collection, Iterable, Sequence

from rayfcp.plan import lay_out
from rayfcp.program.attention import lower_attention
from rayfcp.program.heads import lower_heads
from rayfcp.program.instructions import (
    AttentionProgram,
    Backward,
    Forward,
    HeadProgram,
    Instruction,
    Load,
    Piece,
    RankProgram,
)
from rayfcp.values import BatchPlan, Group, Layout, MicrobatchPlan, Primitive, SequenceSpec

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
) -> tuple[RankProgram, ...]:
    """One program per rank, rank r at index r.

    `sequences` are those that were planned, `sequences[i].id == i`. Gradients are reduced in the last
    backward pass (`reduce_every="step"`) or in each (`"microbatch"`). All ranks run the same number of
    passes: a rank without tokens in a microbatch runs one padding token. A group of one rank exchanges
    nothing, so that its primitive does not matter. That heads divide is the planner's to see to.

    Raises:
        ValueError: a group of several ranks has a primitive that is not in `primitives`; or a layout cannot be
            run (`lower_attention`, `lower_heads`).
    """
    _check_primitives(plan, primitives)
    layouts = [lay_out(microbatch, sequences) for microbatch in plan.microbatches]
    passes = [
        _passes(layout, microbatch, sequences, num_ranks=plan.num_ranks)
        for layout, microbatch in zip(layouts, plan.microbatches, strict=True)
    ]
    loads = [_pieces(layout, num_ranks=plan.num_ranks) for layout in layouts]
    plan_hash, last = plan.plan_hash, len(layouts) - 1
    programs = []
    for rank in range(plan.num_ranks):
        instructions: list[Instruction] = []
        for index in range(len(layouts)):
            instructions += [
                Load(microbatch=index, pieces=loads[index][rank]),
                Forward(microbatch=index, attention=passes[index][rank], recomputed_layers=plan.recomputed_layers),
                Backward(microbatch=index, reduce=reduce_every == "microbatch" or index == last),
            ]
        programs.append(
            RankProgram(
                rank=rank,
                num_ranks=plan.num_ranks,
                stage=0,
                num_stages=1,
                plan_hash=plan_hash,
                instructions=tuple(instructions),
            )
        )
    return tuple(programs)


def _check_primitives(plan: BatchPlan, primitives: Collection[Primitive]) -> None:
    for number, microbatch in enumerate(plan.microbatches):
        for index, group in enumerate(microbatch.groups):
            if group.degree > 1 and group.primitive not in primitives:
                raise ValueError(
                    f"microbatch {number} group {index}: primitive is {group.primitive.value}, must be one of "
                    f"{sorted(each.value for each in primitives)}; plan with these (plan.primitives)"
                )


def _passes(
    layout: Layout, microbatch: MicrobatchPlan, sequences: Iterable[SequenceSpec], *, num_ranks: int
) -> tuple[AttentionProgram | HeadProgram, ...]:
    masks = {sequence.id: sequence.mask for sequence in sequences}
    _check_heads(layout, microbatch, num_ranks=num_ranks)
    if layout.heads > 1:
        by_rank = lower_heads(layout, layout.runs(num_ranks), masks=masks)
        return tuple(by_rank[rank] for rank in range(num_ranks))
    programs: list[AttentionProgram | HeadProgram] = [*lower_attention(layout, masks=masks, num_ranks=num_ranks)]
    for group in microbatch.groups:
        if group.primitive is Primitive.ULYSSES and group.degree > 1:
            _check_rounds(group, layout)
            held = Layout(blocks=tuple(block for block in layout.blocks if block.rank in group.ranks), rounds=())
            for rank, program in lower_heads(held, [group.ranks], masks=masks).items():
                programs[rank] = program
    return tuple(programs)


def _check_heads(layout: Layout, microbatch: MicrobatchPlan, *, num_ranks: int) -> None:
    if layout.heads < 1 or num_ranks % layout.heads:
        raise ValueError(
            f"layout.heads is {layout.heads}, must be at least 1 and divide the {num_ranks} ranks; plan again"
        )
    exchanging = [group.ranks for group in microbatch.groups if group.primitive is Primitive.ULYSSES]
    if layout.heads > 1 and exchanging:
        raise ValueError(
            f"layout.heads is {layout.heads} beside Ulysses groups {exchanging}, must be 1 there: heads are shared out "
            "once; make the groups rings"
        )


def _check_rounds(group: Group, layout: Layout) -> None:
    for index, step in enumerate(layout.rounds):
        for transfer in step.transfers:
            touched = {transfer.source, transfer.target} & set(group.ranks)
            if touched:
                raise ValueError(
                    f"round {index}: a transfer touches ranks {sorted(touched)} of a {group.primitive.value} group, "
                    "which must have none; drop the transfer or make the group a ring"
                )


def _pieces(layout: Layout, *, num_ranks: int) -> list[tuple[Piece, ...]]:
    """What each rank loads."""
    pieces: list[list[Piece]] = [[] for _ in range(num_ranks)]
    for block in layout.blocks:
        pieces[block.rank].append(Piece(sequence=block.sequence, start=block.start, stop=block.stop))
    return [tuple(each) for each in pieces]
