"""Megatron-LM's dynamic (hybrid) context parallelism: degrees that are powers of two, per sample, greedily.

Source: Megatron-LM, `BalancedCPScheduler` (core/pipeline_parallel/hybrid_cp_schedule.py), the first schedule, and
`next_hdp_group_packing_aware` (core/datasets/data_schedule_utils.py), its successor, as the public code has them.
Sequences are walked longest first; each needs the next power of two of ceil(length / `max_seqlen_per_dp_cp_rank`)
ranks; work is length^2 / degree; one microbatch after the other is filled until its ranks are balanced or
full (`rivals.balanced`, `rivals.packed`), and groups grow until no rank idles. Groups are rings.

Tuned as its users would: both schedules, and several `max_seqlen_per_dp_cp_rank` up to what memory holds;
the fastest counts. Silent, and chosen: groups of the first schedule run their samples one by one there; here they
are packed into the microbatch within memory, as its successor does.

On N that is no power of two: the successor's degrees are the powers of two that divide N, and N. The first
schedule doubles a group beyond the ranks that are left, and fails (IndexError at N = 10, 14, 18, ...): its degrees
here are the powers of two below N, and N; a group grows only where its next degree fits, else ranks idle.
"""

from collections.abc import Callable, Iterator, Sequence

from rayfcp.config.plan import PlanConfig
from rayfcp.plan.assembly import Draft, assemble
from rayfcp.plan.costs.model import CostModel
from rayfcp.plan.microbatches import Columns, columns_of
from rayfcp.plan.primitives import require
from rayfcp.plan.rivals.balanced import balanced
from rayfcp.plan.rivals.opened import Opened, powers_of_two
from rayfcp.plan.rivals.packed import packed
from rayfcp.plan.strategies.interface import Proposal
from rayfcp.values import ClusterSpec, MicrobatchPlan, Primitive, SequenceSpec

LIMITS = (1.0, 0.75, 0.5, 0.375, 0.25, 0.125)
"""Shares of a rank's memory that are tried as `max_seqlen_per_dp_cp_rank`."""

Schedule = Callable[..., list[int]]


def propose(
    sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> Proposal:
    """The fastest of both schedules and of all limits.

    Raises:
        InfeasiblePlanError: rings are not allowed.
    """
    require(Primitive.RING, options=options, strategy="dynamic-cp")
    batch = columns_of(sequences, cost=cost)
    best: tuple[float, int, tuple[MicrobatchPlan, ...]] | None = None
    for limit, drafts in _candidates(batch, cluster=cluster):
        microbatches = assemble(drafts, batch=batch, cluster=cluster, cost=cost)
        seconds = sum(microbatch.predicted_s for microbatch in microbatches)
        if best is None or seconds < best[0]:
            best = seconds, limit, microbatches
    assert best is not None
    return Proposal(
        microbatches=best[2], reason=f"a rank for every {best[1]} tokens of a sequence, rounded up to powers of two"
    )


def _candidates(batch: Columns, *, cluster: ClusterSpec) -> Iterator[tuple[int, list[list[Draft]]]]:
    num_ranks = cluster.num_ranks
    powers = powers_of_two(num_ranks)
    schedules: tuple[tuple[Schedule, set[int]], ...] = (
        (balanced, {*powers, num_ranks}),
        (packed, {*(each for each in powers if num_ranks % each == 0), num_ranks}),
    )
    limits = dict.fromkeys(max(int(share * cluster.max_tokens_per_rank), 1) for share in LIMITS)
    for limit in limits:
        for schedule, sizes in schedules:
            yield limit, _microbatches(batch, schedule, sizes=sorted(sizes), limit_tokens=limit)


def _microbatches(batch: Columns, schedule: Schedule, *, sizes: Sequence[int], limit_tokens: int) -> list[list[Draft]]:
    left = list(range(len(batch.ids)))
    drafts = []
    while left:
        opened = Opened(batch.num_tokens, sizes=sizes, limit_tokens=limit_tokens)
        left = schedule(left, opened=opened)
        drafts.append([Draft(members=tuple(group.members), degree=group.degree) for group in opened.groups])
    return drafts
