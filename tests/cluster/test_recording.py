"""Records of runs for their report, and the simulator's predictions with a run's own costs; without Ray."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from rayfcp.cluster.actors.planner import RunPlanner
from rayfcp.cluster.facts.devices import layers_of_stage
from rayfcp.cluster.facts.measured import analytic_cost
from rayfcp.cluster.jobs.reporting import Recorder
from rayfcp.cluster.runtime.on_ray import RayRuntime
from rayfcp.config import Config
from rayfcp.plan import model_profile, plan_batch
from rayfcp.program import lower
from rayfcp.telemetry.events import Event, EventKind, read_events
from rayfcp.telemetry.report import history_of
from rayfcp.telemetry.steps import StepLog
from rayfcp.values import ClusterSpec, SequenceSpec, SpanKind
from tests.telemetry.samples import report

MODEL = model_profile("qwen3-1.7b")
LENGTHS = (9000, 4000, 3000, 800, 700, 300, 200, 90)


def config(**cluster: Any) -> Config:
    return Config.model_validate(
        {
            "data": {"paths": ["x"], "max_seqlen": 8192},
            "model": {"name": "qwen3-1.7b", "dtype": "bfloat16"},
            "cluster": {"num_workers": 4} | cluster,
        }
    )


@pytest.mark.parametrize(
    ("strategy", "num_stages", "tensor_parallel"),
    [("flex-ring", 1, 1), ("static-cp", 1, 1), ("flex-block", 1, 1), ("flex-ring", 1, 2), ("elastic-pipeline", 2, 1)],
)
def test_the_simulator_foretells_about_what_the_plan_does(strategy: str, num_stages: int, tensor_parallel: int) -> None:
    given = config(pipeline_stages=num_stages, tensor_parallel=tensor_parallel)
    num_ranks = 4 // num_stages // tensor_parallel
    cluster = ClusterSpec(
        num_ranks=num_ranks,
        max_tokens_per_rank=9000,
        num_stages=num_stages,
        tensor_parallel=tensor_parallel,
        layers_of_stage=layers_of_stage(given, MODEL),
    )
    cost = analytic_cost(given, MODEL, device="cuda", cluster=cluster, memory_bytes=80 << 30)
    sequences = [SequenceSpec(id=at, num_tokens=n, num_targets=n - 1) for at, n in enumerate(LENGTHS)]
    plan = plan_batch(sequences, cluster=cluster, cost=cost, strategy=strategy)
    programs = lower(plan, sequences)
    timeline = RunPlanner(given, MODEL, device="cuda").simulate(programs, cluster=cluster, cost=cost)
    assert 0.6 < timeline.iteration_s / plan.predicted_s < 1.6
    passes = [span for span in timeline.spans if span.kind in (SpanKind.FORWARD, SpanKind.BACKWARD)]
    assert {(span.stage, span.rank) for span in passes} == {
        (stage, rank) for stage in range(num_stages) for rank in range(num_ranks)
    }


def start(at_s: float) -> Event:
    return Event(kind=EventKind.START, step=0, at_s=at_s, devices=2, seconds=5.0)


def test_a_start_that_was_killed_ends_with_its_last_step(tmp_path: Path) -> None:
    began_s = time.time() - 1000.0
    first = Recorder(tmp_path, runtime=RayRuntime(), trace_steps=1, resume_step=0)
    first.add_event(start(began_s))
    with StepLog(tmp_path / "steps.jsonl") as log:
        log.append(report(1))
    os.utime(tmp_path / "steps.jsonl", (began_s + 100.0, began_s + 100.0))
    second = Recorder(tmp_path, runtime=RayRuntime(), trace_steps=1, resume_step=1)
    second.add_event(start(began_s + 500.0))
    second.close()
    told = read_events(tmp_path / "events.jsonl")
    assert [event.kind for event in told] == [EventKind.START, EventKind.END, EventKind.START, EventKind.END]
    assert told[1].at_s == pytest.approx(began_s + 100.0) and "resuming from step 1" in told[1].reason
    wall_s = history_of(told, [report(1)], last_write_s=began_s + 100.0).wall_s
    assert wall_s == pytest.approx(105.0 + 5.0 + told[3].at_s - told[2].at_s)
    again = Recorder(tmp_path, runtime=RayRuntime(), trace_steps=1, resume_step=0)
    again.add_event(start(began_s))
    assert len(read_events(tmp_path / "events.jsonl")) == 1, "a run from its beginning forgets what was there"
