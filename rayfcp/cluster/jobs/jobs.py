"""What travels to the cluster with a job: the working directory's own files.

What Ray is asked to run: the command, its environment, its name.

The cluster's job server: reached, asked, and its refusals in one line.
"""

import logging
import os
import shlex
import subprocess
import tempfile
import uuid
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlparse

from rayfcp import __version__
from rayfcp.config import Config, ConfigError

MIB = 1 << 20
MAX_BYTES = 100 * MIB
"""Ray keeps packages in the memory of its control service; data belongs on storage that all nodes share."""

LEFT_OUT = frozenset(
    {".git", ".venv", "venv", "runs", "__pycache__", "node_modules", ".pytest_cache", ".mypy_cache", ".ruff_cache"}
)
"""Folders that never travel."""

LARGEST_NAMED = 3
EPOCH = (1980, 1, 1, 0, 0, 0)
"""The same files make the same package, whenever they were written."""


HOME = Path(__file__).resolve().parents[2]
"""The package that runs here."""


def own_files(root: Path) -> list[Path]:
    """Files below `root` that travel, relative to it and sorted: in a git work tree those that git does not ignore,
    elsewhere all; never those of `LEFT_OUT`, nor the rayfcp that runs here, which travels by itself."""
    listed = _git_files(root)
    files = _walked(root) if listed is None else listed
    home = HOME.relative_to(root) if HOME.is_relative_to(root) else None
    return sorted(
        path
        for path in files
        if not LEFT_OUT.intersection(path.parts)
        and not (home is not None and path.is_relative_to(home))
        and (root / path).is_file()
    )


def brings_rayfcp(root: Path) -> bool:
    """Whether `root` holds a rayfcp of its own, which jobs in it import first."""
    other = root / HOME.name
    return (other / "__init__.py").exists() and other != HOME


def write_package(target: Path, *, root: Path) -> int:
    """A zip of the working directory `root`; bytes of its files.

    Raises:
        ConfigError: more than `MAX_BYTES`.
    """
    content = {path.as_posix(): root / path for path in own_files(root)}
    sizes = {name: path.stat().st_size for name, path in content.items()}
    _check_size(root, sizes)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as package:
        for name, path in sorted(content.items()):
            entry = zipfile.ZipInfo(name, date_time=EPOCH)
            entry.external_attr = (path.stat().st_mode & 0o777) << 16
            package.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return sum(sizes.values())


def _git_files(root: Path) -> list[Path] | None:
    """Tracked and new files that no .gitignore names; None where git has no work tree."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except OSError:
        return None
    if done.returncode:
        return None
    return [Path(os.fsdecode(name)) for name in done.stdout.split(b"\0") if name]


def _walked(root: Path) -> list[Path]:
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        found += [(Path(folder) / name).relative_to(root) for name in names]
    return found


def _check_size(root: Path, sizes: dict[str, int]) -> None:
    total = sum(sizes.values())
    if total <= MAX_BYTES:
        return
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:LARGEST_NAMED]
    raise ConfigError(
        f"--working-dir {str(root)!r} has {total / MIB:.0f} MiB, must have at most {MAX_BYTES // MIB} MiB to travel "
        "with a job; put data on storage that all nodes share, or name a smaller folder (largest: "
        f"{_named(largest, sizes)})"
    )


def _named(names: Iterable[str], sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {sizes[name] / MIB:.0f} MiB" for name in names)


STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
"""Ray ends a job by SIGTERM, and by SIGKILL after so many seconds, 3 if the job's environment does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """What a user says of a job beside the run's configuration.

    `grace_s`: what a stopped job gets to save its state. `pip`: packages that the job's processes need beside what the
    nodes have.
    """

    working_dir: Path
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    pip: tuple[str, ...] = ()
    python: str = "python"
    job_id: str | None = None
    grace_s: int = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """The arguments of Ray's `submit_job`, its package left out."""

    job_id: str
    entrypoint: str
    runtime_env: Mapping[str, Any]
    metadata: Mapping[str, str]


def job_request(config: Config, path: Path, *, overrides: Sequence[str], options: JobOptions) -> JobRequest:
    """`rayfcp train` of the configuration file `path` on the cluster, `config` being what it and `overrides` give.

    Raises:
        ConfigError: the file does not travel with the job, or the run's folder would be lost with it.
    """
    if not Path(config.run_dir).is_absolute():
        raise ConfigError(
            f"run.dir is {config.run_dir!r}, must be an absolute path for a job, whose working directory is a copy "
            f"that goes with it; add run.dir=/shared/{config.run_dir} on storage that all nodes share"
        )
    root = options.working_dir.resolve()
    if not path.resolve().is_relative_to(root):
        raise ConfigError(
            f"CONFIG {str(path)!r} is not in the working directory {str(root)!r} that goes with the job; name a folder "
            "above it in --working-dir"
        )
    inside = path.resolve().relative_to(root).as_posix()
    runtime_env: dict[str, Any] = {"env_vars": {STOP_WAIT: str(options.grace_s), **options.env}}
    if options.pip:
        runtime_env["pip"] = list(options.pip)
    return JobRequest(
        job_id=options.job_id or f"{config.run.name}-{uuid.uuid4().hex[:8]}",
        entrypoint=shlex.join(["exec", options.python, "-m", "rayfcp", "train", inside, *overrides]),
        runtime_env=runtime_env,
        metadata={"job_name": config.run.name, "run_dir": config.run_dir, "rayfcp_version": __version__},
    )


def read_requirements(path: str) -> tuple[str, ...]:
    """The lines of a requirements file that name something.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--requirements {path!r} cannot be read: {error}; give a pip requirements file") from error
    return tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))


TOKEN_REMEDY = (
    "set RAY_AUTH_MODE=token and give the cluster's token in ~/.ray/auth_token, RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN"
)
NOISY = ("ray.dashboard.modules.job.sdk", "ray.dashboard.modules.dashboard_sdk")


def job_client(address: str) -> Any:
    """Ray's `JobSubmissionClient` of the dashboard at `address`.

    Raises:
        ConfigError: no such URL, nothing answers there, or it does not let us in.
    """
    url = urlparse(address)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(
            f"--address is {address!r}, must be the URL of the cluster's dashboard, e.g. http://127.0.0.1:8265"
        )
    from ray.job_submission import JobSubmissionClient

    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    with clear_errors(address):
        return JobSubmissionClient(address)


def submit(client: Any, request: JobRequest, *, working_dir: Path, with_rayfcp: bool, address: str) -> int:
    """Uploads the working directory, beside it (`with_rayfcp`) the rayfcp that runs here, unless the directory has one
    of its own, and starts the job. rayfcp is a package by itself: machine code of its kernels, kept beside it on the
    nodes, serves all jobs that bring the same. Bytes of the directory's files.

    Raises:
        ConfigError: too large a working directory, or a request that the cluster refuses.
    """
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "working_dir.zip"
        num_bytes = write_package(package, root=working_dir.resolve())
        runtime_env = {**request.runtime_env, "working_dir": str(package)}
        if with_rayfcp and not brings_rayfcp(working_dir.resolve()):
            runtime_env |= {"py_modules": [str(HOME)], "excludes": ["__pycache__"]}
        with clear_errors(address):
            client.submit_job(
                entrypoint=request.entrypoint,
                submission_id=request.job_id,
                runtime_env=runtime_env,
                metadata=dict(request.metadata),
            )
    return num_bytes


@contextmanager
def clear_errors(address: str) -> Iterator[None]:
    """What the job server answers to a user's mistake, as one line.

    Raises:
        ConfigError: in place of the client's own errors.
    """
    import requests
    from ray.exceptions import AuthenticationError

    try:
        yield
    except AuthenticationError as error:
        missing = "required" in error.message.split(":")[0]
        what = "wants a token and was given none" if missing else "refuses the token that it was given"
        raise ConfigError(f"--address {address}: the cluster {what}; {TOKEN_REMEDY}") from error
    except (ConnectionError, requests.exceptions.RequestException) as error:
        raise ConfigError(
            f"--address is {address!r}, no Ray dashboard answers there; check host and port (8265 unless told "
            "otherwise), that the head has 'ray[default]', and any port forwarding"
        ) from error
    except RuntimeError as error:
        text = str(error)
        if "does not exist" in text:
            raise ConfigError(
                f"--address {address}: no such job; 'ray job list --address {address}' names them"
            ) from error
        if "already exists" in text:
            raise ConfigError(f"--job-id is taken on {address}; choose another") from error
        raise ConfigError(f"--address {address}: the job server refused: {' '.join(text.split())[:300]}") from error


def told_size(num_bytes: int) -> str:
    """For people.

    >>> told_size(3 << 20)
    '3.0 MiB'
    """
    return f"{num_bytes / MIB:.1f} MiB"
