"""Planners and lookahead: enough of both within bounds, and a remedy where bounds are too narrow."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.elastic.lookahead import LEAST_STEPS, OUTLIER, RESERVE, SURE_STEPS, PlanningFacts, decide
from tests.examples import examples

SECONDS = st.floats(0.01, 100.0)
BOUNDS = st.tuples(st.integers(1, 8), st.integers(0, 8)).map(lambda both: (both[0], both[0] + both[1]))


def facts(prepare_s: float, step_s: float, *, steps: int = 8, **changes: object) -> PlanningFacts:
    """Facts of equal steps, with one planner, which may become up to four."""
    known = PlanningFacts(
        prepare_s=(prepare_s,) * steps,
        step_s=(step_s,) * steps,
        running=1,
        starting=0,
        lookahead_steps=4,
        room=99,
        planner_bounds=(1, 4),
        step_bounds=(4, 16),
    )
    return replace(known, **changes)  # type: ignore[arg-type]


@examples(300)
@given(prepare_s=SECONDS, step_s=SECONDS, planners=BOUNDS, steps=BOUNDS, room=st.integers(0, 20))
def test_decisions_keep_to_bounds_and_suffice_or_say_so(
    prepare_s: float, step_s: float, planners: tuple[int, int], steps: tuple[int, int], room: int
) -> None:
    given = facts(
        prepare_s,
        step_s,
        running=planners[0],
        lookahead_steps=steps[0],
        planner_bounds=planners,
        step_bounds=steps,
        room=room,
    )
    found = decide(given)
    assert planners[0] <= found.planners <= planners[1] and found.planners <= max(room, planners[0])
    assert steps[0] <= found.steps <= steps[1]
    assert found.load == pytest.approx(prepare_s / step_s / planners[0])
    if found.keeps_up:
        assert prepare_s <= 1.03 * step_s * min(found.planners, found.steps)
        assert "cannot keep up" not in found.reason
    else:
        assert prepare_s > step_s * min(found.planners, found.steps)
        assert found.planners == min(planners[1], max(room, planners[0])) or found.steps == steps[1]
        assert "plan.search_moves" in found.reason and "plan.strategy" in found.reason
    assert found.planners <= max(planners[0], math.ceil(RESERVE * prepare_s / step_s)), "no more than needed"


@examples(100)
@given(prepare_s=SECONDS, step_s=SECONDS, steps=st.integers(LEAST_STEPS, 16), outlier=st.floats(1.01 * OUTLIER, 1e3))
def test_one_step_that_compiles_changes_nothing(prepare_s: float, step_s: float, steps: int, outlier: float) -> None:
    usual = facts(prepare_s, step_s, steps=steps)
    first = replace(
        usual,
        prepare_s=(outlier * prepare_s, *usual.prepare_s[1:]),
        step_s=(outlier * step_s, *usual.step_s[1:]),
    )
    assert replace(decide(first), load=0.0) == replace(decide(usual), load=0.0)


def test_nothing_is_decided_before_there_are_measurements() -> None:
    assert decide(facts(9.0, 1.0, steps=SURE_STEPS - 1)).keeps_up
    for steps in range(LEAST_STEPS):
        found = decide(facts(9.0, 1.0, steps=steps, running=2, lookahead_steps=5))
        assert (found.planners, found.steps, found.keeps_up, found.reason) == (2, 5, True, "")


def waits(prepare_s: float, step_s: float, *, most: int, num_steps: int) -> tuple[list[float], bool]:
    """What each step waits for its programs, and whether planning kept up at the end: planners with a queue each, of
    which one that is added starts two steps later."""
    free_s, ready_s, now_s, waited, plans = [0.0], [], 0.0, [], decide(facts(1.0, 1.0, steps=0))
    for step in range(num_steps):
        while len(ready_s) < min(step + plans.steps, num_steps):
            first = min(range(len(free_s)), key=lambda each: free_s[each])
            free_s[first] = max(free_s[first], now_s) + prepare_s
            ready_s.append(free_s[first])
        waited.append(max(0.0, ready_s[step] - now_s))
        now_s = max(now_s, ready_s[step]) + step_s
        known = facts(
            prepare_s,
            step_s,
            steps=min(step + 1, 16),
            running=len(free_s),
            lookahead_steps=plans.steps,
            keeps_up=plans.keeps_up,
        )
        plans = decide(replace(known, planner_bounds=(1, most)))
        free_s += [now_s + 2 * step_s] * (plans.planners - len(free_s))
    return waited, plans.keeps_up


@examples(200)
@given(step_s=st.floats(0.1, 10.0), most=st.integers(1, 4), share=st.floats(0.01, 1.0) | st.just(1.0))
def test_with_enough_planners_no_step_waits_after_the_warm_up(step_s: float, most: int, share: float) -> None:
    waited, keeps_up = waits(share * most * step_s, step_s, most=most, num_steps=60)
    assert max(waited[20:]) <= 1e-9 * step_s and keeps_up


@examples(100)
@given(step_s=st.floats(0.1, 10.0), most=st.integers(1, 4), share=st.floats(1.1, 5.0))
def test_without_enough_planners_steps_wait_and_it_says_so(step_s: float, most: int, share: float) -> None:
    waited, keeps_up = waits(share * most * step_s, step_s, most=most, num_steps=60)
    assert sum(waited[20:]) / 40 == pytest.approx((share - 1) * step_s, rel=0.35) and not keeps_up


def test_it_never_falls_back() -> None:
    found = decide(facts(0.01, 1.0, running=2, starting=1, lookahead_steps=7))
    assert (found.planners, found.steps) == (3, 7)
    assert found.reason == "3 planners prepare up to 7 steps ahead: programs take 0.01 s to prepare, a step 1 s"


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({}, "it takes 6 planners, and plan.planner_actors allows 4; raise it,"),
        ({"room": 2}, "it takes 6 planners, and the cluster has CPUs for 2; add CPUs,"),
        ({"step_bounds": (1, 2)}, "plan.lookahead_steps of 2 is too few for 4 planners; raise it,"),
    ],
)
def test_what_is_short_is_named(changes: dict[str, object], remedy: str) -> None:
    found = decide(facts(6.0, 1.0, **({"lookahead_steps": 1} | changes)))
    assert not found.keeps_up and remedy in found.reason
    assert found.reason.startswith("planning cannot keep up: programs take 6 s to prepare, a step 1 s, so that ")


def test_a_ratio_at_the_limit_is_not_told_again_and_again() -> None:
    at_limit = [facts(prepare_s, 1.0, planner_bounds=(1, 2), running=2) for prepare_s in (1.97, 2.03)]
    for keeps_up in (True, False):
        assert all(decide(replace(each, keeps_up=keeps_up)).keeps_up is keeps_up for each in at_limit)
