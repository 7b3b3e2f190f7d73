"""Heartbeats of devices become verdicts while calls last (`rayfcp.cluster.workers.calls`), on a clock of the test."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from rayfcp.cluster.runtime import TaskFailedError
from rayfcp.cluster.workers.calls import GroupCall, RanksLostError
from rayfcp.elastic.facts import Cause
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
    seconds: float, *, names: str, deadline_s: float | None, ended: str = "", **beats: Any
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
        deadline_s=deadline_s,
        limit_s=2.0,
        end=lambda _: None,
    )
    for each in ended:
        del call._pending[f"call of {each}"]
    for _ in range(int(seconds / 0.25)):
        call._look()
        runtime.time_s += 0.25
    assert set(call._gone.values()) <= {Cause.HUNG}
    return {names[number] for number in call._gone}, call._reason


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


def test_a_broken_device_is_lost_and_the_others_are_freed() -> None:
    runtime, ended = Broken(), []
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
    call = GroupCall(
        members,
        ["call of a", "call of b"],
        runtime=runtime,  # type: ignore[arg-type]
        names=["a", "b"],
        deadline_s=100.0,
        limit_s=2.0,
        end=lambda member: ended.append(member.id),
    )
    with pytest.raises(
        RanksLostError, match="b failed: device is broken: CUDA error: uncorrectable ECC error"
    ) as found:
        call.values()
    assert [(each.id, each.cause) for each in found.value.lost] == [("b", Cause.DIED)]
    assert ended == ["b"] and runtime.aborted
