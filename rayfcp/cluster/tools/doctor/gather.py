"""Facts of this machine, without heavy imports, which a node may lack; and of a cluster, by one task per node."""

import glob
import importlib.util
import json
import logging
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_get
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayfcp.cluster.tools.doctor.facts import (
    DASHBOARD_MODULES,
    REQUIRED,
    Accelerators,
    AccessFacts,
    ClusterFacts,
    NodeFacts,
    Storage,
)
from rayfcp.config import Config, ConfigError
from rayfcp.values.devices import DEVICES
from rayfcp.values.state import ITEMSIZES

PROBE_S = 180
CONNECT_S = 5.0
SHM = Path("/dev/shm")
TOKEN_FILE = "~/.ray/auth_token"
NODE_S = 300.0
"""Time for the slowest node to answer; torch is imported there."""


def machine_facts(
    *,
    device: str,
    run_dir: str | None = None,
    paths: Sequence[str] = (),
    marker: str | None = None,
    driver: tuple[str, int] | None = None,
    name: str = "",
) -> NodeFacts:
    """Facts of this machine. `paths` must be readable; `marker`: file that the driver wrote beside `run_dir`; `driver`:
    address at which it listens."""
    names = [setting.name for info in DEVICES.values() for setting in info.environment]
    return NodeFacts(
        name=name or socket.gethostname(),
        python=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
        versions={package: _version(package) for package in REQUIRED},
        missing_modules=tuple(module for module in DASHBOARD_MODULES if importlib.util.find_spec(module) is None),
        accelerators=accelerators(device),
        environment={name: os.environ[name] for name in names if name in os.environ},
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        shm_bytes=shutil.disk_usage(SHM).total if SHM.is_dir() else 0,
        num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        storage=None if run_dir is None else storage_facts(run_dir, marker=marker),
        num_paths=len(paths),
        missing_paths=tuple(path for path in paths if not _is_readable(path)),
        reaches_driver=None if driver is None else _can_connect(driver),
    )


def local_paths(config: Config) -> tuple[str, ...]:
    """Paths of data and model, without URLs and names of the model hub or of rayfcp."""
    data = config.data
    paths = [path for source in (data, *data.sources.values()) for path in source.paths]
    named = dict.fromkeys([*paths, config.model.path, data.tokenizer, data.processor, data.cache_dir])
    paths = [path for path in named if path is not None and "://" not in path]
    return tuple(path for path in paths if path.startswith(("/", ".", "~")) or Path(path).exists())


def model_size(config: Config) -> tuple[int, int] | None:
    """Trained parameters of the model, and bytes of frozen ones; None if its folder, or a package, is missing here."""
    from rayfcp.cluster.tools.preview import model_of

    try:
        model = model_of(config)
        return model.num_trained, model.frozen_bytes(ITEMSIZES[config.model.dtype])
    except (ConfigError, ImportError):
        return None


def accelerators(device: str) -> Accelerators:
    """Devices that torch sees in a process without visible-device restrictions."""
    hidden = [info.visible_devices for info in DEVICES.values() if info.visible_devices]
    command = ["env", *(part for name in hidden for part in ("-u", name))]
    command += [f"PYTHONPATH={os.pathsep.join(filter(None, sys.path))}", sys.executable]
    command += ["-m", "rayfcp.cluster.tools.doctor.probe", device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Accelerators(kind=device, error=f"torch could not be started: {error}")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return Accelerators(kind=device, error=f"torch ended with code {done.returncode}: {last}")
    found = json.loads(done.stdout.splitlines()[-1])
    return Accelerators(**{**found, **{each: tuple(found[each]) for each in ("names", "recurrence")}})


def home_of(run_dir: str) -> Path:
    """Nearest existing folder at or above the run directory."""
    path = Path(run_dir).expanduser().absolute()
    return next(each for each in (path, *path.parents) if each.is_dir())


def storage_facts(run_dir: str, *, marker: str | None) -> Storage:
    """Try to write where the run directory would be; nothing is left there."""
    folder = home_of(run_dir)
    if folder == Path(folder.anchor):
        return Storage(folder=str(folder), error=f"{run_dir} has no existing folder above it")
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".rayfcp-doctor-") as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        return Storage(folder=str(folder), error=f"{error.strerror or error}")
    return Storage(
        folder=str(folder),
        free_bytes=free_bytes,
        sees_marker=None if marker is None else Path(marker).exists(),
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _is_readable(path: str) -> bool:
    found = glob.glob(str(Path(path).expanduser()))  # noqa: PTH207  a pattern that may contain folders
    return bool(found) and all(os.access(each, os.R_OK) for each in found)


def _can_connect(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=CONNECT_S).close()
    except OSError:
        return False
    return True


def access_facts(config: Config) -> AccessFacts:
    """Return access facts from the environment; never the token itself."""
    named = os.environ.get("RAY_AUTH_TOKEN_PATH") or TOKEN_FILE
    file = Path(named).expanduser()
    found = "RAY_AUTH_TOKEN" if os.environ.get("RAY_AUTH_TOKEN") else named if file.is_file() else ""
    return AccessFacts(
        mode=os.environ.get("RAY_AUTH_MODE", "").lower(),
        token_from=found,
        token_open=found == named and bool(file.stat().st_mode & 0o077),
        metrics_port_taken=bool(config.metrics.port) and not _is_free(config.metrics.host, config.metrics.port),
    )


def _is_free(host: str, port: int) -> bool:
    try:
        socket.create_server((host, port)).close()
    except OSError:
        return False
    return True


def cluster_facts(address: str, *, asked: Mapping[str, Any]) -> tuple[tuple[NodeFacts, ...], ClusterFacts]:
    """Facts of all nodes, the driver's first, and of the cluster as a whole. `asked`: arguments of `machine_facts`.

    Raises:
        ConfigError: no Ray accepts connections at `address`.
    """
    from ray.autoscaler.v2.utils import is_autoscaler_v2

    try:
        context = ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError, RayError) as error:
        why = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"--address is {address!r}, no Ray accepts connections there ({why}); check it on a node of the cluster "
            "with 'ray status', and set RAY_AUTH_MODE=token if it wants a token"
        ) from error
    try:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        here = ray.get_runtime_context().get_node_id()
        nodes.sort(key=lambda node: (node["NodeID"] != here, node["NodeManagerHostname"], node["NodeID"]))
        found, broken = _examine_nodes(nodes, asked=asked)
        cluster = ClusterFacts(
            address=address,
            resources=ray.cluster_resources(),
            autoscales=bool(_internal_kv_get(b"__autoscaling_status")) or is_autoscaler_v2(),
            dashboard=bool(context.dashboard_url),
            broken=broken,
        )
    finally:
        ray.shutdown()
    return found, cluster


def _examine_nodes(
    nodes: list[dict[str, Any]], *, asked: Mapping[str, Any]
) -> tuple[tuple[NodeFacts, ...], Mapping[str, str]]:
    """Facts of each node, and the errors of nodes that could not be examined."""
    facts_of: Any = machine_facts  # Ray's types do not cover functions with keywords
    found: list[NodeFacts] = []
    broken: dict[str, str] = {}
    with ExitStack() as ending:
        listener = ending.enter_context(socket.create_server((ray.util.get_node_ip_address(), 0)))
        marker = None  # a file where the run directory would be, for other nodes to look for
        if "run_dir" in asked:
            with suppress(OSError):
                folder = home_of(asked["run_dir"])
                marker = ending.enter_context(tempfile.NamedTemporaryFile(dir=folder, prefix=".rayfcp-doctor-")).name
        driver, task = listener.getsockname()[:2], ray.remote(num_cpus=0, max_retries=0)(facts_of)
        refs = [
            task.options(scheduling_strategy=_on(node)).remote(
                **asked, marker=marker, driver=driver, name=_name(node, nodes)
            )
            for node in nodes
        ]
        for node, ref in zip(nodes, refs, strict=True):
            try:
                facts: NodeFacts = ray.get(ref, timeout=NODE_S)
                found.append(_with_clock(replace(facts, devices=node["Resources"]), node))
            except RayError as error:
                broken[_name(node, nodes)] = (str(error).strip().splitlines() or [type(error).__name__])[-1]
    return tuple(found), broken


def _with_clock(facts: NodeFacts, node: dict[str, Any]) -> NodeFacts:
    """Add the clock difference, by a task of its own on a node whose processes are running."""
    clock = ray.remote(_now_s).options(num_cpus=0, scheduling_strategy=_on(node))
    before_s = time.time()
    there_s = ray.get(clock.remote(), timeout=NODE_S)
    after_s = time.time()
    return replace(facts, clock_ahead_s=there_s - (before_s + after_s) / 2, clock_within_s=(after_s - before_s) / 2)


def _now_s() -> float:
    return time.time()


def _on(node: dict[str, Any]) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)


def _name(node: dict[str, Any], nodes: list[dict[str, Any]]) -> str:
    """Host name, with the start of the node's id if several nodes are on one host."""
    host: str = node["NodeManagerHostname"]
    alone = sum(each["NodeManagerHostname"] == host for each in nodes) == 1
    return host if alone else f"{host}/{node['NodeID'][:6]}"
