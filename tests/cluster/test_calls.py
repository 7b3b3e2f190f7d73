"""Heartbeats of devices during calls that may last (`rayfcp.cluster.workers.calls`), on a clock of the test."""

from types import SimpleNamespace
from typing import Any

from rayfcp.cluster.workers.calls import GroupCall
from rayfcp.elastic.facts import Cause


class Answers:
    """A runtime on which only the heartbeats of `answering` devices come."""

    def __init__(self, answering: set[str]) -> None:
        self.time_s, self._answering = 0.0, answering

    def now_s(self) -> float:
        return self.time_s

    def wait(self, refs: list[str], *, timeout_s: float) -> list[str]:
        return [ref for ref in refs if ref in self._answering]

    def get(self, ref: str) -> Any:
        return SimpleNamespace(step=3, num_done=0, waiting=True)


def member(name: str) -> Any:
    return SimpleNamespace(id=name, handle=SimpleNamespace(beat=SimpleNamespace(remote=lambda: name)))


def test_a_device_without_heartbeats_is_hung_however_long_calls_may_last() -> None:
    runtime = Answers({"a"})
    call = GroupCall(
        [member("a"), member("b")],
        ["first", "second"],
        runtime=runtime,  # type: ignore[arg-type]
        names=["rank 0", "rank 1"],
        deadline_s=None,
        limit_s=2.0,
        end=lambda _: None,
    )
    for runtime.time_s in (0.0, 1.0, 2.0):
        call._look()
        assert not call._gone
    runtime.time_s = 2.5
    call._look()
    assert (call._gone, call._reason) == ({1: Cause.HUNG}, "rank 1 hangs: sent no heartbeat for 2 s")
