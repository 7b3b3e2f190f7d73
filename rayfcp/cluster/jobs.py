"""Runs as jobs of a Ray cluster: submitted with `JobSubmissionClient`, followed and stopped."""

import asyncio
import logging
import shlex
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO
from urllib.parse import urlparse

from rayfcp import __version__
from rayfcp.config import Config, ConfigError

HOME = Path(__file__).resolve().parents[1]
"""The rayfcp package that runs here."""

EXCLUDES = (".git", ".venv", "venv", "runs", "__pycache__", "node_modules", ".*_cache")
"""Files that never go with a job, besides those that git ignores."""

STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
"""Ray ends a job by SIGTERM, and by SIGKILL after this many seconds, by default 3."""

TOKEN_REMEDY = (
    "set RAY_AUTH_MODE=token and give the cluster's token in ~/.ray/auth_token, RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN"
)
NOISY = ("ray.dashboard.modules.job.sdk", "ray.dashboard.modules.dashboard_sdk")

POLL_S = 0.2
RETRY_S = 1.0
LOST_S = 60.0
"""Time without job server before following is given up; the job does not notice."""


def job_request(
    config: Config,
    path: Path,
    *,
    overrides: Sequence[str],
    working_dir: Path,
    env: Mapping[str, str] = MappingProxyType({}),
    pip: Sequence[str] = (),
    python: str = "python",
    job_id: str | None = None,
    grace_s: int = 600,
) -> dict[str, Any]:
    """Return arguments of Ray's `submit_job`, without packages, for `rayfcp train` of the configuration file `path`.

    `config` is that of `path` and `overrides`. `pip`: packages that the job needs beside those of the nodes.
    `grace_s`: time for a stopped job to save its state.

    Raises:
        ConfigError: the file does not go with the job, or the run directory would be lost with it.
    """
    if not Path(config.run_dir).is_absolute():
        raise ConfigError(
            f"run.dir is {config.run_dir!r}, must be an absolute path for a job, whose working directory is a copy "
            f"that goes with it; add run.dir=/shared/{config.run_dir} on storage that all nodes share"
        )
    root = working_dir.resolve()
    if not path.resolve().is_relative_to(root):
        raise ConfigError(
            f"CONFIG {str(path)!r} is not in the working directory {str(root)!r} that goes with the job; name a folder "
            "above it in --working-dir"
        )
    inside = path.resolve().relative_to(root).as_posix()
    runtime_env: dict[str, Any] = {"env_vars": {STOP_WAIT: str(grace_s), **env}}
    if pip:
        runtime_env["pip"] = list(pip)
    return {
        "submission_id": job_id or f"{config.run.name}-{uuid.uuid4().hex[:8]}",
        "entrypoint": shlex.join(["exec", python, "-m", "rayfcp", "train", inside, *overrides]),
        "runtime_env": runtime_env,
        "metadata": {"job_name": config.run.name, "run_dir": config.run_dir, "rayfcp_version": __version__},
    }


def packages(root: Path, *, with_rayfcp: bool) -> dict[str, Any]:
    """Entries of `runtime_env` for the working directory `root` and, `with_rayfcp`, the rayfcp that runs here, unless
    `root` has one of its own.

    rayfcp is a package by itself, so that compiled kernels, which are cached beside it on the nodes, serve all jobs.
    """
    excludes = list(EXCLUDES)
    own = root / HOME.name
    if HOME.is_relative_to(root):
        excludes.append(f"/{HOME.relative_to(root).as_posix()}")
    found: dict[str, Any] = {"working_dir": str(root), "excludes": excludes}
    if with_rayfcp and (own == HOME or not (own / "__init__.py").exists()):
        found["py_modules"] = [str(HOME)]
    return found


def read_requirements(path: str) -> tuple[str, ...]:
    """Requirements in a pip requirements file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--requirements {path!r} cannot be read: {error}; give a pip requirements file") from error
    return tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))


def job_client(address: str) -> Any:
    """Ray's `JobSubmissionClient` of the dashboard at `address`.

    Raises:
        ConfigError: no such URL, nothing answers there, or access is denied.
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


@contextmanager
def clear_errors(address: str) -> Iterator[None]:
    """Raise `ConfigError`, one line, in place of the job client's own errors."""
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
            f"--address is {address!r}, no Ray dashboard answers there; check host and port (8265 by default), that "
            "the head has 'ray[default]', and any port forwarding"
        ) from error
    except (RuntimeError, ValueError) as error:
        text = " ".join(str(error).split())
        if "does not exist" in text:
            raise ConfigError(
                f"--address {address}: no such job; 'ray job list --address {address}' names them"
            ) from error
        if "already exists" in text:
            raise ConfigError(f"--job-id is taken on {address}; choose another") from error
        raise ConfigError(f"--address {address}: the job server refused: {text[:300]}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """How a job ended. `exit_code` is None if Ray ended it or never started it."""

    status: str
    exit_code: int | None = None
    message: str = ""


class JobServerLostError(RuntimeError):
    """The job server does not answer any more."""


class JobFollower:
    """Writes the output of a job to `out`; `log` shows what is done about it."""

    def __init__(self, client: Any, job_id: str, *, out: TextIO, log: Callable[[str], None]) -> None:
        self._client, self._id, self._out, self._log = client, job_id, out, log
        self._written = 0
        self._stop_requested = False

    def to_the_end(self) -> JobEnd:
        """Follow the job to its end, across broken connections. The first Ctrl-C stops the job; a second one only ends
        the following.

        Raises:
            KeyboardInterrupt: the second one.
            JobServerLostError: the job server is gone.
        """
        lost_since_s: float | None = None
        while True:
            try:
                asyncio.run(self._tail())
                end = _job_end(self._client, self._id)
                if end is not None:
                    return end
                lost_since_s = None
                time.sleep(RETRY_S)
            except KeyboardInterrupt:
                if self._stop_requested:
                    raise
                self._stop()
            except Exception as error:  # whatever a broken connection raises
                lost_since_s = lost_since_s or time.monotonic()
                if time.monotonic() - lost_since_s > LOST_S:
                    raise JobServerLostError(" ".join(str(error).split())[:200]) from error
                time.sleep(RETRY_S)

    async def _tail(self) -> None:
        """Write the output beyond what was written before: a new connection starts with the first character."""
        position = 0
        async for text in self._client.tail_job_logs(self._id):
            new = text[max(0, self._written - position) :]
            position += len(text)
            if new:
                self._written += len(new)
                self._out.write(new)
                self._out.flush()

    def _stop(self) -> None:
        self._stop_requested = True
        self._log(
            f"stopping job {self._id}: it saves a checkpoint after the step under way and exits; Ctrl-C again only "
            "ends the following"
        )
        try:
            self._client.stop_job(self._id)
        except Exception as error:  # whatever a broken connection raises
            self._stop_requested = False
            self._log(f"job {self._id} could not be stopped ({error}); Ctrl-C tries again")


def _job_end(client: Any, job_id: str) -> JobEnd | None:
    details = client.get_job_info(job_id)
    if not details.status.is_terminal():
        return None
    return JobEnd(status=str(details.status), exit_code=details.driver_exit_code, message=details.message or "")


def await_end(client: Any, job_id: str) -> JobEnd:
    """Wait for the end of a job that was stopped, without its output."""
    while (end := _job_end(client, job_id)) is None:
        time.sleep(POLL_S)
    return end
