"""Workers without a model: real actors and processes that start fast and hold calls for as long as a test wants."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import ray

from rayfcp.cluster.facts.devices import DeviceFacts
from rayfcp.cluster.facts.nodes import NodeWatch
from rayfcp.cluster.recovery.history import History
from rayfcp.cluster.recovery.stores import CopyStores, copies_name
from rayfcp.cluster.runtime.on_ray import RayRuntime
from rayfcp.cluster.workers.starting import WorkerStart
from rayfcp.cluster.workers.worker import DeviceWorker
from rayfcp.config import Config
from rayfcp.execute.reports import Beat, CollectiveFailedError
from rayfcp.values.state import Box, ShardEntry, ShardHeader, StateId
from tests.cluster.runs import run_config
from tests.waiting import until


class LightEngine:
    """Stand-in for the engine in a worker, with exchanges that last until they are aborted."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def beat(self) -> Beat:
        return Beat(step=1, num_done=0, waiting=False)

    def abort(self) -> None:
        self.aborted.set()


class LightWorker(DeviceWorker):
    """Loads no torch."""

    def open(self) -> DeviceFacts:
        self._engine = LightEngine()
        self._copies = self._open_copies(ray.get_runtime_context().get_node_id())
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

    def folder(self) -> str:
        """Of the copies on its node."""
        assert self._copies is not None
        return str(self._copies.path)

    def keep(self, header: ShardHeader, data: np.ndarray) -> None:
        """Accept it as a copy of its own shard."""
        assert self._copies is not None
        new = self._copies.begin(header)
        new.buffer[:] = data
        new.publish()


def shard(
    version: int, *, number: int = 0, num_bytes: int = 2500, generation: int = 0, num_devices: int = 1
) -> ShardHeader:
    """A header of one vector of bytes."""
    box = Box(offsets=(0,), sizes=(num_bytes,))
    return ShardHeader(
        state=StateId(version=version, generation=generation),
        number=number,
        num_devices=num_devices,
        entries=(ShardEntry(name="weight", kind="parameter", box=box, dtype="uint8", start_byte=0),),
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
    copies = copies_name(run_key, light_history(config))
    return WorkerStart(
        config, runtime=runtime, device="cpu", data_dir="", vocab_size=256, run_key=run_key, copies=copies
    )


def light_history(config: Config) -> History:
    """Of a run with one generation."""
    Path(config.run_dir).mkdir(parents=True, exist_ok=True)
    history = History(Path(config.run_dir))
    if history.newest < 0:
        history.begin(0, version=0)
    return history


def light_stores(config: Config, *, run_key: str) -> CopyStores:
    runtime = RayRuntime()
    nodes = NodeWatch(runtime, every_s=config.elastic.look_every_s)
    return CopyStores(config, runtime=runtime, run_key=run_key, history=light_history(config), nodes=nodes)


@contextmanager
def free_cpus_again() -> Iterator[None]:
    """Check that as many devices are free afterwards as before."""
    before = ray.available_resources().get("CPU", 0)
    yield
    until(lambda: ray.available_resources().get("CPU", 0) >= before)
