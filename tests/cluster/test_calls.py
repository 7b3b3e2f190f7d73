"""Heartbeats of devices become verdicts while calls last (`rayfcp.cluster.workers.calls`), on a clock of the test."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from rayfcp.cluster.runtime import ActorLostError, TaskFailedError
from rayfcp.cluster.workers.calls import GroupCall, Patience, RanksLostError
from rayfcp.elastic.facts import Cause
from rayfcp.elastic.recovery import Way
from rayfcp.execute.reports import CollectiveFailedError, DeviceLostError


class Runtime:
    """Only the heartbeats in `beats`, by device, are answered."""

    def __init__(self, beats: Mapping[str, Any]) -> None:
        self.time_s, self._beats = 1000.0, beats

    def now_s(self) -> float:
        return self.time_s

    def wait(self, refs: list[str], *, timeout_s: float) -> list[str]:
        return [ref for ref in refs if ref in self._beats]

    def get(self, ref: str) -> Any:
        return self._beats[ref]


def beat(*, num_done: int = 0, waiting: bool = False) -> Any:
    return SimpleNamespace(step=3, num_done=num_done, waiting=waiting)


def looked(
    seconds: float, *, names: str, deadline_s: float | None, most_s: float | None = None, ended: str = "", **beats: Any
) -> tuple[set[str], str]:
    """Devices that are gone, and the reason, after so many seconds; `ended`: those whose own call has ended."""
    runtime = Runtime(beats)
    members: list[Any] = [
        SimpleNamespace(id=each, handle=SimpleNamespace(beat=SimpleNamespace(remote=lambda each=each: each)))
        for each in names
    ]
    call = GroupCall(
        members,
        [f"call of {each}" for each in names],
        runtime=runtime,  # type: ignore[arg-type]
        names=list(names),
        patience=Patience(deadline_s=deadline_s, silent_s=2.0, most_s=most_s, leave_s=2.0),
        end=lambda _, keep_device: None,
    )
    for each in ended:
        del call._pending[f"call of {each}"]
    for _ in range(int(seconds / 0.25)):
        call._look()
        runtime.time_s += 0.25
    assert set(call._found.gone.values()) <= {Cause.HUNG}
    return {names[number] for number in call._found.gone}, call._found.reason


def test_nothing_is_wrong_before_the_deadline() -> None:
    assert looked(999, names="ab", deadline_s=1000, a=beat(num_done=1, waiting=True)) == (set(), "")


def test_a_silent_device_is_hung_and_one_that_answers_is_not() -> None:
    hung, reason = looked(10.5, names="abc", deadline_s=10, a=beat(), b=beat())
    assert hung == {"c"} and reason.startswith("c hangs: 1 of 3 devices have not answered")


def test_a_device_whose_call_has_ended_is_not_judged() -> None:
    """All others wait for each other: an exchange is stuck."""
    waiting = {"b": beat(num_done=5, waiting=True), "c": beat(num_done=4, waiting=True)}
    hung, reason = looked(21, names="abc", deadline_s=10, ended="a", a=beat(), **waiting)
    assert hung == set() and reason.startswith("an exchange hangs: no progress for 1")


def test_a_device_without_heartbeats_is_hung_however_long_calls_may_last() -> None:
    assert looked(2.25, names="ab", deadline_s=None, a=beat()) == (set(), "")
    assert looked(2.75, names="ab", deadline_s=None, a=beat()) == ({"b"}, "b hangs: sent no heartbeat for 2 s")


class Broken:
    """A runtime in which the call of `b` failed since its device is broken."""

    def now_s(self) -> float:
        return 0.0

    def wait(self, refs: list[str], *, timeout_s: float) -> list[str]:
        return [ref for ref in refs if ref != "call of a" or self.aborted]

    def get(self, ref: str) -> Any:
        if ref == "call of b":
            raise TaskFailedError(DeviceLostError("device is broken: CUDA error: uncorrectable ECC error"), trace="")
        if ref == "call of a":
            raise TaskFailedError(CollectiveFailedError("aborted"), trace="")
        return beat()

    aborted = False

    def abort(self) -> str:
        self.aborted = True
        return "aborted"


def failing(runtime: Broken, *, ended: list[tuple[str, bool]], way: Way) -> GroupCall:
    """A call of two devices, of which `b` fails; `ended`: who is ended, and whether its device is kept."""
    members: list[Any] = [
        SimpleNamespace(
            id=each,
            facts=SimpleNamespace(node_id="node"),
            handle=SimpleNamespace(
                beat=SimpleNamespace(remote=lambda: "beat"), abort=SimpleNamespace(remote=runtime.abort)
            ),
        )
        for each in "ab"
    ]
    return GroupCall(
        members,
        ["call of a", "call of b"],
        runtime=runtime,  # type: ignore[arg-type]
        names=["a", "b"],
        patience=Patience(deadline_s=100.0, silent_s=2.0, leave_s=2.0),
        way=lambda: way,
        end=lambda member, keep_device: ended.append((member.id, keep_device)),
    )


def test_a_broken_device_is_lost_and_the_others_are_freed() -> None:
    runtime, ended = Broken(), []
    with pytest.raises(
        RanksLostError, match="b failed: device is broken: CUDA error: uncorrectable ECC error"
    ) as found:
        failing(runtime, ended=ended, way=Way.IN_PLACE).values()
    assert [(each.id, each.cause) for each in found.value.lost] == [("b", Cause.DIED)]
    assert ended == [("b", False)] and runtime.aborted


def test_fresh_processes_replace_survivors_without_asking_them() -> None:
    runtime, ended = Broken(), []
    with pytest.raises(RanksLostError) as found:
        failing(runtime, ended=ended, way=Way.FRESH_PROCESSES).values()
    assert [each.id for each in found.value.lost] == ["b"] and found.value.replaced == ("a",)
    assert ended == [("a", True), ("b", False)] and not runtime.aborted


class Stuck(Broken):
    """A runtime in which the call of `b` failed since its process is gone, and `a` cannot abort."""

    def wait(self, refs: list[str], *, timeout_s: float) -> list[str]:
        self.time_s += timeout_s
        return [ref for ref in refs if ref not in ("call of a", "aborted")]

    def get(self, ref: str) -> Any:
        if ref == "call of b":
            raise ActorLostError("it was killed")
        return super().get(ref)

    def now_s(self) -> float:
        return self.time_s

    time_s = 0.0


def test_survivors_that_cannot_leave_are_lost_with_their_devices_kept() -> None:
    ended: list[tuple[str, bool]] = []
    with pytest.raises(RanksLostError) as found:
        failing(Stuck(), ended=ended, way=Way.IN_PLACE).values()
    assert [(each.id, each.cause) for each in found.value.lost] == [("a", Cause.HUNG), ("b", Cause.DIED)]
    assert found.value.are_stuck and found.value.cause is Cause.DIED
    assert ended == [("a", True), ("b", True)]


def test_calls_that_may_not_last_hang_though_heartbeats_come() -> None:
    beats = {"a": beat(), "b": beat()}
    assert looked(9, names="ab", deadline_s=None, most_s=10, ended="a", **beats) == (set(), "")
    assert looked(11, names="ab", deadline_s=None, most_s=10, ended="a", **beats) == (
        {"b"},
        "b hangs: not done within 10 s",
    )
