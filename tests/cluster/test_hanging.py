"""Signs of life become verdicts."""

import time

from rayfcp.cluster.hanging import judge_progress
from rayfcp.cluster.losses import Pulse
from rayfcp.execute.reports import Beat


def pulse(number: int, *, num_done: int = 0, waiting: bool = False, answered: bool = True) -> Pulse:
    now_s = time.monotonic()
    beat = Beat(number=number, step=3, num_done=num_done, waiting=waiting, memory_bytes={}) if answered else None
    return Pulse(id=f"d{number}", number=number, beat=beat, heard_s=now_s if answered else 0.0, silent_s=0.0)


def test_nothing_is_wrong_before_the_deadline() -> None:
    judge = judge_progress(["d0", "d1"], deadline_s=1000)
    for num_done in range(3):
        found = judge([pulse(0, num_done=num_done, waiting=True), pulse(1, answered=False)])
        assert (found.hung, found.stuck) == (frozenset(), False)


def test_who_never_answers_is_hung_and_who_answers_is_not() -> None:
    judge = judge_progress(["d0", "d1", "d2"], deadline_s=0.2)
    judge([pulse(0), pulse(1), pulse(2, answered=False)])
    end_s = time.monotonic() + 0.3
    while time.monotonic() < end_s:
        found = judge([pulse(0), pulse(1), pulse(2, answered=False)])
    assert found.hung == {2}
    assert not found.stuck


def test_who_reported_the_step_is_not_asked_about() -> None:
    """All others wait for each other: an exchange is stuck."""
    judge = judge_progress(["d0", "d1", "d2"], deadline_s=0.2)
    end_s = time.monotonic() + 0.4
    while time.monotonic() < end_s:
        found = judge([pulse(1, num_done=5, waiting=True), pulse(2, num_done=4, waiting=True)])
    assert found.stuck
    assert not found.hung
