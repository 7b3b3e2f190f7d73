"""Lowering: from a plan to one program per rank."""

from collections.abc import Sequence

from rayfcp.plan import lay_out
from rayfcp.program.attention import lower_attention
from rayfcp.program.instructions import Backward, Forward, Instruction, Load, Piece, RankProgram
from rayfcp.values import BatchPlan, Layout, SequenceSpec


def lower(plan: BatchPlan, sequences: Sequence[SequenceSpec], *, reduce_every: str = "step") -> tuple[RankProgram, ...]:
    """One program per rank, rank r at index r.

    `sequences` are those that were planned, `sequences[i].id == i`. Gradients are reduced in the last
    backward pass (`reduce_every="step"`) or in each (`"microbatch"`). All ranks run the same number of
    passes: a rank without tokens in a microbatch runs one padding token.
    """
    layouts = [lay_out(microbatch, sequences) for microbatch in plan.microbatches]
    masks = {sequence.id: sequence.mask for sequence in sequences}
    attention = [lower_attention(layout, masks=masks, num_ranks=plan.num_ranks) for layout in layouts]
    plan_hash, last = plan.plan_hash, len(layouts) - 1
    programs = []
    for rank in range(plan.num_ranks):
        instructions: list[Instruction] = []
        for index, layout in enumerate(layouts):
            instructions += [
                Load(microbatch=index, pieces=_pieces(layout, rank)),
                Forward(microbatch=index, attention=attention[index][rank], recomputed_layers=plan.recomputed_layers),
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


def _pieces(layout: Layout, rank: int) -> tuple[Piece, ...]:
    return tuple(
        Piece(sequence=block.sequence, start=block.start, stop=block.stop)
        for block in layout.blocks
        if block.rank == rank
    )
