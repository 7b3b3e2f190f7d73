"""Whatever a planner makes for stages is proved, bytes of all devices included."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.config.models import PlanConfig
from rayfcp.plan import CostModel, hardware_profile, model_profile, plan_batch
from rayfcp.values import ClusterSpec, InfeasiblePlanError, Primitive
from rayfcp.verify import check_plan
from tests.examples import examples
from tests.masks import specs

GIB = 1 << 30


def cost_of(*, num_ranks: int, num_stages: int, spare_gib: float, every: str) -> CostModel:
    """Devices with so much memory beside the states of the fullest stage."""
    given = {"num_ranks": num_ranks, "num_stages": num_stages, "reduce_every": every, "gather_every": every}
    model, hardware = model_profile("qwen3-4b"), hardware_profile("a800")

    def with_memory(memory_bytes: int) -> CostModel:
        return CostModel.from_profiles(model, hardware, bytes_per_element=2, memory_bytes=memory_bytes, **given)  # type: ignore[arg-type]

    roomy = with_memory(1000 * GIB).pipeline
    assert roomy is not None
    return with_memory(1000 * GIB - min(roomy.budget_bytes) + int(spare_gib * GIB))


@pytest.mark.parametrize("strategy", ["elastic-pipeline", "seq1f1b", "dapple", "flex-ring"])
@examples(5)
@given(
    seed=st.integers(0, 10_000),
    num_stages=st.integers(2, 4),
    num_ranks=st.sampled_from([1, 2, 4]),
    primitive=st.sampled_from(Primitive),
    spare_gib=st.sampled_from([0.3, 2.0, 40.0]),
    every=st.sampled_from(["microbatch", "step"]),
)
def test_plans_are_proved(
    strategy: str, seed: int, num_stages: int, num_ranks: int, primitive: Primitive, spare_gib: float, every: str
) -> None:
    rng = random.Random(seed)
    sequences = specs([min(50_000, 1 + int(rng.lognormvariate(7, 1.3))) for _ in range(rng.randrange(1, 12))])
    cost = cost_of(num_ranks=num_ranks, num_stages=num_stages, spare_gib=spare_gib, every=every)
    cluster = ClusterSpec(num_ranks=num_ranks, num_stages=num_stages, max_tokens_per_rank=1 << 30)
    options = PlanConfig(primitives=(primitive.value,), search_moves=100)
    try:
        plan = plan_batch(sequences, cluster=cluster, cost=cost, strategy=strategy, options=options)
    except InfeasiblePlanError:
        assert spare_gib < 40.0 or primitive is Primitive.ULYSSES
        return
    assert plan.num_stages == num_stages
    check_plan(plan, sequences, cluster=cluster, cost=cost)
