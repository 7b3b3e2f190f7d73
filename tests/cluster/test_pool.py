"""A pool of actors on a runtime with a clock of its own: actors that die, hang, or do not start."""

from typing import Any

import pytest

from rayfcp.cluster.actors.pool import MAX_DEATHS, ActorPool
from rayfcp.cluster.errors import CapacityError, RunAbortedError
from rayfcp.cluster.runtime import ActorLostError, CallError, NoAnswerError, TaskFailedError

TIMEOUT_S = 10.0


class Ref:
    """An answer: a value, an error, or none yet. Its call was `what` of `actor`."""

    def __init__(self, actor: "Actor", what: str) -> None:
        self.actor, self.what, self.value = actor, what, None
        self.error: CallError | None = None
        self.is_there = False

    def answer(self, value: Any = None, error: CallError | None = None) -> None:
        self.value, self.error, self.is_there = value, error, True


class Actor:
    def __init__(self, number: int) -> None:
        self.number, self.is_ended, self.calls = number, False, []

    def call(self, what: str) -> Ref:
        self.calls.append(Ref(self, what))
        return self.calls[-1]


class Runtime:
    """Waits pass on a clock of its own."""

    def __init__(self) -> None:
        self.clock_s = 0.0

    def get(self, ref: Ref, *, timeout_s: float | None = None) -> Any:
        if not ref.is_there:
            assert timeout_s is not None, "it would wait for ever"
            self.clock_s += timeout_s
            raise NoAnswerError(f"no answer within {timeout_s} s")
        if ref.error is not None:
            raise ref.error
        return ref.value

    def wait_all(self, refs: list[Ref], *, timeout_s: float) -> list[Ref]:
        return [each for each in refs if each.is_there]

    def end(self, actor: Actor) -> None:
        actor.is_ended = True

    def now_s(self) -> float:
        return self.clock_s


class Pool:
    """A pool of `count` actors that run at once, unless `is_full`. `actors`: all that were started."""

    def __init__(self, count: int) -> None:
        self.actors: list[Actor] = []
        self.said: list[str] = []
        self.is_full = False
        self.runtime: Any = Runtime()
        self.pool = ActorPool(
            self._start,
            runtime=self.runtime,
            count=count,
            setting="tests",
            timeout_s=TIMEOUT_S,
            log=self.said.append,
        )

    def _start(self) -> tuple[Actor, Ref, Ref]:
        self.actors.append(Actor(len(self.actors)))
        ready = Ref(self.actors[-1], "ready")
        if not self.is_full:
            ready.answer()
        return self.actors[-1], ready, ready


def test_work_goes_to_the_least_busy() -> None:
    own = Pool(2)
    sent = [own.pool.send(lambda actor: [actor.call("plan")]) for _ in range(3)]
    assert [each.actor.number for each in sent] == [0, 1, 0]
    sent[0].refs[0].answer(7)
    sent[2].refs[0].answer(8)
    assert own.pool.send(lambda actor: [actor.call("plan")]).actor.number == 0
    assert own.pool.wait(sent[0]) == 7
    assert own.pool.unfinished(sent) == [sent[1]]
    assert [each.number for each in own.pool.in_turn(3)] == [0, 1, 0]


def test_the_work_of_an_actor_that_hangs_is_repeated_in_order() -> None:
    own = Pool(1)
    sent = [own.pool.send(lambda actor, name=name: [actor.call(name)]) for name in "abcd"]
    sent[0].refs[0].answer("early")
    own.pool.forget(sent[3])
    with pytest.raises(NoAnswerError):
        own.pool.wait(sent[1], timeout_s=1.0, patience_s=5.0)
    assert not own.actors[0].is_ended, "patience is not over"
    hung = own.actors[0]
    with pytest.raises(RunAbortedError, match=r"4 planners died in a row, at most 3 may: no answer within 5"):
        own.pool.wait(sent[1], patience_s=5.0)  # so does each that takes its place
    assert hung.is_ended and len(own.actors) == 1 + MAX_DEATHS
    assert [[each.what for each in actor.calls] for actor in own.actors[1:]] == [["b", "c"]] * MAX_DEATHS
    own.actors[-1].calls[0].answer("late")
    assert own.pool.wait(sent[1], patience_s=5.0) == "late" and own.pool.wait(sent[0]) == "early"


def test_an_error_of_the_call_is_no_death() -> None:
    own = Pool(1)
    request = own.pool.send(lambda actor: [actor.call("plan")])
    request.refs[0].answer(error=TaskFailedError(ValueError("no plan")))
    with pytest.raises(TaskFailedError, match="no plan"):
        own.pool.wait(request)
    assert len(own.actors) == 1 and not own.said


def test_a_dead_actor_is_replaced_once_for_all_its_requests() -> None:
    own = Pool(2)
    sent = [own.pool.send(lambda actor, name=name: [actor.call(name)]) for name in "abc"]
    for each in (sent[0], sent[2]):
        each.refs[0].answer(error=ActorLostError("it was killed"))
    sent[1].refs[0].answer("b")
    assert own.pool.wait(sent[1]) == "b"
    with pytest.raises(RunAbortedError):  # nobody answers the repeated call
        own.pool.wait(sent[0], patience_s=1.0)
    assert [each.what for each in own.actors[2].calls] == ["a", "c"]


def test_an_added_actor_that_does_not_start_is_the_last() -> None:
    own = Pool(1)
    own.pool.add(1)
    own.is_full = True
    own.pool.add(1)
    own.pool.take_added()
    assert (len(own.pool), own.pool.num_starting) == (2, 1)
    own.runtime.clock_s += TIMEOUT_S
    own.pool.take_added()
    assert (len(own.pool), own.pool.num_starting, own.pool.most) == (2, 0, 2)
    assert own.said == ["one more planner does not start in 10 s; going on with 2"] and own.actors[2].is_ended


def test_actors_for_which_there_is_no_room_are_an_error() -> None:
    own = Pool(0)
    own.is_full = True
    crowded = ActorPool(own._start, runtime=own.runtime, count=2, setting="plan.planner_actors", timeout_s=TIMEOUT_S)
    with pytest.raises(CapacityError, match=r"2 planners \(plan.planner_actors\) did not all start within 10 s"):
        crowded.await_ready()
