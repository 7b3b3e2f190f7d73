"""From chunks to microbatches of a plan."""

from collections.abc import Sequence

from rayfcp.plan.pipelines.chunks import Chunked
from rayfcp.plan.pipelines.pool import Pool
from rayfcp.values import Group, MicrobatchPlan, Primitive, Slice


def microbatches_of(
    chunked: Chunked, pool: Pool, *, num_ranks: int, primitive: Primitive, seconds: Sequence[float]
) -> tuple[MicrobatchPlan, ...]:
    """One group of all ranks each, the slice before the whole sequences; `seconds[m]`: predicted."""
    ranks = tuple(range(num_ranks))
    ids = pool.ids.tolist()
    microbatches = []
    for piece, members, predicted_s in zip(chunked.pieces, chunked.members, seconds, strict=True):
        sequences = tuple(ids[position] for position in members)
        slices: tuple[Slice, ...] = ()
        if piece is not None:
            slices = (Slice(sequence=ids[piece.position], start=piece.start, stop=piece.stop),)
            sequences = (ids[piece.position], *sequences)
        group = Group(ranks=ranks, sequences=sequences, primitive=primitive)
        microbatches.append(
            MicrobatchPlan(groups=(group,), group_s=(predicted_s,), predicted_s=predicted_s, slices=slices)
        )
    return tuple(microbatches)
