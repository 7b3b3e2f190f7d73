"""What controller and workers tell each other of places. Plain values: reading them needs no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """Where a worker is and what its device has. `peak_flops` is None where no table knows it."""

    node_id: str
    host: str
    device: str
    memory_bytes: int
    peak_flops: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the ranks of a generation meet: a key-value store, and how many they are."""

    host: str
    port: int
    generation: int
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A run that ended by itself or was stopped. `controller_s`: median of the controller's own work per step,
    everything but waiting for plans and workers."""

    last_step: int
    checkpoint: str | None
    metrics_url: str
    controller_s: float
