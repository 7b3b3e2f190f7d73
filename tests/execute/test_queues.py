"""Queues of accelerators, on a stand-in that writes down who waits for whom: messages, events, options of libraries."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rayfcp.execute.devices.backend import Clock, EventClock, backend_of
from rayfcp.execute.devices.cuda import MAX_COMMUNICATION_SMS
from rayfcp.execute.parallel import transport as transports
from rayfcp.execute.parallel.transport import DistributedTransport


class Device:
    """Stand-in for streams and events of `torch.cuda` and `torch.npu`. `told`: calls in order."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self._current, self._streams, device = "compute", 0, self

        class Stream:
            def __init__(self, name: str = "") -> None:
                self.name = name or "messages"

            def __eq__(self, other: object) -> bool:
                return isinstance(other, Stream) and other.name == self.name

            def __hash__(self) -> int:
                return hash(self.name)

            def wait_stream(self, other: "Stream") -> None:
                device.told.append(f"{self.name} waits for {other.name}")

        class Event:
            def record(self) -> None:
                device.told.append(f"event in {device._current}")

            def wait(self) -> None:
                device.told.append(f"{device._current} waits for event")

            def query(self) -> bool:
                return True

        self.Stream, self.Event = Stream, Event

    def current_stream(self) -> Any:
        return self.Stream(self._current)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        outer, self._current = self._current, stream.name
        yield
        self._current = outer


@pytest.fixture(params=[("nccl", "cuda"), ("hccl", "npu")], ids=str)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    """A group of a library, whose batches only write down where they run."""
    found, (backend, kind) = Device(), request.param

    def batch(operations: list[Any]) -> list[Any]:
        found.told.append(f"{len(operations)} posted in {found._current}")
        return [SimpleNamespace(wait=lambda: found.told.append(f"{found._current} waits for works"))]

    monkeypatch.setattr(torch, kind, found, raising=False)
    monkeypatch.setattr(transports, "dist", SimpleNamespace(
        get_rank=lambda group: 0, get_backend=lambda group: backend, batch_isend_irecv=batch, isend=None, irecv=None,
        P2POp=lambda *args, **keywords: args,
    ))  # fmt: skip
    return found


def test_messages_run_beside_computations(device: Device) -> None:
    """Posted in their own queue, which the host does not wait for; computations come behind them from `wait` on."""
    transport = DistributedTransport(device)  # type: ignore[arg-type]
    with transport.message_stream(after_compute=False):
        pending = transport.post([(1, torch.zeros(1))], [(1, torch.zeros(1))])
    assert device.told == ["2 posted in messages", "messages waits for works", "event in messages"]
    pending.wait()
    assert device.told[3:] == ["compute waits for event"] and pending.done()


def test_what_is_computed_is_waited_for_before_it_leaves(device: Device) -> None:
    transport = DistributedTransport(device)  # type: ignore[arg-type]
    with transport.message_stream(after_compute=True):
        transport.post([(1, torch.zeros(1))], [])
    transport.post([(1, torch.zeros(1))], [])  # from the queue of computations
    posted = ["messages waits for compute", "1 posted in messages", "messages waits for works", "event in messages"]
    assert device.told == 2 * posted


def test_events_are_times_of_the_host() -> None:
    """The device's clock starts anywhere and is read in milliseconds."""
    host = SimpleNamespace(now=1000.0)

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at_ms = 7.0 + 1e3 * host.now

        def synchronize(self) -> None:
            host.now = max(host.now, (self.at_ms - 7.0) / 1e3)

        def elapsed_time(self, other: "Event") -> float:
            return other.at_ms - self.at_ms

    clock = EventClock(SimpleNamespace(Event=Event), lambda: host.now)
    first = clock.mark()
    host.now = 1002.5
    second = clock.mark()
    host.now = 1010.0
    assert clock.times(first, second) == pytest.approx((1000.0, 1002.5))
    assert clock.between(first, second) == pytest.approx(2.5)


def test_hosts_have_clocks() -> None:
    clock = backend_of("cpu").clock(iter((1.0, 3.0)).__next__)
    marks = clock.mark(), clock.mark()
    assert type(clock) is Clock and clock.between(*marks) == 2.0 and clock.times(*marks) == (1.0, 3.0)
    assert isinstance(backend_of("cuda").clock(time.time), EventClock)


class Options:
    """`ProcessGroupNCCL.Options` by torch's own declaration; any other name is refused."""

    __slots__ = ("config", "is_high_priority_stream")

    class Config:
        __slots__ = ("blocking", "cga_cluster_size", "max_ctas", "min_ctas")

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream, self.config = is_high_priority_stream, Options.Config()


@pytest.mark.parametrize(
    ("sms", "communicators", "reserved", "limit"),
    [
        (132, 2, 0, None),  # H100: shard, attend
        (132, 4, 0, 32),  # with pipeline stages
        (132, 5, 0, 16),  # and tensor parallelism
        (108, 4, 0, 16),  # A100
        (58, 2, 0, 16),  # L4
        (132, 2, 8, 8),
        (132, 4, 20, 16),  # NCCL would take 32 for messages
        (132, 4, 1000, 32),
        (None, 2, 1000, MAX_COMMUNICATION_SMS),
        (None, 2, 0, None),
    ],
)
def test_kernels_of_all_communicators_fit_on_a_device(
    monkeypatch: pytest.MonkeyPatch, sms: int | None, communicators: int, reserved: int, limit: int | None
) -> None:
    """`sms`: None if there is no device. NCCL's own choice stands where its largest one fits."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sms is not None)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(multi_processor_count=sms), raising=False
    )
    options = backend_of("cuda").group_options(communication_sms=reserved, communicators=communicators)
    assert options.is_high_priority_stream and getattr(options.config, "max_ctas", None) == limit
    if limit and sms:
        assert communicators * limit <= sms
    others = [backend_of(kind).group_options(communication_sms=8, communicators=2) for kind in ("cpu", "npu")]
    assert others == [None, None]
