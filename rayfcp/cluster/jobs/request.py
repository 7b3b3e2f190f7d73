"""What Ray is asked to run: the command, its environment, its name."""

import shlex
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rayfcp import __version__
from rayfcp.config import Config, ConfigError

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
