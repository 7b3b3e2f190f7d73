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

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush

from rayfcp.config.models import PlanConfig
from rayfcp.cost.layout import in_order, layout_s
from rayfcp.cost.model import CostModel
from rayfcp.plan.assembly import best_fit_decreasing, bins_of, columns_of
from rayfcp.plan.strategies.registry import Proposal, StrategyInfo
from rayfcp.plan.strategies.stages import in_stages
from rayfcp.values import (
    Block,
    ClusterSpec,
    Layout,
    Pacing,
    Primitive,
    Round,
    SequenceSpec,
    Transfer,
)

Needs = Mapping[tuple[int, int], Sequence[int]]
"""(source, target) -> indices of blocks."""


def cast(blocks: Sequence[Block], *, num_ranks: int) -> Layout:
    """The layout in which every block goes from its owner to each rank that attends to it, once.

    `blocks` come in ascending order within a sequence. In round i, 1 <= i < N, rank r sends to r + i mod N all
    that this rank needs of it: a matching in plain rotation, with no regard to who has how much to send, so
    the busiest port sets the pace. Rounds in which nobody sends are left out.
    """
    carried = needs(blocks)
    rounds: dict[int, list[Transfer]] = defaultdict(list)
    for (source, target), indices in sorted(carried.items()):
        transfer = Transfer(blocks=tuple(sorted(indices)), source=source, target=target)
        rounds[(target - source) % num_ranks].append(transfer)
    ordered = tuple(Round(transfers=tuple(rounds[shift])) for shift in sorted(rounds))
    return Layout(blocks=tuple(blocks), rounds=ordered)


def needs(blocks: Sequence[Block]) -> Needs:
    """Blocks that each rank needs of each other: those that begin before the end of its last block of the sequence."""
    by_sequence: dict[int, list[int]] = defaultdict(list)
    for index, block in enumerate(blocks):
        by_sequence[block.sequence].append(index)
    carried: dict[tuple[int, int], list[int]] = defaultdict(list)
    for indices in by_sequence.values():
        last = {blocks[index].rank: blocks[index].stop for index in indices}
        for target, stop in last.items():
            for index in indices:
                if blocks[index].rank != target and blocks[index].start < stop:
                    carried[blocks[index].rank, target].append(index)
    return carried


Fragment = tuple[int, int, int]
"""Sequence, start, stop."""


def cut_chunks(sequences: Sequence[SequenceSpec], *, chunk_tokens: int) -> list[list[Fragment]]:
    """Chunks of `chunk_tokens` tokens, the last of at most that; a chunk holds a fragment of each sequence in it.

    >>> from rayfcp.values import SequenceSpec
    >>> both = [SequenceSpec(id=at, num_tokens=tokens, num_targets=tokens) for at, tokens in enumerate((5, 4))]
    >>> cut_chunks(both, chunk_tokens=3)
    [[(0, 0, 3)], [(0, 3, 5), (1, 0, 1)], [(1, 1, 4)]]
    """
    chunks: list[list[Fragment]] = [[]]
    left = chunk_tokens
    for sequence in sequences:
        start = 0
        while start < sequence.num_tokens:
            if left == 0:
                chunks.append([])
                left = chunk_tokens
            stop = min(start + left, sequence.num_tokens)
            chunks[-1].append((sequence.id, start, stop))
            left -= stop - start
            start = stop
    return chunks


def blocks_of(chunks: Sequence[Sequence[Fragment]], ranks: Sequence[int]) -> list[Block]:
    """Blocks of chunk c on rank `ranks[c]`, in order; fragments of a sequence that touch on one rank are one block."""
    blocks: list[Block] = []
    for fragments, rank in zip(chunks, ranks, strict=True):
        for sequence, start, stop in fragments:
            last = blocks[-1] if blocks else None
            if last and (last.sequence, last.stop, last.rank) == (sequence, start, rank):
                blocks[-1] = Block(sequence=sequence, start=last.start, stop=stop, rank=rank)
            else:
                blocks.append(Block(sequence=sequence, start=start, stop=stop, rank=rank))
    return blocks


def dispatch(workloads: Sequence[float], *, num_buckets: int, max_jobs: int | None = None) -> list[int]:
    """The bucket of each job: the largest first, each to the bucket with the least work that is not full.

    `max_jobs` bounds the jobs of a bucket; with ceil(jobs / buckets), buckets hold about equal counts.
    Source: the min-heap dispatch of MagiAttention. No more than 4/3 of the optimum without `max_jobs` (Graham, 1969).

    >>> dispatch([2, 4, 3, 16, 13, 5, 9, 10], num_buckets=4)
    [2, 2, 1, 0, 1, 3, 3, 2]

    Raises:
        ValueError: the buckets cannot hold the jobs.
    """
    limit = len(workloads) if max_jobs is None else max_jobs
    if limit * num_buckets < len(workloads):
        raise ValueError(
            f"max_jobs is {limit}, {num_buckets} buckets hold {limit * num_buckets} jobs, must hold {len(workloads)}; "
            "allow more"
        )
    heap = [(0.0, bucket) for bucket in range(num_buckets)]
    left = [limit] * num_buckets
    owners = [0] * len(workloads)
    for job in sorted(range(len(workloads)), key=lambda job: (-workloads[job], job)):
        load, bucket = heappop(heap)
        owners[job] = bucket
        left[bucket] -= 1
        if left[bucket]:
            heappush(heap, (load + workloads[job], bucket))
    return owners


CHUNKS_PER_RANK = (8, 16, 4, 2, 1)
"""What is tried, the project's default first; 1 always fits, as ranks then hold ceil(tokens / N)."""

STAGES = (None, 2, 4, 8)
"""Numbers of stages that are tried; None: a stage for each other rank."""
BUFFERS = 2
"""Stages that a rank holds: the one that travels, and the one that is computed."""


def propose(
    sequences: Sequence[SequenceSpec],
    *,
    cluster: ClusterSpec,
    cost: CostModel,
    options: PlanConfig,  # noqa: ARG001
) -> Proposal:
    """One group of all ranks per microbatch, with the layout of its blocks."""
    batch = columns_of(sequences, cost=cost)
    by_id = {sequence.id: sequence for sequence in sequences}
    budget_tokens = cluster.num_ranks * cluster.max_tokens_per_rank
    packed = bins_of(best_fit_decreasing(batch.num_tokens, capacity_tokens=budget_tokens) or [])
    layouts = {}
    for members in packed:
        ids = tuple(sorted(batch.ids[at] for at in members))
        layouts[ids] = _fastest(ids, by_id=by_id, cluster=cluster, cost=cost)
    microbatches = in_order(layouts, by_id=by_id, cluster=cluster, cost=cost)
    return Proposal(microbatches=microbatches, reason="equal chunks on all ranks, balanced by attention area")


def _fastest(
    ids: tuple[int, ...], *, by_id: Mapping[int, SequenceSpec], cluster: ClusterSpec, cost: CostModel
) -> Layout:
    """The best chunk size and number of stages for the sequences of one microbatch; among equals those tried first."""
    num_tokens = sum(by_id[each].num_tokens for each in ids)
    found: list[tuple[float, Layout]] = []
    for per_rank in CHUNKS_PER_RANK:
        chunk_tokens = -(-num_tokens // (cluster.num_ranks * per_rank))
        if per_rank * chunk_tokens <= cluster.max_tokens_per_rank:
            layout = _laid_out([by_id[each] for each in ids], chunk_tokens=chunk_tokens, num_ranks=cluster.num_ranks)
            for each in _staged(layout):
                found.append((layout_s(each, by_id=by_id, cluster=cluster, cost=cost), each))
    return min(found, key=lambda each: each[0])[1]


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
    areas = [sum(by_id[each].block_pairs(start, stop) for each, start, stop in chunk) for chunk in chunks]
    ranks = dispatch(areas, num_buckets=num_ranks, max_jobs=-(-len(chunks) // num_ranks))
    return cast(blocks_of(chunks, ranks), num_ranks=num_ranks)


INFO = StrategyInfo(
    name="magi",
    propose=in_stages(propose),
    primitive=Primitive.RING,
    places_blocks=True,
    is_slow_in_stages=True,
)
