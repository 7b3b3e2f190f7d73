"""Copies of shards on their way to a snapshot store: whole or not at all, whoever dies on the way."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import ray

from rayfcp.cluster.recovery.replication import Pusher, born
from rayfcp.cluster.recovery.stores import SnapshotStores, ring
from rayfcp.cluster.runtime.on_ray import RayRuntime
from rayfcp.cluster.workers.facts import Waited
from rayfcp.cluster.workers.group import WorkerGroup
from rayfcp.execute.reports import CollectiveFailedError
from rayfcp.execute.state.copies import HeldCopies, reading
from rayfcp.values.state import Box, StateId
from tests.cluster.light import bytes_of, copies_at, free_cpus_again, light_config, light_start, shard
from tests.cluster.processes import lives
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.usefixtures("ray_cluster")

WHOLE = [("weight", "parameter", Box(offsets=(0,), sizes=(2500,)))]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WorkerGroup, SnapshotStores]]:
    config = light_config(tmp_path_factory.mktemp("kept"), name="kept", num_workers=1)
    with free_cpus_again():
        start = light_start(config, run_key="kept")
        worker_group = WorkerGroup(start, start.open_all())
        snapshot_stores = SnapshotStores(config, runtime=RayRuntime(), run_key="kept")
        yield worker_group, snapshot_stores
        worker_group.end()
        snapshot_stores.end()


@pytest.fixture
def kept(started: tuple[WorkerGroup, SnapshotStores]) -> tuple[object, SnapshotStores]:
    """The one worker and the snapshot store of its node, both empty."""
    worker_group, snapshot_stores = started
    snapshot_stores.forget(worker_group.facts[0].node_id)
    ray.get(worker_group.workers[0].drop_copies.remote())
    snapshot_stores.assign(worker_group.members)
    snapshot_stores.await_assigned()
    return worker_group.workers[0], snapshot_stores


def test_it_loads_no_torch() -> None:
    """It starts in no time and keeps little memory but the copies."""
    heavy = ("torch", "transformers", "scipy", "pyarrow", "numba")
    code = f"import sys, rayfcp.cluster.recovery.replication; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("num_bytes", [0, 700, 2500])
def test_a_copy_arrives_whole(kept: tuple[object, SnapshotStores], num_bytes: int) -> None:
    """States of no chunk, one, several."""
    worker, snapshot_stores = kept
    header = shard(10 + num_bytes, num_bytes=num_bytes)
    worker.keep.remote(header, bytes_of(header))
    assert ray.get(worker.await_kept.remote(header.state, timeout_s=PATIENCE_S)) == Waited.KEPT
    (source,) = copies_at(snapshot_stores.stores)
    assert source.header == header
    wanted = [("weight", "parameter", Box(offsets=(0,), sizes=(num_bytes,)))] if num_bytes else []
    found = ray.get(source.holder.pieces.remote(header.state, 0, wanted=wanted))
    for piece in found:
        np.testing.assert_array_equal(piece, bytes_of(header))
    assert [each.header for each in copies_at({"w": worker})] == [header]


def test_a_copy_that_is_gone_when_it_is_read_is_told_in_one_line(kept: tuple[object, SnapshotStores]) -> None:
    """Without the traceback of the snapshot store."""
    _, snapshot_stores = kept
    (store,), header = snapshot_stores.stores.values(), shard(10)
    with pytest.raises(CollectiveFailedError, match="a copy was dropped while it was read") as caught, reading(header):
        ray.get(store.pieces.remote(header.state, header.number, wanted=WHOLE))
    assert "\n" not in str(caught.value)


def started_members(worker: object) -> list[object]:
    from rayfcp.cluster.workers.facts import Member

    facts = ray.get(worker.facts.remote())
    return [Member(id="w", handle=worker, group=ray.get(worker.group.remote()), facts=facts)]


def test_a_store_that_dies_is_reported_and_the_next_gets_the_newest_copy(kept: tuple[object, SnapshotStores]) -> None:
    worker, snapshot_stores = kept
    (member,) = started_members(worker)
    first, second = shard(9000), shard(9001)
    worker.keep.remote(first, bytes_of(first))
    assert ray.get(worker.await_kept.remote(first.state, timeout_s=PATIENCE_S)) == Waited.KEPT
    ray.kill(snapshot_stores.store_of(member.facts.node_id))
    worker.keep.remote(second, bytes_of(second))
    assert ray.get(worker.await_kept.remote(second.state, timeout_s=PATIENCE_S)) == Waited.LOST, (
        "lost, long before the time is over"
    )
    assert snapshot_stores.newest_state([], up_to=9001).copies == ()
    assert snapshot_stores.stores == {}, "a dead snapshot store is forgotten"
    snapshot_stores.assign([member])
    snapshot_stores.await_assigned()
    assert ray.get(worker.await_kept.remote(second.state, timeout_s=PATIENCE_S)) == Waited.KEPT
    assert [source.header for source in copies_at(snapshot_stores.stores)] == [second]


def test_only_watched_processes_are_killed(kept: tuple[object, SnapshotStores]) -> None:
    """Also one that is stopped. The wait reaps it: a zombie counts as gone."""
    worker, snapshot_stores = kept
    store = snapshot_stores.store_of(ray.get(worker.facts.remote()).node_id)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with pytest.raises(ValueError, match=f"process {process.pid} is not watched"):
        ray.get(store.kill.remote(process.pid))
    ray.get(store.watch.remote([process.pid]))
    os.kill(process.pid, signal.SIGSTOP)
    assert ray.get(store.kill.remote(process.pid))
    assert process.wait(timeout=PATIENCE_S) == -signal.SIGKILL
    assert not ray.get(store.kill.remote(process.pid))
    assert not lives(process.pid)


def test_a_process_is_told_from_another_with_its_number() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert born(process.pid) not in ("", "?", born(os.getpid()))
    process.kill()
    process.wait()
    assert born(process.pid) == ""


class DamagedCopies(HeldCopies):
    """A source whose bytes change between checksum and sending, a given number of times."""

    def __init__(self, *, times: int) -> None:
        super().__init__()
        self.times = times

    def chunks(self, *args: object, **named: object) -> Iterator[tuple[int, memoryview, int]]:
        for offset, chunk, checksum in super().chunks(*args, **named):
            yield offset, chunk, checksum ^ 1 if self.times > 0 and offset else checksum
            self.times -= bool(offset)


@pytest.mark.parametrize(("times", "arrives"), [(1, True), (100, False)])
def test_a_damaged_copy_is_sent_again_and_never_seen(
    kept: tuple[object, SnapshotStores], times: int, arrives: bool
) -> None:
    _, snapshot_stores = kept
    store = next(iter(snapshot_stores.stores.values()))
    copies = DamagedCopies(times=times)
    pusher = Pusher(copies, settle=lambda: None, chunk_bytes=1000, patience_s=PATIENCE_S)
    header = shard(1, number=7)
    copies.put(header, bytes_of(header))
    pusher.use(store)
    pusher.offer(header, safe=None)
    assert pusher.wait_for(header.state, timeout_s=PATIENCE_S) == (Waited.KEPT if arrives else Waited.LOST)
    assert pusher.pushed.lost != arrives
    found = [source.header for source in copies_at(snapshot_stores.stores)]
    assert (header in found) == arrives


def test_older_copies_go_when_newer_ones_come(kept: tuple[object, SnapshotStores]) -> None:
    _, snapshot_stores = kept
    store = next(iter(snapshot_stores.stores.values()))
    copies = HeldCopies()
    pusher = Pusher(copies, settle=lambda: None, chunk_bytes=1000, patience_s=PATIENCE_S)
    pusher.use(store)
    for version in range(1, 6):
        header = shard(version, number=3)
        copies.put(header, bytes_of(header))
        pusher.offer(header, safe=StateId(version=version - 1, generation=0) if version > 1 else None)
        assert pusher.wait_for(header.state, timeout_s=PATIENCE_S) == Waited.KEPT
        assert pusher.pushed.seconds > 0
        headers = [source.header for source in copies_at(snapshot_stores.stores)]
        held = [each.state.version for each in headers if each.number == 3]
        assert held == list(range(max(1, version - 1), version + 1))
        assert ray.get(store.beat.remote()) <= 5 * 2500, "bounded: two copies, spare buffers, and what the worker sent"


def test_a_store_that_is_stopped_is_lost(kept: tuple[object, SnapshotStores]) -> None:
    _, snapshot_stores = kept
    store = next(iter(snapshot_stores.stores.values()))
    copies, header = HeldCopies(), shard(1)
    copies.put(header, bytes_of(header))
    pusher = Pusher(copies, settle=lambda: None, chunk_bytes=1000, patience_s=0.5)
    pid = ray.get(store.pid.remote())
    os.kill(pid, signal.SIGSTOP)
    try:
        pusher.use(store)
        pusher.offer(header, safe=None)
        assert pusher.wait_for(header.state, timeout_s=PATIENCE_S) == Waited.LOST
        assert pusher.pushed.lost
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: ray.get(store.beat.remote()) >= 0)


def test_the_ring_spreads_copies_over_other_nodes() -> None:
    assert ring(["a"]) == {"a": "a"}
    for num_nodes in range(2, 6):
        nodes = [f"n{index}" for index in range(num_nodes)]
        stores = ring(reversed(nodes))
        assert all(node != stores[node] for node in nodes)
        assert sorted(stores.values()) == nodes
