"""The order of passes and its replay: what any order must keep, closed forms, a plain replay as oracle."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.plan.pipeline.schedule import one_forward_one_backward, pipeline_plan, replayed_s
from rayfcp.values import Group, MicrobatchPlan, Slice
from tests.plan.pipeline.helpers import descending, order_of, replay, runs_of_chunks
from tests.plan.pipeline.runs import run_lengths

stages = st.integers(1, 5)


def backward_of(stage: list[int]) -> list[int]:
    return [-1 - code for code in stage if code < 0]


@given(runs=runs_of_chunks, num_stages=stages, ahead=st.integers(1, 3), shrinking=st.booleans())
def test_every_pass_once_and_slices_in_reverse(runs: list[int], num_stages: int, ahead: int, shrinking: bool) -> None:
    order = one_forward_one_backward(runs, num_stages=num_stages, ahead=ahead, shrinking=shrinking)
    count = sum(runs)
    starts = np.cumsum(runs) - runs
    wanted = [
        chunk for start, length in zip(starts, runs, strict=True) for chunk in range(start + length - 1, start - 1, -1)
    ]
    for stage in order.tolist():
        assert [code for code in stage if code >= 0] == list(range(count))
        assert backward_of(stage) == wanted
        assert all(stage.index(chunk) < stage.index(-1 - chunk) for chunk in range(count))
    ones = np.ones((num_stages, count))
    assert replayed_s(order, forward_s=ones, backward_s=ones, transfer_s=np.zeros(count)) > 0  # no stage waits for ever


@given(
    runs=descending, num_stages=stages, forward=st.integers(1, 4), backward=st.integers(1, 4), shrinking=st.booleans()
)
def test_equal_chunks_take_one_flush(
    runs: list[int], num_stages: int, forward: int, backward: int, shrinking: bool
) -> None:
    order = one_forward_one_backward(runs, num_stages=num_stages, shrinking=shrinking)
    count = sum(runs)
    ones = np.ones((num_stages, count))
    found = replayed_s(order, forward_s=forward * ones, backward_s=backward * ones, transfer_s=np.zeros(count))
    assert found == pytest.approx((count + num_stages - 1) * (forward + backward))


@given(runs=descending, num_stages=stages)
def test_a_stage_holds_as_many_as_eq_7_says(runs: list[int], num_stages: int) -> None:
    order = one_forward_one_backward(runs, num_stages=num_stages, shrinking=False)
    for stage, codes in enumerate(order.tolist()):
        held = np.cumsum([1 if code >= 0 else -1 for code in codes])
        assert held.max() == min(num_stages - 1 - stage + max(runs), sum(runs))


@given(data=st.data(), runs=runs_of_chunks, num_stages=st.integers(1, 3), ahead=st.integers(1, 2))
def test_replay_agrees_with_relaxation(data: st.DataObject, runs: list[int], num_stages: int, ahead: int) -> None:
    order = one_forward_one_backward(runs, num_stages=num_stages, ahead=ahead)
    count = sum(runs)
    seconds = st.lists(st.integers(0, 9), min_size=count, max_size=count)
    forward_s, backward_s = (data.draw(st.lists(seconds, min_size=num_stages, max_size=num_stages)) for _ in range(2))
    transfer_s = data.draw(seconds)
    found = replayed_s(
        order,
        forward_s=np.array(forward_s, float),
        backward_s=np.array(backward_s, float),
        transfer_s=np.array(transfer_s, float),
    )
    assert found == pytest.approx(replay(order, forward_s, backward_s, transfer_s))


def test_stages_that_wait_for_each_other_are_refused() -> None:
    order = np.array([[0, -1, 1, -2], [0, 1, -2, -1]])
    ones = np.ones((2, 2))
    with pytest.raises(ValueError, match="wait for each other"):
        replayed_s(order, forward_s=ones, backward_s=ones, transfer_s=np.zeros(2))


def test_runs_are_what_sequences_join() -> None:
    def holds(*slices: Slice) -> MicrobatchPlan:
        group = Group(ranks=(0,), sequences=tuple(each.sequence for each in slices) or (9,))
        return MicrobatchPlan(groups=(group,), group_s=(1.0,), predicted_s=1.0, slices=slices)

    def part(sequence: int, start: int) -> Slice:
        return Slice(sequence=sequence, start=start, stop=start + 1)

    batch = [
        holds(part(0, 0)),
        holds(part(0, 1), part(1, 0)),
        holds(part(1, 1)),
        holds(),
        holds(part(2, 0)),
        holds(part(2, 1)),
    ]
    assert run_lengths(batch) == (3, 1, 2)


@given(runs=runs_of_chunks, num_stages=stages, start=st.integers(0, 3))
def test_values_hold_the_order(runs: list[int], num_stages: int, start: int) -> None:
    order = one_forward_one_backward(runs, num_stages=num_stages)
    plan = pipeline_plan(order, start=start, recomputed=np.zeros((num_stages, sum(runs)), int), predicted_s=1.0)
    assert (plan.start, plan.stop, plan.num_stages) == (start, start + sum(runs), num_stages)
    assert np.array_equal(order_of(plan), order)
