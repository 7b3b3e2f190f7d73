"""The controller's surroundings: the `Runtime` protocol and the errors of calls.

`RayRuntime` (`on_ray.py`) implements it on Ray; the tests once more in one process with a virtual clock and injected
faults (`tests/simulated`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Protocol

from rayfcp.telemetry.metrics import Mirror
from rayfcp.telemetry.serving import Page
from rayfcp.values import ClusterSpec

LOOPBACK = "127.0.0.1"


class CallError(RuntimeError):
    """A call to an actor returned no value, or a reference has lost it."""


class TaskFailedError(CallError):
    """The actor's code raised `cause`; `trace` holds its traceback. The cause is a `CallError` if the runtime failed in
    turn, or an argument of the call is lost."""

    def __init__(self, cause: Exception, *, trace: str = "") -> None:
        super().__init__(str(cause))
        self.cause, self.trace = cause, trace


class ActorLostError(CallError):
    """The actor is dead or unreachable (`node_lost`: with its node); the message is one clause."""

    def __init__(self, reason: str, *, node_lost: bool = False) -> None:
        super().__init__(reason)
        self.node_lost = node_lost


class NoAnswerError(CallError):
    """No answer came within the time limit."""


class Role(StrEnum):
    """Kinds of actors. Workers and copy stores outlive the controller that started them."""

    CONTROLLER = "controller"
    WORKER = "worker"
    STORE = "store"
    PLANNER = "planner"
    BATCH_PLANNER = "batch planner"
    DECODER = "decoder"
    READER = "reader"


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSpec:
    """An actor to be started. One with a `name` is detached and can be found by that name.

    It runs in `reservation`, with its `resources`, or on `node_id`; without either the runtime decides. `nsight`:
    options of `nsys profile`, which starts its process; empty without.
    """

    role: Role
    name: str = ""
    reservation: Any = None
    resources: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    node_id: str = ""
    nsight: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """Ids of living nodes, draining ones included. `draining`: end of draining nodes on `Runtime.epoch_s`, None if
    unknown."""

    alive: frozenset[str] = frozenset()
    draining: Mapping[str, float | None] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Address of a generation's key-value store, and its devices."""

    host: str
    port: int
    cluster: ClusterSpec


class Flag(Protocol):
    """Set once, by any thread."""

    def set(self) -> None: ...

    def is_set(self) -> bool: ...

    def wait(self, timeout: float | None = None, /) -> bool:
        """Wait until it is set, for `timeout` seconds at most; whether it is."""


class Task(Protocol):
    """A function that runs in the background."""

    def done(self) -> bool: ...

    def result(self) -> Any:
        """Wait for its end; its value."""


class Runtime(Protocol):
    """Actors, calls, devices, nodes, time and threads.

    A *handle* stands for an actor: `handle.method.remote(*args, **kwargs)` calls it and returns a *reference* at once;
    `handle.method.options(num_returns=n).remote(...)` returns n. Arguments that are references are replaced by their
    values where the call runs. Calls from one caller to one actor begin in order. A *reservation* holds a device.
    """

    # Actors.

    def start(self, spec: ActorSpec, /, *args: Any, **kwargs: Any) -> Any:
        """Handle of a new actor with these constructor arguments; returns before it runs."""

    def end(self, handle: Any) -> None:
        """Kill an actor, started or not; it is not restarted."""

    def named(self, prefix: str) -> dict[str, Any]:
        """Handles of the living actors whose name starts with `prefix`, by the rest of their names, sorted."""

    def new_id(self) -> str:
        """Short id that no actor or reservation had before."""

    # Calls.

    def wait(self, refs: Sequence[Any], *, timeout_s: float | None = None) -> list[Any]:
        """Wait until one of `refs` is ready, and return all that are; none on timeout."""

    def wait_all(self, refs: Sequence[Any], *, timeout_s: float | None = None) -> list[Any]:
        """Wait until all of `refs` are ready, or the time is over, and return those that are."""

    def get(self, ref: Any, *, timeout_s: float | None = None) -> Any:
        """Value of a reference.

        Raises:
            TaskFailedError, ActorLostError, NoAnswerError, CallError: it has none.
        """

    def put(self, value: Any) -> Any:
        """Reference of a value."""

    # Devices and nodes.

    def resources(self) -> dict[str, float]:
        """Resources of all living nodes together, by name."""

    def reserve(self, resources: Mapping[str, float], *, name: str) -> Any:
        """Reservation of these resources on one node, which outlives the caller; granted once they are free. Names are
        unique."""

    def granted(self, reservation: Any) -> Any:
        """Reference that is ready once the reservation is granted."""

    def release(self, reservation: Any) -> None:
        """Give it back, granted or not; actors in it end."""

    def reservations(self, prefix: str, *, granted: bool = False) -> dict[str, Any]:
        """Reservations whose name starts with `prefix`, by key; only those that are `granted`, or all."""

    def key(self, reservation: Any) -> str:
        """Id of a reservation, the same in every process."""

    def request(self, resources: Mapping[str, float], *, count: int) -> None:
        """Request `count` times these resources in total from the autoscaler; 0 withdraws. Never raises."""

    def nodes(self) -> NodeView: ...

    def here(self) -> str:
        """Id of the caller's node."""

    def rendezvous(self, cluster: ClusterSpec, *, alone: bool) -> tuple[Rendezvous, Any]:
        """New rendezvous for a generation, `alone`: with all devices on the caller's node; and the server, which serves
        for as long as the object is kept."""

    # Time.

    def now_s(self) -> float:
        """Monotonic clock."""

    def epoch_s(self) -> float:
        """Seconds since the epoch."""

    def cpu_s(self) -> float:
        """CPU time of the calling thread."""

    # Threads.

    def flag(self) -> Flag: ...

    def every(self, period_s: float, call: Callable[[], object], *, name: str) -> Callable[[], None]:
        """Call `call` every `period_s`, for the first time after one period; its errors are logged. Return a function
        that stops it."""

    def background(self, name: str) -> Callable[..., Task]:
        """Function that runs `call(*args)` given to it in the background, one after the other."""

    # Telemetry.

    def serve(self, pages: Mapping[str, Page], /, **options: Any) -> Any:
        """Serve the pages of a run, as `rayfcp.telemetry.serving.RunServer` does with these options."""

    def mirror(self) -> Mirror | None:
        """Mirror of the metrics in the cluster's own monitoring, if any."""
