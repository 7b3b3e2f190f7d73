"""InfiniPipe (Wang et al., 2025): split, batched and hybrid chunks through 1F1B pipelines, recomputed as memory asks.

Ours, beyond the paper: the window of chunks in flight shrinks as sequences get shorter, so that one pipeline
recomputes little where the paper needs several; stages run further ahead of each other where memory has room, which
hides transfers and uneven chunks; buckets may hold more tokens than slices; the first and the last chunks taper off,
so that pipelines fill and drain faster; and candidates are replayed exactly. Within a stage all ranks share each
chunk, by the faster of the primitives that are allowed (the paper: Ulysses).
"""

from collections.abc import Sequence

from rayfcp.config.models import PlanConfig
from rayfcp.cost.model import CostModel, slowed, speeds_of
from rayfcp.plan.strategies.registry import Proposal, StrategyInfo
from rayfcp.plan.strategies.stages import check_stages
from rayfcp.values import ClusterSpec, SequenceSpec


def propose(
    sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> Proposal:
    """The fastest plan found with `options.pipeline`. Chunks pass through all ranks of a stage, so that a slow rank
    slows every one of them: seconds are those of the slowest rank, work cannot be balanced.

    Raises:
        InfeasiblePlanError: memory permits no plan.
    """
    from rayfcp.plan.pipeline.planner import plan_pipelines

    check_stages(cost, num_stages=cluster.num_stages)
    priced = slowed(cost, speed=float(speeds_of(cluster).min()))
    return plan_pipelines(sequences, cluster=cluster, cost=priced, options=options)


INFO = StrategyInfo(
    name="elastic-pipeline",
    propose=propose,
    is_baseline=False,
    needs_stages=True,
    slices_sequences=True,
    spreads_images=True,
)
