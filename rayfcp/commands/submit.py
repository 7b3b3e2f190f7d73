"""`rayfcp submit`: runs as jobs of a Ray cluster: submitted with `JobSubmissionClient`, followed and stopped."""

import argparse
import logging
import os
import shlex
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlparse

from rayfcp import __version__
from rayfcp.commands import WRONG_INPUT, CommandFailedError, add_config
from rayfcp.compare.arguments import positive
from rayfcp.config import Config, ConfigError, load_config

USAGE = """\
rayfcp submit CONFIG [key=value ...] --address URL [options]
       rayfcp submit --follow JOB_ID --address URL
       rayfcp submit --stop JOB_ID --address URL"""

EPILOG = """\
The working directory (without what git ignores, runs/ and .venv/) and rayfcp itself are uploaded; the cluster needs
Python and rayfcp's dependencies. Results are written to run.dir, an absolute path that all nodes share. The exit code
is that of `rayfcp train` on the cluster. A stopped job saves a checkpoint, from which the same command resumes.

Example:  rayfcp submit jobs/quickstart.yaml run.dir=/shared/runs/one --address http://127.0.0.1:8265
"""

ADDRESS = "RAY_API_SERVER_ADDRESS"
OVERRULING = (ADDRESS, "RAY_ADDRESS")
"""Variables with which Ray would override the user's address."""


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rayfcp submit`."""
    parser.usage, parser.epilog = USAGE, EPILOG
    add_config(parser)
    parser.add_argument(
        "--address",
        metavar="URL",
        default=os.environ.get(ADDRESS),
        help=f"URL of the cluster's dashboard, e.g. http://127.0.0.1:8265 (default: ${ADDRESS})",
    )
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--follow", metavar="JOB_ID", help="show the output of a job submitted before")
    either.add_argument("--stop", metavar="JOB_ID", help="ask a job to save a checkpoint and exit, and wait for it")
    parser.add_argument("--no-wait", action="store_true", help="submit (or stop) and return at once")
    parser.add_argument(
        "--working-dir", metavar="DIR", default=".", help="directory to upload (default: the current one)"
    )
    parser.add_argument("--no-package", action="store_true", help="use the rayfcp installed on the cluster")
    parser.add_argument(
        "--env",
        metavar="KEY[=VALUE]",
        action="append",
        default=[],
        help="environment variable of the job; KEY alone copies its local value",
    )
    pip = parser.add_mutually_exclusive_group()
    pip.add_argument("--pip", metavar="PACKAGE", action="append", default=[], help="package to install for the job")
    pip.add_argument("--requirements", metavar="FILE", help="requirements file to install for the job")
    parser.add_argument(
        "--python", metavar="NAME", default="python", help="Python interpreter on the cluster's head (default: python)"
    )
    parser.add_argument("--job-id", metavar="JOB_ID", help="job id (default: run.name and random characters)")
    parser.add_argument(
        "--grace",
        metavar="SECONDS",
        type=positive,
        default=600,
        help="time for the checkpoint of a stop (default: 600)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Submit, follow or stop.

    Raises:
        ConfigError: The user's input is wrong, as found here or by the job.
        CommandFailedError: The job failed, or was stopped.
    """
    if arguments.address is None:
        raise ConfigError(
            "--address is missing, must be the URL of the cluster's dashboard; e.g. http://127.0.0.1:8265"
        )
    for name in OVERRULING:
        os.environ.pop(name, None)
    if arguments.follow or arguments.stop:
        if arguments.overrides:
            raise ConfigError(
                f"{arguments.overrides[0]!r} cannot be combined with --follow or --stop; omit one of them"
            )
        _existing(arguments)
    else:
        _new(arguments)


def _new(arguments: argparse.Namespace) -> None:
    if not arguments.overrides:
        raise ConfigError("CONFIG is missing; give a YAML file, e.g. jobs/quickstart.yaml")
    path, *overrides = arguments.overrides
    address, working_dir = arguments.address, Path(arguments.working_dir).expanduser().resolve()
    config = load_config(path, overrides=overrides)
    if not working_dir.is_dir():
        raise ConfigError(f"--working-dir {arguments.working_dir!r} is not a directory; give one that holds CONFIG")
    request = job_request(
        config,
        Path(path),
        overrides=overrides,
        working_dir=working_dir,
        env=dict(_variable(text) for text in arguments.env),
        pip=read_requirements(arguments.requirements) if arguments.requirements else arguments.pip,
        python=arguments.python,
        job_id=arguments.job_id,
        grace_s=arguments.grace,
    )
    client, job_id = job_client(address), request["submission_id"]
    request["runtime_env"] |= packages(working_dir, with_rayfcp=not arguments.no_package)
    with clear_errors(address):
        client.submit_job(**request)
    _log(f"job {job_id} submitted; results go to {config.run_dir}")
    if arguments.no_wait:
        _log(f"follow it: rayfcp submit --follow {job_id} --address {address}")
        _log(f"stop it:   rayfcp submit --stop {job_id} --address {address}")
    else:
        _follow(client, job_id, address)


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name:
        raise ConfigError(f"--env {text!r} must have the form KEY=VALUE, or KEY to copy its local value")
    if equals:
        return name, value
    if name not in os.environ:
        raise ConfigError(f"--env {name} is not set; export it, or give --env {name}=VALUE")
    return name, os.environ[name]


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


def _existing(arguments: argparse.Namespace) -> None:
    client = job_client(arguments.address)
    if arguments.follow:
        with clear_errors(arguments.address):
            client.get_job_info(arguments.follow)
        _follow(client, arguments.follow, arguments.address)
        return
    with clear_errors(arguments.address):
        running = client.stop_job(arguments.stop)
        if not running:
            _log(f"job {arguments.stop} has already ended")
            return
        _log(f"job {arguments.stop} will save a checkpoint after the current step and exit")
        if arguments.no_wait:
            return
        while not (status := client.get_job_status(arguments.stop)).is_terminal():
            time.sleep(POLL_S)
        _log(f"job {arguments.stop} ended: {status}")


def _follow(client: Any, job_id: str, address: str) -> None:
    end = JobFollower(client, job_id, address=address).to_the_end()
    if end.status == "SUCCEEDED":
        _log(f"job {job_id} succeeded")
    elif end.status == "STOPPED":
        raise CommandFailedError(
            f"job {job_id} was stopped before the end; the same command resumes from its checkpoint"
        )
    elif end.driver_exit_code == WRONG_INPUT:
        raise ConfigError(f"job {job_id} ended with exit code {WRONG_INPUT}: its input is wrong, see its output above")
    elif end.driver_exit_code is None:  # Ray ended it or never started it
        raise CommandFailedError(f"job {job_id} failed: {' '.join((end.message or '').split())[:500]}")
    else:
        raise CommandFailedError(f"job {job_id} failed with exit code {end.driver_exit_code}, see its output above")


class JobFollower:
    """Writes the output of a job to stdout."""

    def __init__(self, client: Any, job_id: str, *, address: str) -> None:
        self._client, self._id, self._address = client, job_id, address
        self._written = 0
        self._stop_requested = False

    def to_the_end(self) -> Any:
        """Follow the job to its end, across broken connections; return Ray's `JobDetails`. The first Ctrl-C stops the
        job; a second one only ends the following.

        Raises:
            KeyboardInterrupt: the second one.
            CommandFailedError: the job server is gone.
        """
        import asyncio

        lost_since_s: float | None = None
        while True:
            try:
                asyncio.run(self._tail())
                details = self._client.get_job_info(self._id)
                if details.status.is_terminal():
                    return details
                lost_since_s = None
                time.sleep(RETRY_S)
            except KeyboardInterrupt:
                if self._stop_requested:
                    raise
                self._stop()
            except Exception as error:  # whatever a broken connection raises
                lost_since_s = lost_since_s or time.monotonic()
                if time.monotonic() - lost_since_s > LOST_S:
                    raise CommandFailedError(
                        f"{self._address} no longer answers ({' '.join(str(error).split())[:200]}); job {self._id} may "
                        f"still be running: rayfcp submit --follow {self._id}"
                    ) from error
                time.sleep(RETRY_S)

    async def _tail(self) -> None:
        """Write the output beyond what was written before: a new connection starts with the first character."""
        position = 0
        async for text in self._client.tail_job_logs(self._id):
            new = text[max(0, self._written - position) :]
            position += len(text)
            if new:
                self._written += len(new)
                sys.stdout.write(new)
                sys.stdout.flush()

    def _stop(self) -> None:
        self._stop_requested = True
        _log(
            f"stopping job {self._id}: it saves a checkpoint after the step under way and exits; Ctrl-C again only "
            "ends the following"
        )
        try:
            self._client.stop_job(self._id)
        except Exception as error:  # whatever a broken connection raises
            self._stop_requested = False
            _log(f"job {self._id} could not be stopped ({error}); Ctrl-C tries again")


def _log(text: str) -> None:
    sys.stderr.write(f"rayfcp: {text}\n")
    sys.stderr.flush()
