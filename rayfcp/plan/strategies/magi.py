"""MagiAttention (Zewei and Huang, 2025): equal-count chunks over all ranks, balanced by attention area.

Source: the project's documents and its dispatch solver. All sequences of a microbatch are laid end to end, in
batch order, and cut into chunks of one size. Chunks go to ranks largest attention area first, each to the
rank with the least area that holds fewer than ceil(chunks / N) (its min-heap, the default), so that ranks hold equal
tokens. Keys and values are cast to exactly the ranks that need them (group cast), once each.

The chunk size is ceil(tokens / (N x chunks per rank)) there, 8 chunks a rank by default; as a user would, we
try several numbers of chunks per rank. It is silent on how a batch becomes microbatches: the fewest that
best-fit decreasing finds in memory, as for `ring`. The cast is scheduled without congestion control: in round i
each rank sends to the i-th next one, so that busy ports take longer. Its multi-stage overlap posts all messages of a
stage at once, while what the last one brought is computed; the number of stages is tuned too.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from rayfcp.config.plan import PlanConfig
from rayfcp.plan.costs.layout_cost import layout_s
from rayfcp.plan.costs.model import CostModel
from rayfcp.plan.microbatches import columns_of
from rayfcp.plan.packing import best_fit_decreasing, bins_of
from rayfcp.plan.primitives import require
from rayfcp.plan.rivals.cast import cast
from rayfcp.plan.rivals.chunks import blocks_of, cut_chunks
from rayfcp.plan.rivals.dispatch import dispatch
from rayfcp.plan.strategies.interface import Proposal
from rayfcp.values import ClusterSpec, Group, Layout, MicrobatchPlan, Pacing, Primitive, SequenceSpec

CHUNKS_PER_RANK = (8, 16, 4, 2, 1)
"""What is tried, the project's default first; 1 always fits, as ranks then hold ceil(tokens / N)."""

STAGES = (None, 2, 4, 8)
"""Numbers of stages that are tried; None: a stage for each other rank."""
BUFFERS = 2
"""Stages that a rank holds: the one that travels, and the one that is computed."""

Timed = tuple[float, tuple[int, ...], Layout]


def propose(
    sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> Proposal:
    """One group of all ranks per microbatch, with the layout of its blocks.

    Raises:
        InfeasiblePlanError: rings, whose point-to-point rounds the cast runs on, are not allowed.
    """
    require(Primitive.RING, options=options, strategy="magi")
    batch = columns_of(sequences, cost=cost)
    by_id = {sequence.id: sequence for sequence in sequences}
    room = cluster.num_ranks * cluster.max_tokens_per_rank
    packed = bins_of(best_fit_decreasing(batch.num_tokens, capacity_tokens=room) or [])
    timed = [
        _fastest(tuple(sorted(batch.ids[at] for at in members)), by_id=by_id, cluster=cluster, cost=cost)
        for members in packed
    ]
    timed.sort(key=lambda each: each[:2])
    microbatches = tuple(
        MicrobatchPlan(
            groups=(Group(ranks=tuple(range(cluster.num_ranks)), sequences=ids),),
            group_s=(seconds,),
            predicted_s=cost.microbatch_s(seconds, last=index == len(timed) - 1),
            layout=layout,
        )
        for index, (seconds, ids, layout) in enumerate(timed)
    )
    return Proposal(microbatches=microbatches, reason="equal chunks on all ranks, balanced by attention area")


def _fastest(
    ids: tuple[int, ...], *, by_id: Mapping[int, SequenceSpec], cluster: ClusterSpec, cost: CostModel
) -> Timed:
    """The best chunk size and number of stages for the sequences of one microbatch; among equals those tried first."""
    num_tokens = sum(by_id[each].num_tokens for each in ids)
    found: list[Timed] = []
    for per_rank in CHUNKS_PER_RANK:
        chunk_tokens = -(-num_tokens // (cluster.num_ranks * per_rank))
        if per_rank * chunk_tokens <= cluster.max_tokens_per_rank:
            layout = _laid_out([by_id[each] for each in ids], chunk_tokens=chunk_tokens, num_ranks=cluster.num_ranks)
            for each in _staged(layout):
                found.append((layout_s(each, by_id=by_id, cluster=cluster, cost=cost), ids, each))
    return min(found, key=lambda each: each[0])


def _staged(layout: Layout) -> Iterator[Layout]:
    for stages in STAGES if layout.rounds else (None,):
        if stages is None:
            yield layout
        elif stages < len(layout.rounds):
            how = Pacing(coalesce=-(-len(layout.rounds) // stages), num_buffers=BUFFERS)
            yield replace(layout, pacing=how)


def _laid_out(sequences: Sequence[SequenceSpec], *, chunk_tokens: int, num_ranks: int) -> Layout:
    by_id = {sequence.id: sequence for sequence in sequences}
    chunks = cut_chunks(sequences, chunk_tokens=chunk_tokens)
    areas = [sum(by_id[each].block_cells(start, stop) for each, start, stop in chunk) for chunk in chunks]
    ranks = dispatch(areas, num_buckets=num_ranks, max_jobs=-(-len(chunks) // num_ranks))
    return cast(blocks_of(chunks, ranks), by_id=by_id, num_ranks=num_ranks)
