"""The client of the rendezvous store: aborts, and calls from C++, where process groups hold it under prefixes."""

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from rayfcp.execute.parallel.membership import RendezvousClient
from rayfcp.execute.reports import CollectiveFailedError


def num_handles() -> int:
    return len(os.listdir("/dev/fd"))  # noqa: PTH208


def test_abort_leaves_no_handle_open_and_other_connections_alone() -> None:
    """A process that recovers often would run out of handles."""
    client = RendezvousClient(dist.HashStore, timeout_s=1.0)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        theirs, _ = server.accept()
        with theirs:
            before = num_handles()
            for _ in range(3):
                client.abort()
            assert num_handles() == before
            ours.sendall(b"alive")
            assert theirs.recv(5) == b"alive"


def test_calls_from_threads_of_process_groups() -> None:
    """Each group's store is a C++ object around the client, which is called without Python's lock."""
    client = RendezvousClient(dist.HashStore, timeout_s=20.0)

    def use(number: int) -> list[object]:
        store = dist.PrefixStore(f"group-{number}", dist.PrefixStore("generation", client))
        other = dist.PrefixStore(f"group-{1 - number}", dist.PrefixStore("generation", client))
        store.set("id", f"{number}")
        other.wait(["id"])
        found = [other.get("id"), store.check(["id", "none"]), store.add("count", 2), store.multi_get(["id", "count"])]
        done.wait()
        return [*found, store.clone().get("id"), store.delete_key("count"), store.check(["count"])]

    done = threading.Barrier(2, timeout=20)
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(use, range(2)))
    for number, found in enumerate(results):
        mine, others = (f"{each}".encode() for each in (number, 1 - number))
        assert found == [others, False, 2, [mine, b"2"], mine, True, False]
    assert client.num_keys() == dist.PrefixStore("generation", client).num_keys() == 2


def test_an_abort_ends_waits_in_c() -> None:
    client = RendezvousClient(dist.HashStore, timeout_s=60.0)
    timer = threading.Timer(0.05, client.abort)
    timer.start()
    start_s = time.monotonic()
    with pytest.raises(CollectiveFailedError, match="aborted"):
        dist.PrefixStore("group", client).get("never set")
    assert time.monotonic() - start_s < 30
    timer.join()
