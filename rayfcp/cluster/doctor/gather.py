"""Facts of the machine on which this runs. Nothing heavy is imported: a node may lack it."""

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
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from rayfcp.cluster.doctor.facts import Accelerators, NodeFacts, Storage
from rayfcp.cluster.doctor.required import DASHBOARD_MODULES, REQUIRED

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
    """Of this machine. `paths` shall be readable; `marker` is a file that the driver wrote beside `run_dir`; at
    `driver` it listens."""
    return NodeFacts(
        name=name or socket.gethostname(),
        python=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
        versions={package: _version(package) for package in REQUIRED},
        missing_modules=tuple(module for module in DASHBOARD_MODULES if importlib.util.find_spec(module) is None),
        accelerators=accelerators(device),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        shm_bytes=shutil.disk_usage(SHM).total if SHM.is_dir() else 0,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        storage=None if run_dir is None else storage_facts(run_dir, marker=marker),
        missing_paths=tuple(path for path in paths if not _readable(path)),
        reaches_driver=None if driver is None else _connects(driver),
    )


def accelerators(device: str) -> Accelerators:
    """What torch sees, asked of a process that sees all devices."""
    command = ["env", "-u", "CUDA_VISIBLE_DEVICES", "-u", "ASCEND_RT_VISIBLE_DEVICES"]
    command += [f"PYTHONPATH={os.pathsep.join(filter(None, sys.path))}", sys.executable]
    command += ["-m", "rayfcp.cluster.doctor.probe", device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Accelerators(kind=device, error=f"torch could not be asked: {error}")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return Accelerators(kind=device, error=f"torch ended with code {done.returncode}: {last}")
    found = json.loads(done.stdout.splitlines()[-1])
    return Accelerators(**{**found, "names": tuple(found["names"])})


def home_of(run_dir: str) -> Path:
    """The nearest folder above that is there."""
    path = Path(run_dir).expanduser().absolute()
    return next(each for each in (path, *path.parents) if each.is_dir())


def storage_facts(run_dir: str, *, marker: str | None) -> Storage:
    """Whether files can be written where the run's folder would be; none is left there."""
    folder = home_of(run_dir)
    if folder == Path(folder.anchor):
        return Storage(folder=str(folder), error=f"{run_dir} has no folder above it that is there")
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
    found = glob.glob(str(Path(path).expanduser()))  # noqa: PTH207  a pattern with folders of its own
    return bool(found) and all(os.access(each, os.R_OK) for each in found)


def _connects(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=CONNECT_S).close()
    except OSError:
        return False
    return True
