"""Hangs: deadlines follow what steps took, verdicts blame who others wait for, and nobody before the deadline."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.config.models import ElasticConfig
from rayfcp.elastic.hang import REMEMBERED, Heartbeat, StepTimes, judge
from tests.examples import examples

ELASTIC = ElasticConfig(hang_min_s=2.0, hang_factor=10.0, start_timeout_s=100.0)
SECONDS = st.floats(0.01, 50.0)


def learnt(steps: list[tuple[float, float]]) -> StepTimes:
    times = StepTimes()
    for step_s, predicted_s in steps:
        times = times.after(step_s=step_s, predicted_s=predicted_s)
    return times


def test_before_any_step_workers_get_their_time_to_start() -> None:
    assert StepTimes().deadline_s(ELASTIC, predicted_s=3.0) == 100.0


@examples(100)
@given(st.lists(SECONDS, min_size=1, max_size=30), SECONDS, st.floats(0.2, 5.0))
def test_the_deadline_scales_with_what_is_predicted(predicted: list[float], next_s: float, wrong_by: float) -> None:
    """Predictions that are wrong by one factor all along give that factor back."""
    times = learnt([(wrong_by * each, each) for each in predicted])
    assert len(times.steps) == min(len(predicted), REMEMBERED)
    assert times.deadline_s(ELASTIC, predicted_s=next_s) == pytest.approx(max(2.0, 10 * wrong_by * next_s))


@examples(100)
@given(st.lists(st.tuples(SECONDS, st.just(math.nan)), min_size=1, max_size=10))
def test_without_predictions_the_median_step_counts(steps: list[tuple[float, float]]) -> None:
    usual_s = statistics.median(step_s for step_s, _ in steps)
    assert learnt(steps).deadline_s(ELASTIC, predicted_s=1.0) == pytest.approx(max(2.0, 10 * usual_s))


def test_one_step_that_took_for_ever_does_not_move_the_deadline() -> None:
    steady = learnt([(1.0, 1.0)] * 8)
    assert steady.after(step_s=500.0, predicted_s=1.0).deadline_s(ELASTIC, predicted_s=1.0) == 10.0
    assert steady.after(step_s=math.nan, predicted_s=1.0) == steady


def sign(id: str, *, done: int = 5, waiting: bool = True, heard_s: float = 99.0, moved_s: float = 50.0) -> Heartbeat:
    return Heartbeat(id=id, step=3, num_done=done, waiting=waiting, heard_s=heard_s, moved_s=moved_s)


SIGNS = st.lists(
    st.builds(
        Heartbeat,
        id=st.uuids().map(str),
        step=st.just(3),
        num_done=st.integers(0, 9),
        waiting=st.booleans(),
        heard_s=st.floats(0, 100),
        moved_s=st.floats(0, 100),
    ),
    max_size=5,
    unique_by=lambda each: each.id,
)


@examples(300)
@given(SIGNS, st.floats(1.0, 120.0))
def test_verdicts_by_their_rules(signs: list[Heartbeat], deadline_s: float) -> None:
    verdict = judge(signs, now_s=100.0, deadline_s=deadline_s)
    silent = {each.id for each in signs if 100.0 - each.heard_s >= deadline_s}
    still = bool(signs) and all(100.0 - each.moved_s >= deadline_s for each in signs)
    busy = {each.id for each in signs if not each.waiting}
    assert set(verdict.hung) == (silent or (busy if still else set()))
    assert verdict.stuck == (still and not silent and not busy)


@examples(100)
@given(SIGNS, st.floats(1.0, 120.0), st.floats(0.0, 50.0))
def test_more_patience_blames_nobody_else(signs: list[Heartbeat], deadline_s: float, more_s: float) -> None:
    early = judge(signs, now_s=100.0, deadline_s=deadline_s)
    late = judge(signs, now_s=100.0, deadline_s=deadline_s + more_s)
    if not early.hung and not early.stuck:
        assert not late.hung
        assert not late.stuck


def test_a_stopped_device_is_blamed_and_not_those_that_wait_for_it() -> None:
    verdict = judge([sign("a"), sign("b", waiting=False, heard_s=60.0)], now_s=100.0, deadline_s=40.0)
    assert verdict.hung == ("b",)
    assert verdict.reason == "1 of 2 devices have not answered for up to 40.0 s, 40.0 s are allowed"


def test_a_device_that_answers_but_does_nothing_is_blamed() -> None:
    verdict = judge([sign("a"), sign("b", waiting=False, done=7)], now_s=100.0, deadline_s=40.0)
    assert verdict.hung == ("b",)
    assert "no progress for 50.0 s, 40.0 s are allowed, and 1 of 2 devices do not wait for others" in verdict.reason


def test_where_all_wait_the_exchange_is_stuck_and_nobody_is_lost() -> None:
    verdict = judge([sign("a"), sign("b")], now_s=100.0, deadline_s=40.0)
    assert (verdict.hung, verdict.stuck) == ((), True)


@examples(100)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.booleans(), st.floats(0, 5)), max_size=20))
def test_signs_remember_when_a_device_last_moved(answers: list[tuple[str, int, bool, float]]) -> None:
    signs, now_s = {id: Heartbeat(id=id, heard_s=0.0, moved_s=0.0) for id in "ab"}, 0.0
    expected = {"a": (-1, 0.0, 0.0), "b": (-1, 0.0, 0.0)}
    for id, done, waiting, after_s in answers:
        now_s += after_s
        signs[id] = signs[id].after(step=1, num_done=done, waiting=waiting, now_s=now_s)
        before, _, moved_s = expected[id]
        expected[id] = (done, now_s, moved_s if done == before else now_s)
    assert {id: (each.num_done, each.heard_s, each.moved_s) for id, each in signs.items()} == expected


def test_aborted_devices_have_a_usual_step_to_leave_also_after_a_change_of_devices() -> None:
    elastic = ElasticConfig(leave_timeout_s=5.0, hang_min_s=30.0)
    times = StepTimes()
    assert times.leave_s(elastic) == times.on_other_devices().leave_s(elastic) == 30.0, "the first step may be slow"
    for step_s in (2.0, 3.0, 100.0):
        times = times.after(step_s=step_s, predicted_s=1.0)
    assert times.leave_s(elastic) == times.on_other_devices().leave_s(elastic) == 8.0
    assert times.on_other_devices().deadline_s(elastic, predicted_s=1.0) == StepTimes().deadline_s(
        elastic, predicted_s=1.0
    )
    assert times.on_other_devices().after(step_s=1.0, predicted_s=1.0).leave_s(elastic) == 6.0
