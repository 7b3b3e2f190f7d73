"""Planners plan evaluation by every kind of strategy, and count on the memory that it leaves."""

from pathlib import Path

import pytest

from rayfcp.cluster.actors.planner import Planner, PlanRecord
from rayfcp.cluster.facts.capacity import cluster_spec
from rayfcp.cluster.facts.devices import DeviceFacts
from rayfcp.cluster.facts.measured import analytic_cost
from rayfcp.config import Config
from rayfcp.plan import model_profile
from rayfcp.program import Programs
from rayfcp.values import GlobalBatch, Sample
from tests.cluster.runs import run_config

MODEL = model_profile("qwen3-1.7b")
BATCH = GlobalBatch(
    step=3,
    epoch=0,
    samples=tuple(
        Sample(id=each, shard=0, row=each, start=0, stop=length, num_targets=length - 1)
        for each, length in enumerate((3000, 200, 900, 64, 1500, 40))
    ),
)


def planned(config: Config, *, forward_only: bool) -> tuple[Programs, PlanRecord]:
    facts = [DeviceFacts(node_id="a", device="cpu", memory_bytes=1 << 40, peak_flops=None)] * config.cluster.max_workers
    cluster = cluster_spec(config, MODEL, facts=facts, generation=5)
    cost = analytic_cost(config, MODEL, device="cpu", cluster=cluster, memory_bytes=1 << 38)
    programs, record = Planner(config, MODEL, device="cpu").plan(BATCH, cluster, cost=cost, forward_only=forward_only)
    assert isinstance(programs, Programs) and isinstance(record, PlanRecord)
    return programs, record


@pytest.mark.parametrize(
    ("strategy", "stages"),
    [("flex-ring", 1), ("flex-block", 1), ("auto", 1), ("static-cp", 1), ("elastic-pipeline", 2), ("flex-ring", 2)],
)
def test_programs_are_forward_only_and_predicted_as_such(tmp_path: Path, strategy: str, stages: int) -> None:
    config = run_config(
        tmp_path,
        name="planned",
        cluster={"num_workers": 4, "pipeline_stages": stages},
        plan={"strategy": strategy, "search_moves": 500},
        data={"max_seqlen": 4096},
        eval={"sets": {"val": {"paths": "none"}}},
    )
    (forward, record), (trained, training) = (planned(config, forward_only=only) for only in (True, False))
    assert forward.forward_only and not trained.forward_only
    assert forward.num_stages == stages and (record.step, record.generation) == (3, 5)
    assert 0 < record.predicted_s < 0.7 * training.predicted_s
    assert record.model_flops == pytest.approx(training.model_flops / 3)
    assert record.plan_hash == forward.plan_hash


def test_ranks_hold_more_tokens_in_evaluation_if_there_is_one(tmp_path: Path) -> None:
    facts = [DeviceFacts(node_id="a", device="cpu", memory_bytes=1 << 36, peak_flops=None)] * 2
    config = run_config(tmp_path, name="held", cluster={"num_workers": 2})
    with_sets = config.changed(eval={"sets": {"val": {"paths": "none"}}})
    for each, more in ((config, False), (with_sets, True), (with_sets.changed(cluster={"pipeline_stages": 2}), False)):
        cluster = cluster_spec(each, MODEL, facts=facts, generation=0)
        assert (cluster.forward_tokens_per_rank > cluster.max_tokens_per_rank) == more
        assert cluster.forward_only().max_tokens_per_rank >= cluster.max_tokens_per_rank
