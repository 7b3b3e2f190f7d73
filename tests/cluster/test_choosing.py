"""A planner's `auto`, with and without stages: programs are those of the plan that it names."""

import pytest

from rayfcp.cluster.actors.planner import Planner, PlanRecord, RunPlanner, sequences_of
from rayfcp.cluster.facts.measured import analytic_cost
from rayfcp.config import Config
from rayfcp.program import Programs
from rayfcp.values import ClusterSpec, GlobalBatch, Sample
from tests.simulate.helpers import MODEL

LENGTHS = (3000, 900, 400, 200, 60, 30)
BATCH = GlobalBatch(
    step=1,
    epoch=0,
    samples=tuple(
        Sample(id=at, shard=0, row=at, start=0, stop=each, num_targets=each - 1) for at, each in enumerate(LENGTHS)
    ),
)


def config(strategy: str) -> Config:
    return Config.model_validate({"data": {"paths": ["unused"]}, "plan": {"strategy": strategy, "search_moves": 5000}})


@pytest.mark.parametrize("num_stages", [1, 2])
def test_the_record_names_what_was_taken_and_why(num_stages: int) -> None:
    cluster = ClusterSpec(num_ranks=2, num_stages=num_stages, max_tokens_per_rank=2048)
    given = config("auto")
    cost = analytic_cost(given, MODEL, device="cpu", cluster=cluster, memory_bytes=1 << 32)
    planner = Planner(given, MODEL, device="cpu")
    programs, record = planner.plan(BATCH, cluster, cost=cost)
    assert isinstance(record, PlanRecord) and record.strategy != "auto"
    assert record.reason.startswith(f"Auto took {record.strategy} (simulated ")
    assert isinstance(programs, Programs) and len(programs) == 2 * num_stages
    assert record.prepare_s > record.plan_s > 0
    assert {each.plan_hash for each in programs} == {programs.plan_hash} == {record.plan_hash}
    _, again = planner.plan(BATCH, cluster, cost=cost)
    assert isinstance(again, PlanRecord) and again.plan_hash == record.plan_hash
    spans = planner.simulate_step(programs, cluster=cluster, cost=cost)
    best = Planner(config(record.strategy), MODEL, device="cpu") if record.strategy != "mixed" else planner
    _, single = best.plan(BATCH, cluster, cost=cost)
    assert isinstance(single, PlanRecord) and single.predicted_s == record.predicted_s
    assert max(span.stop_s for span in spans) > 0


@pytest.mark.parametrize("strategy", ["auto", "ring"])
def test_what_is_shown_before_and_after_a_run_is_what_its_planner_takes(strategy: str) -> None:
    cluster, given = ClusterSpec(num_ranks=2, max_tokens_per_rank=2048), config(strategy)
    cost = analytic_cost(given, MODEL, device="cpu", cluster=cluster)
    _, record = Planner(given, MODEL, device="cpu").plan(BATCH, cluster, cost=cost)
    shown, _ = RunPlanner(given, MODEL, device="cpu").plan(sequences_of(BATCH), cluster=cluster, cost=cost)
    assert isinstance(record, PlanRecord) and shown.plan_hash == record.plan_hash
