"""`Runtime` on Ray's public core API."""

import importlib
import logging
import re
import socket
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.runtime_env import RuntimeEnv
from ray.util import metrics
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rayfcp.cluster.runtime import (
    LOOPBACK,
    ActorLostError,
    ActorSpec,
    CallError,
    NoAnswerError,
    NodeView,
    Rendezvous,
    Role,
    Task,
    TaskFailedError,
)
from rayfcp.telemetry.metrics import Mirror
from rayfcp.telemetry.names import DEGREE_BUCKETS, METRICS, PREFIX, Metric, MetricKind
from rayfcp.telemetry.serving import Page, RunServer
from rayfcp.values import ClusterSpec

logger = logging.getLogger(__name__)

NAMESPACE = "rayfcp"

MANY, LINGER_S = 64, 0.002
"""With more references than `MANY`, `wait` collects for another `LINGER_S` what becomes ready after the first: each
call of `ray.wait` takes time in proportion to the references, so that one call for each would take quadratic time
(2.05 s instead of 0.24 s for 4,096)."""

_ACTORS: dict[Role, tuple[str, str, dict[str, Any]]] = {
    Role.CONTROLLER: ("jobs.controller", "Controller", {"num_cpus": 1, "max_concurrency": 3}),
    Role.WORKER: ("workers.worker", "DeviceWorker", {"concurrency_groups": {"control": 2, "copies": 4}}),
    Role.STORE: ("recovery.store", "CopyStore", {"num_cpus": 0, "max_concurrency": 6}),
    Role.PLANNER: ("actors.planner", "Planner", {"num_cpus": 1}),
    Role.BATCH_PLANNER: ("actors.planner", "BatchPlanner", {"num_cpus": 1}),
    Role.DECODER: (
        "actors.decoders",
        "Decoder",
        {"num_cpus": 1, "max_restarts": -1, "max_task_retries": 2, "scheduling_strategy": "SPREAD"},
    ),
    Role.READER: ("actors.readers", "Reader", {"num_cpus": 0}),
}
"""Module, class and options of each role's actors. Of a worker's threads, `control` always answers, `copies` may wait,
and all else runs in one thread."""

EXPORT_EVERY_S = 4.0
"""Ray's agents forget a gauge that was not set for two of their intervals, 20 s by default."""

Key = tuple[str, tuple[tuple[str, str], ...]]

_COLORS = re.compile(r"\x1b\[[0-9;]*m")


class RayRuntime:
    """The cluster that this process is connected to. `worker`, `store`: classes of these actors, `DeviceWorker` and
    `CopyStore` if None."""

    def __init__(self, worker: type | None = None, store: type | None = None) -> None:
        self._given = {Role.WORKER: worker, Role.STORE: store}
        self._classes: dict[Role, Any] = {}

    def __reduce__(self) -> Any:
        return RayRuntime, tuple(self._given.values())

    def start(self, spec: ActorSpec, /, *args: Any, **kwargs: Any) -> Any:
        if spec.role not in self._classes:
            self._classes[spec.role] = self._class_of(spec.role)
        return self._classes[spec.role].options(**_options(spec)).remote(*args, **kwargs)

    def end(self, handle: Any) -> None:
        with suppress(RayError):
            ray.kill(handle, no_restart=True)

    def named(self, prefix: str) -> dict[str, Any]:
        listed = ray.util.list_named_actors(all_namespaces=True)
        names = sorted(each["name"] for each in listed if each["namespace"] == NAMESPACE)
        found = {}
        for name in names:
            if name.startswith(prefix):
                with suppress(ValueError):  # ended meanwhile
                    found[name.removeprefix(prefix)] = ray.get_actor(name, namespace=NAMESPACE)
        return found

    def new_id(self) -> str:
        return uuid.uuid4().hex[:8]

    def wait(self, refs: Sequence[Any], *, timeout_s: float | None = None) -> list[Any]:
        if not refs:
            return []
        first, left = ray.wait(list(refs), num_returns=1, timeout=timeout_s)
        if not first or not left:
            return list(first)
        linger_s = LINGER_S if len(left) > MANY else 0
        more, _ = ray.wait(left, num_returns=len(left), timeout=linger_s)
        return [*first, *more]

    def wait_all(self, refs: Sequence[Any], *, timeout_s: float | None = None) -> list[Any]:
        return list(ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)[0]) if refs else []

    def get(self, ref: Any, *, timeout_s: float | None = None) -> Any:
        try:
            return ray.get(ref, timeout=timeout_s)
        except RayTaskError as error:
            cause = error.cause
            raise TaskFailedError(
                CallError(plain(str(cause))) if isinstance(cause, RayError) else cause, trace=plain(str(error))
            ) from error
        except RayActorError as error:
            of_node = isinstance(error, ActorUnavailableError) or "node has died" in str(error)
            raise ActorLostError(_reason(error), node_lost=of_node) from error
        except GetTimeoutError as error:
            raise NoAnswerError(f"no answer within {timeout_s} s") from error
        except RayError as error:
            raise CallError(plain(str(error))) from error

    def put(self, value: Any) -> Any:
        return ray.put(value)

    def resources(self) -> dict[str, float]:
        found: dict[str, float] = ray.cluster_resources()
        return found

    def reserve(self, resources: Mapping[str, float], *, name: str) -> PlacementGroup:
        group: PlacementGroup = placement_group([dict(resources)], strategy="PACK", name=name, lifetime="detached")
        return group

    def granted(self, reservation: PlacementGroup) -> Any:
        return reservation.ready()

    def release(self, reservation: PlacementGroup) -> None:
        remove_placement_group(reservation)

    def reservations(self, prefix: str, *, granted: bool = False) -> dict[str, PlacementGroup]:
        return {
            key: PlacementGroup(ray.PlacementGroupID.from_hex(key))
            for key, each in placement_group_table().items()
            if each["name"].startswith(prefix)
            and (each["state"] == "CREATED" if granted else each["state"] != "REMOVED")
        }

    def key(self, reservation: PlacementGroup) -> str:
        key: str = reservation.id.hex()
        return key

    def request(self, resources: Mapping[str, float], *, count: int) -> None:
        try:
            request_resources(bundles=[dict(resources) for _ in range(count)])
        except (RayError, RuntimeError, OSError) as error:
            logger.warning("the autoscaler cannot be asked: %s", error)

    def nodes(self) -> NodeView:
        alive = frozenset(node["NodeID"] for node in ray.nodes() if node["Alive"])
        # Ray offers drain notices to its own libraries only, by this name.
        deadlines = ray._private.state.state.get_draining_nodes()
        draining = {node: deadline_ms / 1000 if deadline_ms > 0 else None for node, deadline_ms in deadlines.items()}
        return NodeView(
            alive=alive, draining=MappingProxyType({node: draining[node] for node in draining.keys() & alive})
        )

    def here(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def rendezvous(self, cluster: ClusterSpec, *, alone: bool) -> tuple[Rendezvous, Any]:
        import torch.distributed as dist

        # Listens at this address only.
        host = LOOPBACK if alone else ray.util.get_node_ip_address()
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        listener.bind((host, 0))
        listener.listen()
        port = listener.getsockname()[1]
        store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        return Rendezvous(host=host, port=port, cluster=cluster), store

    def now_s(self) -> float:
        return time.monotonic()

    def epoch_s(self) -> float:
        return time.time()

    def cpu_s(self) -> float:
        return time.thread_time()

    def flag(self) -> threading.Event:
        return threading.Event()

    def every(self, period_s: float, call: Callable[[], object], *, name: str) -> Callable[[], None]:
        closing = threading.Event()

        def run() -> None:
            while not closing.wait(period_s) and ray.is_initialized():
                try:
                    call()
                except Exception as error:  # Ray may be shut down just now
                    if not closing.is_set():
                        logger.warning("%s: %s", name, error)

        threading.Thread(target=run, name=name, daemon=True).start()
        return closing.set

    def background(self, name: str) -> Callable[..., Task]:
        return ThreadPoolExecutor(max_workers=1, thread_name_prefix=name).submit

    def serve(self, pages: Mapping[str, Page], /, **options: Any) -> RunServer:
        return RunServer(pages, **options)

    def mirror(self) -> Mirror | None:
        try:
            return RayMirror()
        except Exception:
            logger.warning("ray.util.metrics is not there; the run has its own endpoint only", exc_info=True)
            return None

    def _class_of(self, role: Role) -> Any:
        """Class of a role's actors for `ray.remote`; imported here, since its module uses this one or loads much."""
        module, name, options = _ACTORS[role]
        found: Any = self._given.get(role)
        return ray.remote(**options)(found or getattr(importlib.import_module(f"rayfcp.cluster.{module}"), name))


def _options(spec: ActorSpec) -> dict[str, Any]:
    """Options of one actor: its name, and where it runs."""
    found: dict[str, Any] = {}
    if spec.name:
        found |= {"name": spec.name, "namespace": NAMESPACE, "lifetime": "detached"}
    if spec.node_id:
        found["scheduling_strategy"] = NodeAffinitySchedulingStrategy(spec.node_id, soft=False)
    if spec.nsight:
        found["runtime_env"] = RuntimeEnv(nsight=dict(spec.nsight))
    if spec.reservation is not None:
        wanted = dict(spec.resources)
        found |= {
            "num_cpus": wanted.pop("CPU"),
            "num_gpus": wanted.pop("GPU", 0.0),
            "resources": wanted,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(placement_group=spec.reservation),
        }
    return found


def plain(text: str) -> str:
    """Without terminal colors."""
    return _COLORS.sub("", text)


def _reason(error: RayActorError) -> str:
    """Clause in which Ray says why an actor ended."""
    text = " ".join(plain(str(error)).split())
    found = re.search(r"The actor is dead because (.*?)\.(\s|$)", text)
    return found[1] if found else text[:300]


class RayMirror(Mirror):
    """All `METRICS` under their names through `ray.util.metrics`, which Ray exports with `ray_` in front.

    Exports from a thread of its own, so that steps wait for nothing: every gauge periodically, which keeps its
    series alive and lets that of a rank that left end; of counters the increments, since Ray's agents add them up.

    The first failure is logged and ends the mirror: no training ends for a metric.
    """

    def __init__(self) -> None:
        self._metrics = {metric.name: _made(metric) for metric in METRICS}
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._gauges: dict[Key, float] = {}
        self._amounts: defaultdict[Key, float] = defaultdict(float)
        self._observed: Counter[tuple[Key, float]] = Counter()
        self._thread = threading.Thread(target=self._run, name="ray-metrics", daemon=True)
        self._thread.start()

    def set(self, name: str, value: float, *, labels: Mapping[str, str]) -> None:
        with self._lock:
            self._gauges[name, tuple(labels.items())] = value

    def add(self, name: str, amount: float, *, labels: Mapping[str, str]) -> None:
        with self._lock:
            self._amounts[name, tuple(labels.items())] += amount

    def observe(self, name: str, value: float, *, labels: Mapping[str, str], times: int) -> None:
        with self._lock:
            self._observed[(name, tuple(labels.items())), value] += times

    def remove(self, name: str, *, labels: Mapping[str, str]) -> None:
        with self._lock:
            self._gauges.pop((name, tuple(labels.items())), None)

    def close(self) -> None:
        """Export the last values, and no more."""
        self._closing.set()
        self._thread.join(timeout=EXPORT_EVERY_S)

    def _run(self) -> None:
        try:
            while not self._closing.wait(EXPORT_EVERY_S):
                self._export()
            self._export()
        except Exception:
            logger.warning("ray.util.metrics failed; from here on the run has its own endpoint only", exc_info=True)

    def _export(self) -> None:
        with self._lock:
            gauges, amounts, observed = dict(self._gauges), self._amounts, self._observed
            self._amounts, self._observed = defaultdict(float), Counter()
        for (name, labels), value in gauges.items():
            self._metrics[name].set(value, tags=dict(labels))
        for (name, labels), amount in amounts.items():
            if amount > 0:  # Ray refuses 0
                self._metrics[name].inc(amount, tags=dict(labels))
        for ((name, labels), value), times in observed.items():
            for _ in range(times):
                self._metrics[name].observe(value, tags=dict(labels))


def _made(metric: Metric) -> Any:
    name, tags = PREFIX + metric.name, ("run", *metric.labels)
    text = f"{metric.help} ({metric.unit})"
    if metric.kind is MetricKind.HISTOGRAM:
        return metrics.Histogram(name, text, boundaries=[float(bound) for bound in DEGREE_BUCKETS], tag_keys=tags)
    return (metrics.Gauge if metric.kind is MetricKind.GAUGE else metrics.Counter)(name, text, tag_keys=tags)
