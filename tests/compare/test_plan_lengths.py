"""`rayfcp.plan_lengths`: a plan from lengths and two names."""

import math
from typing import Any

import pytest

import rayfcp
from rayfcp.compare.arguments import Inputs
from rayfcp.compare.comparison import given_layout
from rayfcp.compare.layouts import LayoutCandidate, LayoutSearch, Trial, best_setting, plan_chosen_timed
from rayfcp.compare.lengths import lengths_of
from rayfcp.compare.planning import OPTIONS
from rayfcp.compare.results import BYTES_PER_TRANSFER, _transfers, timeline_of
from rayfcp.compare.settings import Setting
from rayfcp.plan.batch import plan_candidates
from rayfcp.program import Programs
from rayfcp.values import BatchPlan, InfeasiblePlanError


def test_one_call_gives_a_plan_that_other_calls_take() -> None:
    plan = rayfcp.plan_lengths([60_000, 9_000, 9_000, 500], model="qwen3-8b", hardware="h100", ranks=8)
    assert isinstance(plan, BatchPlan) and plan.num_ranks == 8 and plan.gap >= 1
    assert [each.num_tokens for each in plan.sequences] == [60_000, 9_000, 9_000, 500]
    rayfcp.check_plan(plan, plan.sequences, cluster=plan.cluster, cost=plan.cost)
    assert len(rayfcp.lower(plan, plan.sequences)) == 8


def test_what_cannot_be_planned_says_why() -> None:
    with pytest.raises(InfeasiblePlanError, match="GiB"):
        rayfcp.plan_lengths([1000], model="qwen3-8b", hardware="h100", ranks=1, memory_gib=10)
    with pytest.raises(ValueError, match="lengths has 0 entries"):
        rayfcp.plan_lengths([], model="qwen3-8b", hardware="h100", ranks=8)
    with pytest.raises(ValueError, match="qwen3-8b"):
        rayfcp.plan_lengths([1000], model="qwen3-8", hardware="h100", ranks=8)


def candidate(**changes: Any) -> LayoutCandidate:
    given = {"model": "gpt-30b", "hardware": "h100", "devices": 16, "global_batch": 24, "batches": 1}
    given |= {"lengths": "dist:commoncrawl", "max_seqlen": 65_536, **changes}
    return given_layout(Inputs(**given), options=OPTIONS)


def simulated(found: LayoutCandidate, setting: Setting, *, strategy: str = "flex-ring") -> Trial:
    return found.simulated(strategy, setting, log=lambda _: None, check=False)


@pytest.mark.parametrize("favoured", range(3))
def test_the_fastest_simulated_setting_is_taken(monkeypatch: pytest.MonkeyPatch, favoured: int) -> None:
    """Predictions that favour another setting by less than the margin change nothing."""
    found = candidate()
    settings = found.settings
    trials = [simulated(found, each) for each in settings]
    best, second = sorted(trials, key=lambda each: each.iteration_s)[:2]

    def predicted(self: LayoutCandidate, strategy: str, setting: Setting, **_: Any) -> float:
        return 0.65 if setting == settings[favoured] else 0.7

    monkeypatch.setattr(LayoutCandidate, "_predict", predicted)
    plan = rayfcp.plan_lengths(lengths_of(found.case.batches), model="gpt-30b", hardware="h100", ranks=16)
    assert len(settings) == 3 and second.iteration_s > 1.01 * best.iteration_s
    assert best.setting is not None and plan.cost == best.setting.cost
    assert best.scene is not None and plan.microbatches == best.scene.plan.microbatches


def test_a_comparison_takes_the_same_setting() -> None:
    """It has the least simulated mean of several batches."""
    found = candidate(batches=3)
    (trial,) = LayoutSearch("static-cp", [found], log=lambda _: None, check=False).run()
    assert trial.setting == best_setting("static-cp", found)
    trials = [simulated(found, each, strategy="static-cp") for each in found.settings_for("static-cp")]
    assert trial.iteration_s == min(each.iteration_s for each in trials)


def test_predictions_decide_without_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of finalists that take too much memory to simulate, and of a single finalist, none is simulated."""
    monkeypatch.setattr("rayfcp.compare.results.MOST_BYTES", -1)
    found = candidate()
    least = found.predictions("flex-ring", limit_s=math.inf)[0][1]
    assert best_setting("flex-ring", found) == least
    monkeypatch.setattr(LayoutCandidate, "simulated", None)
    assert best_setting("flex-ring", candidate(recompute_layers=60)).recomputed_layers == 60


def test_plans_too_large_to_simulate_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan with the least prediction is returned if it is one of them."""
    simulated_plans: list[str] = []

    def timeline(programs: Programs, *, setting: Setting) -> Any:
        simulated_plans.append(programs.plan_hash)
        return timeline_of(programs, setting=setting)

    found = candidate(model="qwen3-1.7b", max_seqlen=4096, global_batch=16, recompute_layers=0)
    setting, (batch,) = found.settings[0], found.case.batches
    plans = plan_candidates(
        batch, strategy="flex-ring", cluster=setting.cluster, cost=setting.cost, options=found.case.options
    )
    best = min(plans, key=lambda plan: plan.predicted_s)
    large = max((plan for plan in plans if plan != best), key=_transfers)
    assert sum(_transfers(plan) == _transfers(large) > _transfers(best) for plan in plans) == 1
    monkeypatch.setattr("rayfcp.compare.layouts.timeline_of", timeline)
    for most, left in ((_transfers(large), 0), (_transfers(large) - 1, 1), (-1, len(plans))):
        monkeypatch.setattr("rayfcp.compare.results.MOST_BYTES", most * BYTES_PER_TRANSFER)
        simulated_plans.clear()
        plan, _, _ = plan_chosen_timed(batch, strategy="flex-ring", setting=setting, options=found.case.options)
        assert len(simulated_plans) == len(plans) - left
        assert left == 0 or plan.microbatches != large.microbatches
    assert plan.predicted_s == best.predicted_s
