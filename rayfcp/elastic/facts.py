"""Numbers in reasons.

What elastic choices go by: devices, what was lost, what is announced, what the run may do.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from rayfcp.config import Config


def counted(number: int, noun: str) -> str:
    """
    >>> counted(1, "device"), counted(2, "device")
    ('1 device', '2 devices')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class Cause(StrEnum):
    """Why a step did not end."""

    DIED = "died"
    NODE = "node"
    HUNG = "hung"
    COLLECTIVE = "collective"
    PROGRAM = "program"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A healthy device whose worker is ready since `ready_s`, in use or standing by. `place`: what stays when a worker
    is lost and another one comes there; the node if empty."""

    id: str
    node_id: str
    place: str = ""
    ready_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """A node that is announced to go at `deadline_s`."""

    node_id: str
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Starting:
    """A device whose worker is starting since `since_s`."""

    since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A device of `place` was lost at `at_s`."""

    place: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """With `num_stages` stages the model fits from `min_ranks` ranks on."""

    num_stages: int
    min_ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the user allows. `num_stages`: the number to run with where devices suffice.

    A place that lost `flap_losses` devices within `flap_window_s` has to stay calm for `flap_calm_s`, twice that after
    one more and so on, before the run grows by it. `gather_s`: how long devices that are ready wait
    for others that are starting, so that the run grows once. `collective_retries`: with all devices, one after the
    other.
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
    flap_losses: int = 3
    flap_window_s: float = 600.0
    flap_calm_s: float = 30.0

    @classmethod
    def of(cls, config: Config) -> "Limits":
        """As configured. Without `elastic.min_workers` and a range of workers, one rank of one stage is enough."""
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
    """What broke a step. `lost`: ids of devices that are gone or to be given up; `message`: what was seen."""

    cause: Cause
    lost: tuple[str, ...] = ()
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setbacks:
    """Since the last finished step: recoveries, and how many of them, one after the other and up to now, were for
    collectives that failed among living devices."""

    recoveries: int = 0
    collectives: int = 0

    def after(self, failure: Failure) -> "Setbacks":
        """The run goes on after one more failure."""
        alone = failure.cause is Cause.COLLECTIVE and not failure.lost
        return replace(self, recoveries=self.recoveries + 1, collectives=self.collectives + 1 if alone else 0)

    def after_step(self) -> "Setbacks":
        """A step was finished."""
        return Setbacks()


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that is known between two steps or after a failure; times on one clock.

    `devices`: the healthy ones. `active`: the generation's devices in the order of their numbers, the lost included;
    none before the first generation; a multiple of `num_stages`, the
    generation's, times tensor-parallel devices. `fits`: the numbers of stages that can be.
    `waiting_since_s`: since when the run waits for devices, None if it does not. `setbacks`: without `failure`.
    """

    limits: Limits
    devices: tuple[Device, ...]
    fits: tuple[Fit, ...] = (Fit(num_stages=1),)
    active: tuple[str, ...] = ()
    num_stages: int = 1
    leaving: tuple[Leaving, ...] = ()
    starting: tuple[Starting, ...] = ()
    losses: tuple[Loss, ...] = ()
    failure: Failure | None = None
    setbacks: Setbacks = Setbacks()
    waiting_since_s: float | None = None

    def __post_init__(self) -> None:
        if not any(fit.num_stages <= self.limits.num_stages for fit in self.fits):
            raise ValueError(
                f"fits is {self.fits}, must hold a number of stages up to limits.num_stages "
                f"({self.limits.num_stages}); give one, or end the run as the model fits nowhere"
            )
        per_rank = self.num_stages * self.limits.tensor_parallel
        if len(self.active) % per_rank:
            raise ValueError(
                f"active has {len(self.active)} devices, must have a multiple of num_stages x tensor_parallel "
                f"({per_rank}); give all of the generation, the lost included"
            )
        for name, ids in (("devices", [device.id for device in self.devices]), ("active", list(self.active))):
            if len(set(ids)) != len(ids):
                twice = next(each for each in ids if ids.count(each) > 1)
                raise ValueError(f"{name} has {twice!r} {ids.count(twice)} times, must have it once; leave one out")

    @property
    def lost(self) -> frozenset[str]:
        """Active devices that are gone or given up."""
        healthy = {device.id for device in self.devices} - set(self.failure.lost if self.failure else ())
        return frozenset(self.active) - healthy
