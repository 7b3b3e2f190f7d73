"""`rayfcp submit`: arguments and messages."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from rayfcp.commands import WRONG_INPUT, CommandFailedError, add_config
from rayfcp.compare.arguments import positive
from rayfcp.config import ConfigError, load_config

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
    from rayfcp.cluster.jobs import clear_errors, job_client, job_request, packages, read_requirements

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


def _existing(arguments: argparse.Namespace) -> None:
    from rayfcp.cluster.jobs import await_end, clear_errors, job_client

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
        if not arguments.no_wait:
            _log(f"job {arguments.stop} ended: {await_end(client, arguments.stop).status}")


def _follow(client: Any, job_id: str, address: str) -> None:
    from rayfcp.cluster.jobs import JobFollower, JobServerLostError

    try:
        end = JobFollower(client, job_id, out=sys.stdout, log=_log).to_the_end()
    except JobServerLostError as error:
        raise CommandFailedError(
            f"{address} no longer answers ({error}); job {job_id} may still be running: rayfcp submit --follow {job_id}"
        ) from error
    if end.status == "SUCCEEDED":
        _log(f"job {job_id} succeeded")
    elif end.status == "STOPPED":
        raise CommandFailedError(
            f"job {job_id} was stopped before the end; the same command resumes from its checkpoint"
        )
    elif end.exit_code == WRONG_INPUT:
        raise ConfigError(f"job {job_id} ended with exit code {WRONG_INPUT}: its input is wrong, see its output above")
    else:
        code = "" if end.exit_code is None else f" with exit code {end.exit_code}"
        why = f": {' '.join(end.message.split())[:500]}" if end.exit_code is None else ", see its output above"
        raise CommandFailedError(f"job {job_id} failed{code}{why}")


def _log(text: str) -> None:
    sys.stderr.write(f"rayfcp: {text}\n")
    sys.stderr.flush()
