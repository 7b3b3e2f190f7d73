"""FCP with blocks (Zhao et al., 2026): blocks of sequences anywhere on all ranks, rounds without congestion.

Ours: sequences are shared out so that every rank has equal tokens and equal (query, key) pairs with the fewest
cuts, instead of blocks of one size by longest processing time first, which `placement: lpt` still is; messages
between two ranks join small blocks; rounds come in the best of several orders by pacing over several buffers.
The paper leaves microbatches open: as few as memory permits, each on all ranks.
"""

from collections.abc import Iterable, Sequence

from rayfcp.config.models import BlockOptions, PlanConfig
from rayfcp.cost.layout import in_order
from rayfcp.cost.model import CostModel, speeds_of
from rayfcp.plan.strategies.registry import Proposal, StrategyInfo
from rayfcp.plan.strategies.stages import in_stages
from rayfcp.values import ClusterSpec, Primitive, SequenceSpec


def propose(
    sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> Proposal:
    """One group of all ranks per microbatch, with the layout of its blocks; the longest microbatch comes last."""
    allowed = tuple(Primitive(name) for name in options.primitives)
    return propose_blocks(sequences, cluster=cluster, cost=cost, options=options.blocks, allowed=allowed)


def propose_blocks(
    sequences: Sequence[SequenceSpec],
    *,
    cluster: ClusterSpec,
    cost: CostModel,
    options: BlockOptions,
    allowed: Iterable[Primitive] = (Primitive.RING,),
) -> Proposal:
    """`propose` with the block planner's own options. Where ranks are not as fast, microbatches are also tried in which
    the fastest has memory for its part: they are more, but fast ranks that are full leave too much to slow ones."""
    speeds, most, heads = speeds_of(cluster), cluster.max_tokens_per_rank, options.heads or 1
    most = int(cost.room(most, degree=heads, primitive=Primitive.ULYSSES)) // heads
    longest = max(sequence.num_tokens for sequence in sequences)
    in_parts = max(int(most * speeds.sum() / speeds.max()), longest)
    found = [
        _of_budget(sequences, room, cluster=cluster, cost=cost, options=options, allowed=allowed)
        for room in dict.fromkeys((cluster.num_ranks * most, min(in_parts, cluster.num_ranks * most)))
    ]
    return min(found, key=lambda proposal: sum(each.predicted_s for each in proposal.microbatches))


def _of_budget(
    sequences: Sequence[SequenceSpec],
    room: int,
    *,
    cluster: ClusterSpec,
    cost: CostModel,
    options: BlockOptions,
    allowed: Iterable[Primitive],
) -> Proposal:
    """Microbatches of at most `room` tokens, on all ranks."""
    from rayfcp.plan.blocks.planner import batch_of, microbatches_of, plan_blocks

    batch, by_id = batch_of(sequences), {sequence.id: sequence for sequence in sequences}
    layouts, sizes = {}, set()
    for members in microbatches_of(batch, max_tokens=room):
        found = plan_blocks(batch.pool(members), cluster=cluster, cost=cost, options=options, allowed=allowed)
        ids = batch.ids[members]
        layouts[tuple(sorted(ids.tolist()))] = found.layout(ids)
        sizes.add(found.block_tokens)
    microbatches = in_order(layouts, by_id=by_id, cluster=cluster, cost=cost)
    return Proposal(
        microbatches=microbatches, reason=f"blocks of about {min(sizes)} tokens anywhere, rounds without congestion"
    )


INFO = StrategyInfo(
    name="flex-block",
    propose=in_stages(propose, recompute="adaptive", patience=1),
    primitive=Primitive.RING,
    is_baseline=False,
    places_blocks=True,
    spreads_images=True,
)
