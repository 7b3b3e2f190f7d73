"""Plans of pipelines are proved, lowered and run, and give the loss and gradients of a single process."""

import pytest

from rayfcp.config.models import PlanConfig
from rayfcp.cost.memory import stage_state_bytes
from rayfcp.models.describe import model_config, profile_of
from rayfcp.plan import CostModel, hardware_profile, plan_batch
from rayfcp.program import Forward
from rayfcp.simulate.simulate import simulate
from rayfcp.values import BatchPlan, ClusterSpec, ModelProfile, SequenceSpec
from rayfcp.verify import check_plan
from tests.execute.cases import VOCAB, assert_same
from tests.execute.staged import StagedCase, expected, run_in_process

LAYERS, NUM_RANKS = (2, 2), 2
LENGTHS = (400, 120, 33, 17, 60, 5, 200, 90)
SEQUENCES = tuple(SequenceSpec(id=at, num_tokens=n, num_targets=n - 1) for at, n in enumerate(LENGTHS))


def planned(strategy: str, *, budget_bytes: int) -> BatchPlan:
    """Plan for two stages of two ranks with that many bytes besides the states of the fuller stage."""
    sizes = {"num_ranks": NUM_RANKS, "bytes_per_element": 8, "reduce_every": "step", "layers_of_stage": LAYERS}
    states = [stage_state_bytes(profile(), stage=stage, gather_every="microbatch", **sizes) for stage in (0, 1)]
    memory_bytes = max(states) + budget_bytes
    cost = CostModel.from_profiles(
        profile(), hardware_profile("cpu"), num_stages=len(LAYERS), memory_bytes=memory_bytes, **sizes
    )
    cluster = ClusterSpec(num_ranks=NUM_RANKS, max_tokens_per_rank=300, num_stages=len(LAYERS), layers_of_stage=LAYERS)
    options = PlanConfig(primitives=("ring", "ulysses"))
    plan = plan_batch(SEQUENCES, cluster=cluster, cost=cost, strategy=strategy, options=options)
    check_plan(plan, SEQUENCES, cluster=cluster)
    return plan


@pytest.mark.parametrize(
    ("strategy", "budget_bytes"),
    [
        ("elastic-pipeline", 1_500_000),
        ("seq1f1b", 1_500_000),
        ("elastic-pipeline", 6_000_000),
        ("dapple", 6_000_000),
        ("flex-ring", 6_000_000),
        ("flex-block", 6_000_000),
    ],
)
def test_planned_and_run(strategy: str, budget_bytes: int) -> None:
    """With little memory long sequences come in slices, and layers are recomputed. Each device sends the bytes and
    computes the pairs that the simulator says."""
    plan = planned(strategy, budget_bytes=budget_bytes)
    is_tight = budget_bytes < 2_000_000
    assert any(each.slices for each in plan.microbatches) == is_tight
    assert not is_tight or any(any(map(any, each.recomputed_layers)) for each in plan.pipelines)
    case = StagedCase(plan=plan, sequences=SEQUENCES, layers_of_stage=LAYERS, is_tied=is_tight)
    loss, gradients, executions = run_in_process(case, "float64")
    assert_same(loss, gradients, want=expected(case, "float64"), dtype="float64", what=(strategy,))
    sizes = {"bytes_per_element": 8, "layers_of_stage": LAYERS}
    timeline = simulate(case.programs, model=profile(), hardware=hardware_profile("cpu"), **sizes)
    assert [each.bytes_sent for each in executions] == pytest.approx(timeline.sent_bytes)
    for program, execution in zip(case.programs, executions, strict=True):
        forwards = [item for item in program.instructions if isinstance(item, Forward)]
        pairs = [(2 * LAYERS[program.stage] + item.recomputed_layers) * item.attention.num_pairs for item in forwards]
        assert execution.num_pairs == pytest.approx(sum(pairs))


def profile() -> ModelProfile:
    shape = StagedCase(plan=None, sequences=SEQUENCES, layers_of_stage=LAYERS, is_tied=False).run
    return profile_of(model_config(shape, vocab_size=VOCAB), name="tiny")
