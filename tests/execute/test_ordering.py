"""Order of streams, host and allocator: the checker on schedules of a few operations, then the product under it.

Everything that the product does with streams runs on a stand-in device, with the results of dense attention and of a
single process, and no fault is found. With one wait, event or record less, each run has the fault that is expected.
"""

import json
import subprocess
import sys
from collections.abc import Callable

import pytest
from torch.utils import backend_registration

from tests.execute.ordering import HOST, Memory, Ordering

ATTEND = "in communicator attend by"
COPYING = "in host's snapshots by copy_"
PLANTED = {
    "computation does not wait for messages": ("read in compute by", f"written {ATTEND} irecv"),
    "messages wait for the wrong stream": (f"read {ATTEND} isend", "written in compute by"),
    "the event behind messages is recorded too early": ("read in compute by", f"written {ATTEND} irecv"),
    "a buffer is reused without its event": (f"written {ATTEND} irecv", "read in compute by"),
    "a buffer is freed without record_stream": ("freed for stream 1", "read in compute by"),
    "a sent activation is freed early": ("freed for compute", "read in communicator forward by isend"),
    "streams share row numbers": ("read in compute by index_select", "written in stream 1 by copy_"),
    "the host reads a copy that is on its way": ("read in host by publish", f"written {COPYING}"),
    "a pinned buffer is emptied before it is full": (f"read {COPYING}", "written in stream 2 by copy_"),
    "a pinned buffer is filled before it is empty": (f"read {COPYING}", "written in stream 2 by copy_"),
    "a copy is published before the device has made it": ("by publish", "written in stream 2 by copy_"),
    "an update does not wait for the copy": ("written in compute by", "read in stream 2 by copy_"),
    "a copy does not wait for the update": ("read in stream 2 by copy_", "written in compute by"),
    "computation does not wait for gathered parameters": ("read in compute by", "written in FSDP's stream"),
    "the host reads times that have not come": ("the time of an event is read on the host", "it has happened"),
}
"""What each plant of `tests.execute.ordered_runs` does, and what that had to come after."""


class Schedule:
    """A few operations on one memory, allocated by the stream "a"."""

    def __init__(self) -> None:
        self.order, self.memory = Ordering(), Memory(name="x", home="a")

    def write(self, actor: str, start: int = 0, stop: int = 8) -> "Schedule":
        return self._use(actor, (start, stop), write=True)

    def read(self, actor: str, start: int = 0, stop: int = 8) -> "Schedule":
        return self._use(actor, (start, stop), write=False)

    def _use(self, actor: str, span: tuple[int, int], *, write: bool) -> "Schedule":
        self.order.enqueue(actor)
        self.order.access(actor, self.memory, span, write=write, what="op")
        return self

    def wait(self, actor: str, other: str) -> "Schedule":
        self.order.wait(actor, self.order.now(other))
        return self

    def free(self) -> list[str]:
        self.order.release(self.memory)
        return [*self.order.faults]


@pytest.mark.parametrize(
    "schedule",
    [
        lambda x: x.write("a").read("a"),
        lambda x: x.write("a").wait("b", "a").read("b").wait("a", "b"),
        lambda x: x.write("a").wait(HOST, "a").read("b").wait(HOST, "b"),  # kernels come after what the host knows
        lambda x: x.write("a").wait("b", "a").wait("c", "b").read("c").wait("a", "c"),  # order is transitive
        lambda x: x.write("a").wait("b", "a").read("b").read("a").wait("a", "b"),  # two reads need no order
        lambda x: x.write("a", 0, 4).write("b", 4, 8).wait("a", "b"),  # other bytes
        lambda x: x.write("a").wait(HOST, "a").read(HOST),
    ],
)
def test_ordered(schedule: Callable[[Schedule], Schedule]) -> None:
    assert schedule(Schedule()).free() == []


@pytest.mark.parametrize(
    ("schedule", "fault"),
    [
        (lambda x: x.write("a").read("b").wait("a", "b"), "read in b by op, not ordered after it is written in a"),
        (lambda x: x.wait("b", "a").write("a").read("b").wait("a", "b"), "read in b by op, not ordered"),  # too early
        (
            lambda x: x.write("a").wait("c", "a").read("b").wait("a", "b"),
            "read in b by op, not ordered",
        ),  # wrong stream
        (lambda x: x.write("a").wait("b", "a").read("b").write("a").wait("a", "b"), "written in a by op, not ordered"),
        (lambda x: x.write("a").write("b").wait("a", "b"), "written in b by op, not ordered after it is written in a"),
        (lambda x: x.write("a").read(HOST), "read in host by op, not ordered after it is written in a"),
        (lambda x: x.write("a").wait("b", "a").read("b"), "freed for a, not ordered after it is read in b"),
    ],
)
def test_faults(schedule: Callable[[Schedule], Schedule], fault: str) -> None:
    (found,) = schedule(Schedule()).free()
    assert fault in found


def test_the_allocator_waits_for_recorded_streams() -> None:
    used = Schedule().write("a").wait("b", "a").read("b")
    used.memory.recorded.add("b")
    assert used.free() == []


def test_streams_that_wait_before_they_allocate_may_get_memory_early() -> None:
    """Then, what they allocate next has the uses of all that came back."""
    for waits, faults in ((True, 0), (False, 1)):
        used, other = Schedule(), Schedule()
        used.order.reusing["a"], other.order = {}, used.order
        assert used.write("a").wait("b", "a").read("b").free() == []
        if waits:
            used.wait("a", "b")
        other.order.allocate(other.memory)
        assert len(other.write("a").order.faults) == faults


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Of each run, from a process of its own."""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this release of torch takes no device in Python")
    path = tmp_path_factory.mktemp("ordered") / "faults.json"
    command = [sys.executable, "-m", "tests.execute.ordered_runs", path]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, list[str]] = json.loads(path.read_text())
    return found


def test_the_product_is_ordered(faults: dict[str, list[str]]) -> None:
    """Rings, relayed and scattered blocks, heads, loops' own layouts, stages, steps with copies of the state, FSDP."""
    runs = {name: found for name, found in faults.items() if name not in PLANTED}
    assert len(runs) == 11 and not any(runs.values()), runs


@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_found(name: str, faults: dict[str, list[str]]) -> None:
    now, before = PLANTED[name]
    assert any(before in each.partition(now)[2] for each in faults[name]), faults[name]
