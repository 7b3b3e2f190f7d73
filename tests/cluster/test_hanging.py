"""Signs of life become verdicts."""

from rayfcp.cluster.controller.stepping import judge_progress
from rayfcp.cluster.workers.calls import Heartbeat
from rayfcp.elastic.hang import HangVerdict
from rayfcp.execute.reports import Beat

ASKED_EVERY_S = 0.25


class Clock:
    """The time of a runtime, which passes only when it is told to."""

    def __init__(self) -> None:
        self._now_s = 1000.0

    def now_s(self) -> float:
        return self._now_s

    def heartbeat(
        self, number: int, *, num_done: int = 0, waiting: bool = False, answered: bool = True, is_busy: bool = True
    ) -> Heartbeat:
        beat = Beat(number=number, step=3, num_done=num_done, waiting=waiting, memory_bytes={}) if answered else None
        received_s = self._now_s if answered else 0.0
        return Heartbeat(id=f"d{number}", is_busy=is_busy, beat=beat, received_s=received_s, silent_s=0.0)

    def judge_for(
        self, seconds: float, *, ids: list[str], deadline_s: float, heartbeats: list[dict]
    ) -> list[HangVerdict]:
        """Verdicts over so many seconds, in which the same heartbeats come again and again."""
        judge = judge_progress(ids, runtime=self, deadline_s=deadline_s)
        found = []
        for _ in range(int(seconds / ASKED_EVERY_S)):
            found.append(judge([self.heartbeat(**each) for each in heartbeats]))
            self._now_s += ASKED_EVERY_S
        return found


def test_nothing_is_wrong_before_the_deadline() -> None:
    heartbeats = [{"number": 0, "num_done": 1, "waiting": True}, {"number": 1, "answered": False}]
    for found in Clock().judge_for(999, ids=["d0", "d1"], deadline_s=1000, heartbeats=heartbeats):
        assert (found.hung, found.stuck) == ((), False)


def test_who_never_answers_is_hung_and_who_answers_is_not() -> None:
    heartbeats = [{"number": 0}, {"number": 1}, {"number": 2, "answered": False}]
    found = Clock().judge_for(11, ids=["d0", "d1", "d2"], deadline_s=10, heartbeats=heartbeats)
    assert found[-1].hung == ("d2",)
    assert not found[-1].stuck


def test_who_reported_the_step_is_not_asked_about() -> None:
    """All others wait for each other: an exchange is stuck."""
    heartbeats = [
        {"number": 0, "is_busy": False},
        {"number": 1, "num_done": 5, "waiting": True},
        {"number": 2, "num_done": 4, "waiting": True},
    ]
    found = Clock().judge_for(21, ids=["d0", "d1", "d2"], deadline_s=10, heartbeats=heartbeats)
    assert found[-1].stuck
    assert not found[-1].hung
