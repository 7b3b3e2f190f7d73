"""Copy stores as actors: they give and send the copies of their node, which outlive them."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray

from rayfcp.cluster.recovery.history import History
from rayfcp.cluster.recovery.store import born
from rayfcp.cluster.recovery.stores import CopyStores, ring
from rayfcp.cluster.workers.group import WorkerGroup
from rayfcp.elastic.recoverable import ShardCopy
from rayfcp.execute.reports import CollectiveFailedError
from rayfcp.execute.state.transfer import read_copy
from rayfcp.values import KeptStates
from rayfcp.values.state import Box, StateId
from tests.cluster.light import bytes_of, free_cpus_again, light_config, light_start, light_stores, shard
from tests.cluster.processes import lives
from tests.waiting import PATIENCE_S, until

WHOLE = [("weight", "parameter", Box(offsets=(0,), sizes=(2500,)))]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Iterator[tuple[WorkerGroup, CopyStores]]:
    config = light_config(tmp_path_factory.mktemp("kept"), name="kept", num_workers=1)
    with free_cpus_again():
        start = light_start(config, run_key="kept")
        worker_group = WorkerGroup(start, start.open_all())
        copy_stores = light_stores(config, run_key="kept")
        yield worker_group, copy_stores
        folder = ray.get(worker_group.workers[0].folder.remote())
        worker_group.end()
        copy_stores.end()
        assert not Path(folder).exists()


@pytest.fixture
def kept(started: tuple[WorkerGroup, CopyStores]) -> tuple[object, CopyStores]:
    """The one worker and the copy store of its node, both without copies."""
    worker_group, copy_stores = started
    ray.get(worker_group.workers[0].drop_copies.remote(99))
    copy_stores.assign(worker_group.members)
    return worker_group.workers[0], copy_stores


def read(copy: ShardCopy) -> np.ndarray:
    found = np.empty(copy.header.num_bytes, np.uint8)
    read_copy(copy, wanted=WHOLE, into=[[found]], patience_s=PATIENCE_S)
    return found


def lives_at(copy: ShardCopy) -> bool:
    """Whether anything listens where it is read."""
    try:
        socket.create_connection((copy.peer.host, copy.peer.port)).close()
    except ConnectionRefusedError:
        return False
    return True


def test_it_loads_no_torch() -> None:
    """It starts in no time and keeps little memory but the copies."""
    heavy = ("torch", "transformers", "scipy", "pyarrow", "numba")
    code = f"import sys, rayfcp.cluster.recovery.store; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_copies_outlive_the_worker_and_the_store(kept: tuple[object, CopyStores]) -> None:
    worker, copy_stores = kept
    header = shard(7)
    ray.get(worker.keep.remote(header, bytes_of(header)))
    (node,) = copy_stores.stores
    ray.kill(copy_stores.stores[node])
    found = copy_stores.newest_state([], up_to=9)
    (copy,) = found.copies
    assert copy.header == header and copy.node_id == node, "a new store was started on the node"
    (by_worker,) = ray.get(worker.shard_copies.remote())
    assert by_worker.header == header and by_worker.peer != copy.peer
    for each in (copy, by_worker):
        np.testing.assert_array_equal(read(each), bytes_of(header))


def test_states_that_are_not_needed_go(kept: tuple[object, CopyStores]) -> None:
    """But not those of living writers, which drop them themselves."""
    worker, copy_stores = kept
    for version in range(1, 4):
        ray.get(worker.keep.remote(shard(version), bytes_of(shard(version))))
    (store,) = copy_stores.stores.values()
    ray.get(store.drop.remote(KeptStates(since=StateId(version=3, generation=0))))
    assert [each.header.state.version for each in ray.get(store.shard_copies.remote())] == [1, 2, 3]
    assert ray.get(store.beat.remote()) >= 3 * 2500
    ray.get(store.drop_copies.remote(0))
    assert ray.get(store.shard_copies.remote()) == ()


def test_a_copy_whose_store_is_dead_is_not_read(kept: tuple[object, CopyStores]) -> None:
    worker, copy_stores = kept
    ray.get(worker.keep.remote(shard(8), bytes_of(shard(8))))
    (store,) = copy_stores.stores.values()
    (copy,) = ray.get(store.shard_copies.remote())
    ray.kill(store)
    until(lambda: not lives_at(copy))
    with pytest.raises(CollectiveFailedError, match="a copy could not be read: the connection to") as caught:
        read(copy)
    assert "\n" not in str(caught.value)
    copy_stores.end_lost()


def test_a_store_that_is_stopped_is_lost(
    started: tuple[WorkerGroup, CopyStores], kept: tuple[object, CopyStores], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayfcp.cluster.recovery.stores.ANSWER_S", 0.5)
    worker_group, copy_stores = started
    (node, store), *_ = copy_stores.stores.items()
    pid = ray.get(store.pid.remote())
    os.kill(pid, signal.SIGSTOP)
    assert copy_stores.end_lost()
    assert copy_stores.stores == {}
    copy_stores.assign(worker_group.members)
    assert ray.get(copy_stores.stores[node].open.remote()).node_id == node
    os.kill(pid, signal.SIGCONT)
    until(lambda: not lives(pid))


def test_only_watched_processes_are_killed(kept: tuple[object, CopyStores]) -> None:
    """Also one that is stopped. The wait reaps it: a zombie counts as gone."""
    _, copy_stores = kept
    (store,) = copy_stores.stores.values()
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


def test_the_ring_spreads_copies_over_other_nodes() -> None:
    assert ring(["a"]) == {"a": "a"}
    for num_nodes in range(2, 6):
        nodes = [f"n{index}" for index in range(num_nodes)]
        stores = ring(reversed(nodes))
        assert all(node != stores[node] for node in nodes)
        assert sorted(stores.values()) == nodes


def test_a_run_knows_its_states_through_all_its_starts(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.begin(0, version=0)
    history.begin(1, version=5)
    (tmp_path / "generations.jsonl").open("a").write('\n{"generation": 2, "ver')  # its writer died
    again = History(tmp_path)
    assert (again.run, again.newest) == (history.run, 1)
    again.begin(2, version=3)  # from a checkpoint
    for known in (again, History(tmp_path)):
        states = [(4, 0), (3, 0), (9, 1), (3, 1), (9, 2), (1, 3)]
        has = [known.has(StateId(version=version, generation=generation)) for version, generation in states]
        assert has == [False, True, False, True, True, False]
    (tmp_path / "generations.jsonl").unlink()
    assert History(tmp_path).run != history.run, "copies of a run that was removed are another's"
