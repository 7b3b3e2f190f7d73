"""One batch, planned from its lengths and the names of a model and a machine."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from rayfcp.compare.arguments import Inputs
from rayfcp.compare.comparison import given_layout
from rayfcp.compare.layouts import best_setting, plan_chosen_timed
from rayfcp.compare.lengths import Batch
from rayfcp.compare.planning import OPTIONS
from rayfcp.config.models import PlanConfig
from rayfcp.plan import CostModel
from rayfcp.values import BatchPlan, ClusterSpec, token_counts


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBatch(BatchPlan):
    """A plan with its inputs, as `lower`, `check_plan` and `simulate` take them."""

    sequences: Batch
    cluster: ClusterSpec
    cost: CostModel

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.strategy}: {len(self.sequences)} sequences on {self.num_ranks} ranks in "
            f"{len(self.microbatches)} microbatches, predicted {self.predicted_s:.4g} s, gap {self.gap:.3f}>"
        )


def plan_lengths(
    lengths: Sequence[int],
    *,
    model: str,
    hardware: str,
    ranks: int,
    stages: int = 1,
    strategy: str = "flex-ring",
    memory_gib: float | None = None,
    keep_attention: bool = False,
    options: PlanConfig = OPTIONS,
) -> PlannedBatch:
    """Plan one batch of causal sequences, given by their lengths, with the setting and the plan of the strategy that a
    comparison of this batch alone takes.

    `model`, `hardware`: names of profiles or YAML paths; `memory_gib`: per device, the hardware's if absent. Each rank
    has one device per stage. `keep_attention`: recomputed layers may keep their attention.

    Raises:
        InfeasiblePlanError: No setting has a plan for these lengths.
        ValueError: An unknown name, or no lengths.
    """
    lengths = token_counts(lengths)
    if not lengths:
        raise ValueError("lengths has 0 entries, must have at least 1; give the tokens of each sequence")
    inputs = Inputs(
        lengths="",
        rows=lengths,
        model=model,
        hardware=hardware,
        devices=ranks * stages,
        stages=stages,
        global_batch=len(lengths),
        batches=1,
        max_seqlen=max(lengths),
        memory_gib=memory_gib,
        keep_attention=keep_attention,
        strategies=(strategy,),
    )
    candidate = given_layout(inputs, options=options)
    setting, (sequences,) = best_setting(strategy, candidate), candidate.case.batches
    plan, _, _ = plan_chosen_timed(sequences, strategy=strategy, setting=setting, options=options)
    values = {field.name: getattr(plan, field.name) for field in fields(plan)}
    return PlannedBatch(**values, sequences=sequences, cluster=setting.cluster, cost=setting.cost)
