"""No step waits for its plan once planners are as many as measured times ask; where bounds forbid it, runs say so."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.telemetry.events import EventKind
from tests.examples import examples
from tests.simulated.run import Result
from tests.simulated.scenario import ended_well, of, ran

STEPS, WARM_UP = 40, 14
"""Steps of a run, and those within which planners are measured, start, and work off what the first ones had in hand."""

STEP_S = 0.47
"""Mean time of a step; steps differ by a tenth, so that planners need as much to spare."""


def planned_in(prepare_s: float, *, most: int, spread: float = 0.0, **plan: object) -> Result:
    """A run whose planners take `prepare_s`, of which there may be `most`."""
    bounds = {"planner_actors": [1, most], "lookahead_steps": "auto"} | plan
    result = ran(steps=STEPS, plan_s=prepare_s, plan_spread=spread, plan=bounds)
    ended_well(result, steps=STEPS)
    return result


def waits(result: Result) -> list[float]:
    return [report.plan_wait_s for report in result.reports[WARM_UP:]]


@examples(12)
@given(most=st.integers(1, 4), share=st.floats(0.05, 0.9))
def test_no_step_waits_if_as_many_planners_as_allowed_suffice(most: int, share: float) -> None:
    result = planned_in(share * most * STEP_S, most=most)
    assert max(waits(result)) == 0.0
    assert not any("cannot keep up" in line for line in result.lines)


@examples(6)
@given(most=st.integers(1, 3), share=st.floats(1.3, 3.0))
def test_it_says_what_to_change_if_they_do_not_suffice(most: int, share: float) -> None:
    result = planned_in(share * most * STEP_S, most=most)
    assert max(waits(result)) > 0.1 * STEP_S
    told = of(result, EventKind.PLANNING)[-1]
    assert told.reason.startswith("planning cannot keep up: ") and told.reason in result.lines
    assert f"plan.planner_actors allows {most}; raise it" in told.reason
    assert told.devices == told.devices_before == 4


def test_times_that_differ_from_plan_to_plan_need_a_reserve() -> None:
    result = planned_in(1.3 * STEP_S, most=3, spread=0.5)
    assert max(waits(result)) == 0.0


@pytest.mark.parametrize("strict", [{"planner_actors": 1}, {"lookahead_steps": 1}])
def test_numbers_in_the_configuration_stay_as_they_are(strict: dict[str, object]) -> None:
    result = planned_in(1.5 * STEP_S, most=3, **strict)
    told = of(result, EventKind.PLANNING)[-1]
    assert "cannot keep up" in told.reason and next(iter(strict)) in told.reason
    assert max(waits(result)) > 0.1 * STEP_S
