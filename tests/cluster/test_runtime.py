"""Guarantees of a `Runtime` to control code, tested on Ray with real processes."""

import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rayfcp.cluster.runtime import ActorLostError, ActorSpec, CallError, NoAnswerError, Role, Runtime, TaskFailedError
from rayfcp.cluster.runtime.on_ray import RayRuntime
from rayfcp.config import ConfigError
from tests.cluster.light import free_cpus_again
from tests.cluster.processes import lives
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.usefixtures("ray_cluster")

ONE, TOO_MANY = {"CPU": 1.0}, {"CPU": 1000.0}


class Probe:
    """An actor in the place of a worker."""

    def __init__(self, first: Any = None, *, second: Any = None) -> None:
        self._given, self._seen = (first, second), []

    def given(self) -> tuple[Any, Any]:
        return self._given

    def echo(self, value: Any) -> Any:
        self._seen.append(value)
        return value

    def seen(self) -> list[Any]:
        return self._seen

    def pair(self) -> tuple[str, str]:
        return "first", "second"

    def fail(self, error: Exception) -> None:
        raise error

    def never(self) -> None:
        threading.Event().wait()

    def pid(self) -> int:
        return os.getpid()


Start = Callable[..., Any]


@pytest.fixture
def runtime() -> Runtime:
    return RayRuntime(Probe)


@pytest.fixture
def start(runtime: Runtime) -> Iterator[Start]:
    """Starts probes in reservations of their own, and ends them."""
    reservations: list[Any] = []

    def started(*args: Any, name: str = "", resources: dict[str, float] = ONE, **kwargs: Any) -> Any:
        reservations.append(runtime.reserve(resources, name=f"probe/{runtime.new_id()}"))
        spec = ActorSpec(role=Role.WORKER, name=name, reservation=reservations[-1], resources=resources)
        handles.append(runtime.start(spec, *args, **kwargs))
        return handles[-1]

    handles: list[Any] = []
    with free_cpus_again():
        yield started
        for handle in handles:
            runtime.end(handle)
        for each in reservations:
            runtime.release(each)


def test_calls_begin_in_order_and_references_become_values(runtime: Runtime, start: Start) -> None:
    probe = start(1, second=2)
    refs = [probe.echo.remote(number) for number in range(20)]
    assert runtime.get(probe.seen.remote()) == list(range(20))
    assert runtime.get(probe.given.remote()) == (1, 2)
    assert runtime.wait_all(refs) == refs
    assert runtime.get(probe.echo.remote(refs[7])) == 7
    assert runtime.get(probe.echo.remote(runtime.put("put"))) == "put"
    first, second = probe.pair.options(num_returns=2).remote()
    assert (runtime.get(second), runtime.get(first)) == ("second", "first")


def test_waits_return_what_is_ready(runtime: Runtime, start: Start) -> None:
    probe, other = start(), start()
    done, pending = probe.echo.remote(1), other.never.remote()
    assert runtime.wait([pending, done]) == [done]
    assert runtime.wait([pending], timeout_s=0) == []
    assert runtime.wait_all([pending, done], timeout_s=0.1) == [done]
    assert runtime.wait([]) == [] and runtime.wait_all([]) == []
    with pytest.raises(NoAnswerError):
        runtime.get(pending, timeout_s=0)


def test_an_actors_own_error_is_told_from_its_loss(runtime: Runtime, start: Start) -> None:
    probe, other = start(), start()
    with pytest.raises(TaskFailedError) as caught:
        runtime.get(probe.fail.remote(ConfigError("set x")))
    assert isinstance(caught.value.cause, ConfigError) and str(caught.value.cause) == "set x"
    assert "in fail" in caught.value.trace and "\x1b" not in caught.value.trace
    pid, pending = runtime.get(probe.pid.remote()), probe.never.remote()
    os.kill(pid, signal.SIGKILL)
    for ref in (pending, probe.echo.remote(1)):
        with pytest.raises(ActorLostError) as lost:
            runtime.get(ref)
        assert not lost.value.node_lost and "\n" not in str(lost.value)
    assert runtime.wait([pending]) == [pending], "an error is ready as well"
    with pytest.raises(TaskFailedError) as without:
        runtime.get(other.echo.remote(pending))
    assert isinstance(without.value.cause, CallError), "its argument is lost"
    assert runtime.get(other.echo.remote(3)) == 3, "the one that was called with it lives"


def test_what_is_ended_is_gone_whether_it_started_or_not(runtime: Runtime, start: Start) -> None:
    probe, waiting = start(), start(resources=TOO_MANY)
    pid = runtime.get(probe.pid.remote())
    calls = [probe.never.remote(), waiting.echo.remote(1)]
    assert runtime.wait(calls, timeout_s=0) == []
    for handle in (probe, waiting, probe):
        runtime.end(handle)
    for ref in calls:
        with pytest.raises(ActorLostError):
            runtime.get(ref, timeout_s=PATIENCE_S)
    until(lambda: not lives(pid))


def test_named_actors_are_found_while_they_live(runtime: Runtime, start: Start) -> None:
    first, second = start(name="probes/one"), start(name="probes/two")
    start(name="others/one")
    runtime.wait_all([each.pid.remote() for each in (first, second)])
    found = runtime.named("probes/")
    assert list(found) == ["one", "two"]
    assert runtime.get(found["two"].pid.remote()) == runtime.get(second.pid.remote())
    runtime.end(first)
    until(lambda: list(runtime.named("probes/")) == ["two"])


def test_reservations_are_granted_found_and_given_back(runtime: Runtime, start: Start) -> None:
    small, large = runtime.reserve(ONE, name="held/one"), runtime.reserve(TOO_MANY, name="held/two")
    granted = runtime.granted(small)
    assert runtime.wait([granted, runtime.granted(large)]) == [granted]
    found = runtime.reservations("held/")
    assert found.keys() == {runtime.key(small), runtime.key(large)}
    assert runtime.reservations("held/", granted=True).keys() == {runtime.key(small)}
    probe = runtime.start(ActorSpec(role=Role.WORKER, reservation=small, resources=ONE))
    pid = runtime.get(probe.pid.remote())
    for each in found.values():
        runtime.release(each)
    until(lambda: not lives(pid))
    assert runtime.reservations("held/") == {}


def test_timers_call_until_closed_whatever_a_call_raises(runtime: Runtime) -> None:
    calls: list[int] = []

    def call() -> None:
        calls.append(len(calls))
        raise ValueError("logged")

    stop = runtime.every(0.01, call, name="probe")
    until(lambda: len(calls) >= 3)
    stop()
    until(lambda: not any(each.name == "probe" for each in threading.enumerate()))


def test_background_calls_come_one_after_the_other(runtime: Runtime) -> None:
    submit, go, seen = runtime.background("probe"), runtime.flag(), []
    tasks = [submit(lambda: seen.append(go.wait(PATIENCE_S))), submit(seen.append, 2)]
    assert not tasks[1].done()
    go.set()
    tasks[1].result()
    assert seen == [True, 2] and go.is_set()


def test_it_travels_to_actors_and_knows_its_node(runtime: Runtime, start: Start) -> None:
    again = pickle.loads(pickle.dumps(runtime))
    assert runtime.here() in again.nodes().alive
    assert again.nodes().draining == {}
    assert again.resources()["CPU"] >= 1
    assert len({again.new_id() for _ in range(100)}) == 100
