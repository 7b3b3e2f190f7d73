"""The choice between survivors' processes and fresh ones."""

import pytest

from rayfcp.elastic.facts import Cause, Failure, Setbacks
from rayfcp.elastic.recovery import Way, choose_way

ONCE = Setbacks().after(Failure(cause=Cause.COLLECTIVE))
"""Communication failed, with all devices alive, and the step has not finished since."""


@pytest.mark.parametrize("is_host", [True, False])
@pytest.mark.parametrize("setbacks", [Setbacks(), ONCE])
@pytest.mark.parametrize("num_stuck", [0, 2])
@pytest.mark.parametrize("way", Way)
def test_the_user_may_choose(way: Way, is_host: bool, num_stuck: int, setbacks: Setbacks) -> None:
    chosen = choose_way(way.value, is_host=is_host, num_stuck=num_stuck, setbacks=setbacks)
    assert chosen == (way, f"elastic.recovery is {way}")


def test_it_begins_in_place() -> None:
    for is_host in (True, False):
        assert choose_way("auto", is_host=is_host, num_stuck=0, setbacks=Setbacks())[0] is Way.IN_PLACE


def test_deaths_in_a_row_are_no_reason_against_the_survivors() -> None:
    setbacks = Setbacks()
    for _ in range(3):
        setbacks = setbacks.after(Failure(cause=Cause.DIED, lost=("a",)))
    assert choose_way("auto", is_host=False, num_stuck=0, setbacks=setbacks)[0] is Way.IN_PLACE


def test_communication_that_fails_again_is_one() -> None:
    way, reason = choose_way("auto", is_host=True, num_stuck=0, setbacks=ONCE)
    assert way is Way.FRESH_PROCESSES and "failed 2 times without a finished step" in reason


def test_accelerators_whose_survivors_once_were_stuck_are_not_tried_again() -> None:
    way, reason = choose_way("auto", is_host=False, num_stuck=1, setbacks=Setbacks())
    assert way is Way.FRESH_PROCESSES and "1 time in this run" in reason
    assert choose_way("auto", is_host=True, num_stuck=1, setbacks=Setbacks())[0] is Way.IN_PLACE
