"""Facts of this machine, without heavy imports, which a node may lack; and of a cluster, by one task per node."""

import glob
import importlib.util
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_get
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayfcp.cluster.doctor.facts import (
    DASHBOARD_MODULES,
    REQUIRED,
    Accelerators,
    ClusterFacts,
    Needs,
    NodeFacts,
    Storage,
)
from rayfcp.config import ConfigError

PROBE_S = 180
CONNECT_S = 5.0
SHM = Path("/dev/shm")


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
    return NodeFacts(
        name=name or socket.gethostname(),
        python=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
        versions={package: _version(package) for package in REQUIRED},
        missing_modules=tuple(module for module in DASHBOARD_MODULES if importlib.util.find_spec(module) is None),
        accelerators=accelerators(device),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        shm_bytes=shutil.disk_usage(SHM).total if SHM.is_dir() else 0,
        num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        storage=None if run_dir is None else storage_facts(run_dir, marker=marker),
        num_paths=len(paths),
        missing_paths=tuple(path for path in paths if not _readable(path)),
        reaches_driver=None if driver is None else _connects(driver),
    )


def accelerators(device: str) -> Accelerators:
    """Devices that torch sees in a process without visible-device restrictions."""
    command = ["env", "-u", "CUDA_VISIBLE_DEVICES", "-u", "ASCEND_RT_VISIBLE_DEVICES"]
    command += [f"PYTHONPATH={os.pathsep.join(filter(None, sys.path))}", sys.executable]
    command += ["-m", "rayfcp.cluster.doctor.probe", device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Accelerators(kind=device, error=f"torch could not be started: {error}")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return Accelerators(kind=device, error=f"torch ended with code {done.returncode}: {last}")
    found = json.loads(done.stdout.splitlines()[-1])
    return Accelerators(**{**found, "names": tuple(found["names"])})


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


def _readable(path: str) -> bool:
    found = glob.glob(str(Path(path).expanduser()))  # noqa: PTH207  a pattern that may contain folders
    return bool(found) and all(os.access(each, os.R_OK) for each in found)


def _connects(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=CONNECT_S).close()
    except OSError:
        return False
    return True


NODE_S = 300.0
"""Time for the slowest node to answer; torch is imported there."""


def cluster_facts(address: str, *, needs: Needs) -> tuple[tuple[NodeFacts, ...], ClusterFacts]:
    """Facts of all nodes, the driver's first, and of the cluster as a whole.

    Raises:
        ConfigError: no Ray accepts connections at `address`.
    """
    url = _join(address)
    try:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        here = ray.get_runtime_context().get_node_id()
        nodes.sort(key=lambda node: (node["NodeID"] != here, node["NodeManagerHostname"], node["NodeID"]))
        with ExitStack() as ending:
            found, broken = _examine_nodes(nodes, needs=needs, ending=ending)
        cluster = ClusterFacts(
            address=address,
            resources=ray.cluster_resources(),
            autoscales=_autoscales(),
            dashboard=bool(url),
            broken=broken,
        )
    finally:
        ray.shutdown()
    return found, cluster


def _join(address: str) -> str | None:
    """Connect; return the dashboard's address, if any."""
    import logging

    try:
        context = ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError, RayError) as error:
        why = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"--address is {address!r}, no Ray accepts connections there ({why}); check it on a node of the cluster "
            "with 'ray status', and set RAY_AUTH_MODE=token if it wants a token"
        ) from error
    shown: str | None = context.dashboard_url
    return shown


def _examine_nodes(
    nodes: list[dict[str, Any]], *, needs: Needs, ending: ExitStack
) -> tuple[tuple[NodeFacts, ...], Mapping[str, str]]:
    """Facts of each node, and the errors of nodes that could not be examined."""
    listener = ending.enter_context(socket.create_server((ray.util.get_node_ip_address(), 0)))
    arguments = {
        "device": needs.device,
        "run_dir": needs.run_dir,
        "paths": needs.paths,
        "marker": _marker(needs, ending),
        "driver": listener.getsockname()[:2],
    }
    facts_of: Any = machine_facts  # Ray's types do not cover functions with keywords
    task = ray.remote(facts_of)
    refs = [
        task.options(num_cpus=0, max_retries=0, scheduling_strategy=_on(node)).remote(
            **arguments, name=_name(node, nodes)
        )
        for node in nodes
    ]
    found: list[NodeFacts] = []
    broken: dict[str, str] = {}
    for node, ref in zip(nodes, refs, strict=True):
        try:
            facts: NodeFacts = ray.get(ref, timeout=NODE_S)
            found.append(_with_clock(replace(facts, devices=node["Resources"]), node))
        except RayError as error:
            broken[_name(node, nodes)] = (str(error).strip().splitlines() or [type(error).__name__])[-1]
    return tuple(found), broken


def _marker(needs: Needs, ending: ExitStack) -> str | None:
    """File where the run directory would be, for other nodes to look for; None if none can be written."""
    if needs.run_dir is None:
        return None
    try:
        return ending.enter_context(
            tempfile.NamedTemporaryFile(dir=home_of(needs.run_dir), prefix=".rayfcp-doctor-")
        ).name
    except OSError:
        return None


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


def _autoscales() -> bool:
    """True if an autoscaler has reported to this cluster."""
    from ray.autoscaler.v2.utils import is_autoscaler_v2

    return bool(_internal_kv_get(b"__autoscaling_status")) or is_autoscaler_v2()
