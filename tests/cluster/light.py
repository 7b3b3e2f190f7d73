"""Workers without a model: real actors and processes that start fast and hold calls for as long as a test wants."""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import ray

from rayfcp.cluster.recovery.replication import Pusher
from rayfcp.cluster.runtime.on_ray import RayRuntime
from rayfcp.cluster.workers.facts import DeviceFacts
from rayfcp.cluster.workers.starting import WorkerStart
from rayfcp.cluster.workers.worker import DeviceWorker
from rayfcp.config import Config
from rayfcp.elastic.recoverable import ShardCopy
from rayfcp.execute.reports import Beat, CollectiveFailedError
from rayfcp.execute.state.copies import HeldCopies
from rayfcp.values.state import Box, ShardEntry, ShardHeader, StateId
from tests.cluster.runs import run_config
from tests.waiting import PATIENCE_S, until


class LightEngine:
    """Stand-in for the engine in a worker, with exchanges that last until they are aborted."""

    def __init__(self) -> None:
        self.copies, self.aborted = HeldCopies(), threading.Event()

    def beat(self) -> Beat:
        return Beat(step=1, num_done=0, waiting=False)

    def abort(self) -> None:
        self.aborted.set()


class LightWorker(DeviceWorker):
    """Loads no torch."""

    def open(self) -> DeviceFacts:
        self._engine = LightEngine()
        self._pusher = Pusher(self._engine.copies, settle=lambda: None, chunk_bytes=1000, patience_s=PATIENCE_S)
        self._facts = DeviceFacts(
            node_id=ray.get_runtime_context().get_node_id(),
            device="cpu",
            memory_bytes=1,
            peak_flops=None,
            worker_id=self._worker_id,
            pid=os.getpid(),
        )
        return self._facts

    def exchange(self) -> None:
        """Waits for others until aborted."""
        self._engine.aborted.wait()
        raise CollectiveFailedError("aborted")

    def rest(self) -> None:
        """Forget that it was aborted."""
        self._engine.aborted.clear()

    def fail(self, error: Exception) -> None:
        raise error

    def never(self) -> None:
        """Hang in a way that no abort ends."""
        threading.Event().wait()

    def thread(self) -> tuple[int, int]:
        """Of this process, and whichever calls this."""
        return os.getpid(), threading.get_native_id()

    def value(self, value: int) -> int:
        return value

    def keep(self, header: ShardHeader, data: np.ndarray) -> None:
        """Accept it as a copy of its own shard."""
        self._engine.copies.put(header, np.array(data))
        self._pusher.offer(header, safe=None)


def shard(version: int, *, number: int = 0, num_bytes: int = 2500, generation: int = 0) -> ShardHeader:
    """A header of one vector of bytes."""
    box = Box(offsets=(0,), sizes=(num_bytes,))
    return ShardHeader(
        state=StateId(version=version, generation=generation),
        number=number,
        num_devices=1,
        entries=(ShardEntry(name="weight", kind="parameter", box=box, itemsize=1, start_byte=0),),
        num_bytes=num_bytes,
        scalars={},
    )


def bytes_of(header: ShardHeader) -> np.ndarray:
    """Drawn by version and number."""
    return np.random.default_rng([header.state.version, header.number]).integers(0, 256, header.num_bytes, np.uint8)


def light_config(folder: Path, *, name: str, num_workers: int, **elastic: float) -> Config:
    return run_config(folder, name=name, cluster={"num_workers": num_workers, "device": "cpu"}, elastic=elastic)


def light_start(config: Config, *, run_key: str, worker: type[DeviceWorker] = LightWorker) -> WorkerStart:
    runtime = RayRuntime(worker)
    return WorkerStart(config, runtime=runtime, device="cpu", data_dir="", vocab_size=256, run_key=run_key)


def copies_at(holders: Mapping[str, Any]) -> list[ShardCopy]:
    """Complete copies that these workers or snapshot stores hold, by names of theirs; the dead hold none."""
    calls = {id: holder.headers.remote() for id, holder in holders.items()}
    found: list[ShardCopy] = []
    for id, call in calls.items():
        with suppress(ray.exceptions.RayActorError, ray.exceptions.ActorUnavailableError):
            headers = ray.get(call, timeout=PATIENCE_S)
            found += [ShardCopy(header=header, holder=holders[id], holder_id=id) for header in headers]
    return found


@contextmanager
def free_cpus_again() -> Iterator[None]:
    """Check that as many devices are free afterwards as before."""
    before = ray.available_resources().get("CPU", 0)
    yield
    until(lambda: ray.available_resources().get("CPU", 0) >= before)
