"""The cluster's job server: reached, asked, and its refusals in one line."""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from rayfcp.cluster.jobs.package import HOME, MIB, brings_rayfcp, write_package
from rayfcp.cluster.jobs.request import JobRequest
from rayfcp.config import ConfigError

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
