"""Copies of the state from one node's shared memory to another's, as copy stores send them, and parts of them to a
device, as it reads them after a loss; and as objects of Ray, in chunks of 32 MiB with checksums, between two raylets.

All on this machine: rates of a network are lower, CPU time counts.

    python jobs/bench/transfer.py --gib 1 --rounds 3

Prints GB/s and CPU seconds per GiB of both ends together, the best of the rounds.
"""

import argparse
import datetime
import multiprocessing
import os
import platform
import resource
import tempfile
import time
import zlib
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from rayfcp.elastic.recoverable import ShardCopy
from rayfcp.execute.state.copies import CopyFolder
from rayfcp.execute.state.transfer import Listener, read_copy, send_copies
from rayfcp.values import ShardHeader, StateId
from rayfcp.values.state import Box, ShardEntry

CHUNK_BYTES = 32 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of a copy (default: 1)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    parser.add_argument("--without-ray", action="store_true", help="sockets alone")
    arguments = parser.parse_args()
    num_bytes = int(arguments.gib * (1 << 30))
    print(f"{platform.machine()}, {os.cpu_count()} cores, {datetime.datetime.now(datetime.UTC).date()}")  # noqa: T201
    with tempfile.TemporaryDirectory(prefix="rayfcp-bench-", dir="/dev/shm") as folder:
        sent, read = by_sockets(Path(folder), num_bytes=num_bytes, rounds=arguments.rounds)
        report("sockets, sent", sent)
        report("sockets, read", read)
    if not arguments.without_ray:
        report("objects of Ray", by_ray(num_bytes=num_bytes, rounds=arguments.rounds))


def report(what: str, rounds: list[tuple[float, float]]) -> None:
    """Print the best rate and CPU time of rounds of (GB/s, CPU seconds per GiB)."""
    print(f"{what}: {max(rate for rate, _ in rounds):.2f} GB/s, {min(cpu for _, cpu in rounds):.2f} CPU-s/GiB")  # noqa: T201


def by_sockets(folder: Path, *, num_bytes: int, rounds: int) -> tuple[list[tuple[float, float]], ...]:
    """From here to another process, and back into memory that is used already; each round a version of its own."""
    here, (mine, theirs) = CopyFolder(folder / "here"), multiprocessing.Pipe()
    receiver = multiprocessing.get_context("spawn").Process(target=_receive, args=[str(folder / "there"), theirs])
    receiver.start()
    peer, sent, read = mine.recv(), [], []
    buffer = np.ones(num_bytes, np.uint8)

    def timed(work: Callable[[], object]) -> tuple[float, float]:
        mine.send("cpu")
        before_s, began_s = _cpu_s() + mine.recv(), time.perf_counter()
        work()
        wall_s = time.perf_counter() - began_s
        mine.send("cpu")
        return num_bytes / wall_s / 1e9, (_cpu_s() + mine.recv() - before_s) / num_bytes * (1 << 30)

    for version in range(rounds):
        header = _header(version, num_bytes)
        new = here.begin(header)
        new.buffer[:] = 7
        new.publish()
        sent.append(timed(partial(send_copies, here, header.state, numbers=[0], to=peer, patience_s=60.0)))
        copy, whole = ShardCopy(header=header, peer=peer, node_id=""), header.entries[0]
        wanted = [(whole.name, whole.kind, whole.box)]
        read.append(timed(partial(read_copy, copy, wanted=wanted, into=[[buffer]], patience_s=60.0)))
        here.drop_generations(0)
        mine.send("drop")
        mine.recv()
    mine.send("end")
    receiver.join()
    return sent, read


def _receive(folder: str, commands: Connection) -> None:
    copies = CopyFolder(Path(folder))
    listener = Listener(copies, host="127.0.0.1", patience_s=60.0)
    commands.send(listener.peer)
    while (command := commands.recv()) != "end":
        if command == "drop":
            copies.drop_generations(0)
        commands.send(_cpu_s())


def by_ray(*, num_bytes: int, rounds: int) -> list[tuple[float, float]]:
    """Two chunks in flight, CRC-32 at both ends; CPU time of both actors and of both raylets."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1, resources={"other": 1})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")

    @ray.remote(num_cpus=1, resources={"other": 1})
    class Store:
        def __init__(self) -> None:
            self._buffer = np.zeros(num_bytes, np.uint8)

        def write(self, at: int, data: Any, checksum: int) -> bool:
            self._buffer[at : at + len(data)] = data
            return zlib.crc32(data) == checksum

        def cpu_s(self) -> float:
            return _cpu_s()

    store, data, found = Store.remote(), np.full(num_bytes, 7, np.uint8), []
    raylets = [node.all_processes["raylet"][0].process.pid for node in cluster.list_all_nodes()]
    for _ in range(rounds):
        before_s = _cpu_s() + ray.get(store.cpu_s.remote()) + sum(map(_cpu_s_of, raylets))
        began_s, flying = time.perf_counter(), []
        for at in range(0, num_bytes, CHUNK_BYTES):
            part = data[at : at + CHUNK_BYTES]
            if len(flying) == 2:
                assert ray.get(flying.pop(0))
            flying.append(store.write.remote(at, part, zlib.crc32(part)))
        assert all(ray.get(flying))
        wall_s = time.perf_counter() - began_s
        after_s = _cpu_s() + ray.get(store.cpu_s.remote()) + sum(map(_cpu_s_of, raylets))
        found.append((num_bytes / wall_s / 1e9, (after_s - before_s) / num_bytes * (1 << 30)))
    ray.shutdown()
    cluster.shutdown()
    return found


def _header(version: int, num_bytes: int) -> ShardHeader:
    box = Box(offsets=(0,), sizes=(num_bytes,))
    entry = ShardEntry(name="weight", kind="parameter", box=box, dtype="uint8", start_byte=0)
    state = StateId(version=version, generation=0)
    return ShardHeader(state=state, number=0, num_devices=1, entries=(entry,), num_bytes=num_bytes, scalars={})


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _cpu_s_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
