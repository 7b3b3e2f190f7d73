"""Seq1F1B (Sun et al., 2024): sequences in slices of equal tokens through one 1F1B pipeline.

The paper cuts all sequences, of one length, into the same number of slices. As InfiniPipe (section 5.1) makes it
comparable: sequences of many lengths are split and packed into chunks of a fixed number of tokens, and all stages
recompute the same number of layers of every chunk, the least with which the longest sequence fits. The slice length is
tuned for each batch, which is more than either paper does.
"""

from collections.abc import Sequence

from rayfcp.config.models import PlanConfig
from rayfcp.cost.model import CostModel
from rayfcp.plan.strategies.elastic_pipeline import propose as propose_pipelines
from rayfcp.plan.strategies.registry import Proposal, StrategyInfo
from rayfcp.values import ClusterSpec, SequenceSpec


def propose(
    sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
) -> Proposal:
    """The fastest plan found among lengths of slices.

    Raises:
        InfeasiblePlanError: memory permits no plan.
    """
    fixed = options.pipeline.model_copy(
        update={"chunking": "fixed", "recompute": "uniform", "order": "1f1b", "pipelines": 1}
    )
    options = options.model_copy(update={"pipeline": fixed})
    return propose_pipelines(sequences, cluster=cluster, cost=cost, options=options)


INFO = StrategyInfo(name="seq1f1b", propose=propose, needs_stages=True, slices_sequences=True)
