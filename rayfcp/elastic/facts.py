"""Facts of elastic decisions: devices, losses, announced departures, and the limits of the run."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from rayfcp.config import Config


class Cause(StrEnum):
    """Why a step did not end."""

    DIED = "died"
    NODE = "node"
    HUNG = "hung"
    COLLECTIVE = "collective"
    MEMORY = "memory"
    PROGRAM = "program"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A healthy device, in use or standing by. `place`: identity that a replacement worker shares with a lost one; the
    node if empty."""

    id: str
    node_id: str
    place: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A device of `place` was lost at `at_s`."""

    place: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The model fits with `num_stages` stages on at least `min_ranks` ranks."""

    num_stages: int
    min_ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits that the user sets. `num_stages`: used where devices suffice.

    A place that lost `flap_losses` devices within `flap_window_s` must be stable for `flap_calm_s`, doubled after each
    further loss, before the run grows by it: growing earlier costs another recovery, later an idle device.
    `gather_s`: time that ready devices wait for starting ones, so that the run grows once. `replace_s`: time that the
    others wait for a fresh process on a device whose process was lost, which imports in 7 to 16 s unless it stood by.
    `collective_retries`: consecutive retries with all devices.
    """

    min_devices: int
    max_devices: int
    num_stages: int = 1
    tensor_parallel: int = 1
    wait_s: float = 600.0
    max_recoveries: int = 5
    grow: bool = True
    collective_retries: int = 3
    gather_s: float = 15.0
    replace_s: float = 60.0
    flap_losses: int = 3
    flap_window_s: float = 600.0
    flap_calm_s: float = 30.0

    @classmethod
    def of(cls, config: Config) -> "Limits":
        """Return the configured limits; without `elastic.min_workers` and a range of workers, one rank suffices."""
        cluster, elastic = config.cluster, config.elastic
        least = cluster.min_workers if isinstance(cluster.num_workers, tuple) else cluster.tensor_parallel
        return cls(
            min_devices=least if elastic.min_workers is None else elastic.min_workers,
            max_devices=cluster.max_workers,
            num_stages=cluster.pipeline_stages,
            tensor_parallel=cluster.tensor_parallel,
            wait_s=elastic.wait_s,
            max_recoveries=elastic.max_recoveries,
            grow=elastic.grow,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Failure of a step. `lost`: ids of devices that are gone or abandoned; `message`: the observation."""

    cause: Cause
    lost: tuple[str, ...] = ()
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setbacks:
    """Recoveries since the last finished step, and the most recent consecutive ones after collectives that failed
    without a lost device."""

    recoveries: int = 0
    collectives: int = 0

    def after(self, failure: Failure) -> "Setbacks":
        """Count one more recovery."""
        alone = failure.cause is Cause.COLLECTIVE and not failure.lost
        return replace(self, recoveries=self.recoveries + 1, collectives=self.collectives + 1 if alone else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """State between two steps or after a failure; times on one clock.

    `devices`: the healthy ones. `active`: devices of the generation by number, including lost ones, a multiple of its
    `num_stages` x tensor-parallel devices; empty before the first generation. `fits`: possible numbers of stages.
    `leaving`: nodes that will be removed, and when. `starting_since_s`: for each worker that is not ready yet;
    `replacing_since_s`: for those of them that replace processes on devices of the last generation, during a recovery.
    `waiting_since_s`: None unless the run waits for devices. `setbacks`: without `failure`.
    """

    limits: Limits
    devices: tuple[Device, ...]
    fits: tuple[Fit, ...] = (Fit(num_stages=1),)
    active: tuple[str, ...] = ()
    num_stages: int = 1
    leaving: Mapping[str, float] = field(default_factory=dict)
    starting_since_s: tuple[float, ...] = ()
    replacing_since_s: tuple[float, ...] = ()
    losses: tuple[Loss, ...] = ()
    failure: Failure | None = None
    setbacks: Setbacks = Setbacks()
    waiting_since_s: float | None = None

    @property
    def lost(self) -> frozenset[str]:
        """Active devices that are gone or abandoned."""
        healthy = {device.id for device in self.devices} - set(self.failure.lost if self.failure else ())
        return frozenset(self.active) - healthy
