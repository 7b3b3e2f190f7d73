"""What controller and workers tell each other of places. Plain values: reading them needs no torch."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rayfcp.values import ShardHeader

LOOPBACK = "127.0.0.1"


class CannotGoOnError(RuntimeError):
    """The run must end, though nothing in it is broken: storage, numbers or the cluster do not permit it to go on. One
    clear line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """Where a worker is and what its device has. `peak_flops` is None where no table knows it.

    `worker_id` stays the worker's for as long as it lives, whatever its number; `pid`: its process on that node. `slot`
    names the accelerator, which a worker that comes after it may get again; CPUs have none.
    """

    node_id: str
    device: str
    memory_bytes: int
    peak_flops: float | None
    worker_id: str = ""
    pid: int = 0
    slot: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A complete copy of a shard, and the actor that holds it: `holder.pieces.remote(state, number, wanted=...)` gives
    parts of it."""

    header: ShardHeader
    holder: Any
    holder_id: str


class Waited(StrEnum):
    """Result of waiting until a keeper has a copy."""

    KEPT = "kept"
    LATE = "late"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the devices of a generation meet: a key-value store, and what world they make. `layers_of_stage` as in
    `ClusterSpec`."""

    host: str
    port: int
    generation: int
    num_ranks: int
    num_stages: int
    tensor_parallel: int
    layers_of_stage: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A run that ended by itself or was stopped.

    Medians over steps of the controller's own work: `controller_cpu_s`, CPU time of its thread, and
    `controller_s`, wall time but for waiting for plans and workers, others' pressure on the cores included.
    """

    last_step: int
    checkpoint: str | None
    controller_s: float = 0.0
    controller_cpu_s: float = 0.0
