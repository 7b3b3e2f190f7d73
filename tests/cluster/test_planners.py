"""Planners die at any time: another plans again what they had in hand, and no loss is another for it."""

import os
import signal
from pathlib import Path

import pytest
import ray

from rayfcp.cluster import FlexTrainer
from rayfcp.cluster.facts import CannotGoOnError
from rayfcp.cluster.planners import MAX_DEATHS, Planners, PlanQueue
from rayfcp.data import LengthIndex, Sampler
from rayfcp.data.prepare import prepare_local
from rayfcp.models.describe import model_config, profile_of
from rayfcp.values import ClusterSpec, StepReport
from tests.cluster.processes import descendants
from tests.cluster.runs import run_config, steps_of, write_texts
from tests.cluster.test_cli_runs import wait_until
from tests.plan.helpers import UNIT

pytestmark = pytest.mark.usefixtures("ray_cluster")


class KillPlanner:
    """SIGKILL of a planner's process at each of some steps."""

    def __init__(self, *steps: int) -> None:
        self._steps = steps
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def update(self, report: StepReport) -> None:
        if report.step in self._steps:
            for planner in descendants("ray::Planner"):  # one, and those that earlier tests have just ended
                os.kill(planner, signal.SIGKILL)


def test_a_run_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    write_texts(tmp_path)
    steps = {"train": {"steps": 40}, "plan": {"refit": False}, "cluster": {"num_workers": 1}}
    want = run_config(tmp_path, name="undisturbed", **steps)
    FlexTrainer(want).fit()
    disturbed = run_config(tmp_path, name="disturbed", **steps)
    killer = KillPlanner(1, 20)
    FlexTrainer(disturbed).fit(watcher=killer)
    assert sum("died; a new one plans again" in line for line in killer.lines) == 2, killer.lines
    assert [(report.step, report.samples_hash, report.loss) for report in steps_of(disturbed)] == [
        (report.step, report.samples_hash, report.loss) for report in steps_of(want)
    ]
    assert wait_until(lambda: descendants("ray::Planner") == [], seconds=30)


def test_plans_stay_in_order_and_deaths_without_a_plan_in_between_are_counted(tmp_path: Path) -> None:
    write_texts(tmp_path)
    config = run_config(tmp_path, name="queue", plan={"planner_actors": 2, "lookahead_steps": 4})
    prepare_local(config.data, out_dir=str(tmp_path / "shards"))
    index = LengthIndex.open(
        str(tmp_path / "shards"), max_seqlen=256, long_sequences="cut", vocab_size=None, max_bad_fraction=0.1
    )
    sampler = Sampler(index, seed=0, global_batch=6)
    model = profile_of(model_config(config.model, vocab_size=257), name="tiny")
    said: list[str] = []
    planners = Planners(config, model, device="cpu", say=said.append)
    planners.await_ready()
    try:
        queue = PlanQueue(planners, sampler, lookahead=4)
        queue.start(1, 9, cluster=ClusterSpec(num_ranks=2, max_tokens_per_rank=512), cost=UNIT)
        for step in range(1, 10):
            if step in (2, 5):
                for planner in descendants("ray::Planner"):
                    os.kill(planner, signal.SIGKILL)
            taken = queue.take()
            assert taken.batch.step == taken.record.step == step
            assert {program.plan_hash for program in ray.get(list(taken.programs))} == {taken.record.plan_hash}
            queue.refill()
        assert 2 <= len(said) <= 4
        for _ in range(MAX_DEATHS):
            planners.replace(0, cause="made up")
        with pytest.raises(CannotGoOnError, match="4 planners died one after the other, at most 3 may: made up"):
            planners.replace(0, cause="made up")
    finally:
        planners.end()
