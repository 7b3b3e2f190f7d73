"""`auto` in a comparison: the best by prediction, simulated on the machine that is compared on."""

import time
from collections.abc import Sequence

from rayfcp.compare.lengths import Batch
from rayfcp.compare.measure import timeline_of
from rayfcp.compare.setting import Setting
from rayfcp.config.plan import PlanConfig
from rayfcp.plan.batch import plan_candidates
from rayfcp.program import ALL_PRIMITIVES, RankProgram, lower
from rayfcp.simulate.choosing import choose
from rayfcp.values import BatchPlan, HardwareProfile, ModelProfile


def plan_auto_timed(
    sequences: Batch, *, setting: Setting, options: PlanConfig, model: ModelProfile, hardware: HardwareProfile
) -> tuple[BatchPlan, float]:
    """The plan that `auto` takes, and the CPU seconds from sequences to plan, simulation included.

    Raises:
        InfeasiblePlanError: no strategy has a plan for this batch.
    """
    start_s = time.process_time()

    def lowered(plan: BatchPlan) -> tuple[RankProgram, ...]:
        return lower(plan, sequences, reduce_every=setting.reduce_every, primitives=ALL_PRIMITIVES)

    def seconds(programs: Sequence[RankProgram]) -> float:
        return timeline_of(programs, model=model, hardware=hardware, setting=setting).iteration_s

    plans = plan_candidates(sequences, cluster=setting.cluster, cost=setting.cost, options=options)
    plan = choose(plans, lowered=lowered, seconds=seconds).plan
    return plan, time.process_time() - start_s
