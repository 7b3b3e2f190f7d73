"""`rayfcp doctor`: arguments and output."""

import argparse
import json
import os
import socket
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rayfcp.config import ConfigError

if TYPE_CHECKING:
    from rayfcp.cluster.doctor.facts import AccessFacts, Facts, Finding, Needs

TEXT = "Check that a machine or cluster is ready, and how to fix what is not"

USAGE = "rayfcp doctor [CONFIG [key=value ...]] [--address ADDRESS] [--json]"

EPILOG = """\
Without --address this machine is checked; with it every node of a Ray cluster, from one of its nodes. With CONFIG also
the needs of that run: devices, storage and data. Exit code 0 if no check fails, 1 otherwise.

Examples:  rayfcp doctor jobs/quickstart.yaml
           rayfcp doctor jobs/qwen3-8b-128k-gpu.yaml --address auto
"""

TOKEN_FILE = "~/.ray/auth_token"
WIDTH = 4


class ChecksFailedError(Exception):
    """A check fails; the message says how many."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rayfcp doctor`."""
    parser.usage, parser.epilog = USAGE, EPILOG
    parser.add_argument("overrides", metavar="CONFIG key=value", nargs="*", help="YAML file, and overrides of its keys")
    parser.add_argument(
        "--address", metavar="ADDRESS", help="address of a Ray cluster: auto, or HOST:PORT of its head (6379)"
    )
    parser.add_argument("--json", action="store_true", help="print findings as a JSON list")


def run(arguments: argparse.Namespace) -> None:
    """Run the checks and print a line for each finding.

    Raises:
        ConfigError: The user's input is wrong.
        ChecksFailedError: A check fails.
    """
    from rayfcp.cluster.doctor.checks import examine, is_well

    findings = examine(gather(arguments))
    if arguments.json:
        sys.stdout.write(json.dumps([asdict(each) for each in findings], indent=1) + "\n")
    else:
        sys.stdout.write("".join(f"{line(each)}\n" for each in findings))
    if not is_well(findings):
        count = sum(each.verdict == "fail" for each in findings)
        raise ChecksFailedError(
            f"{count} of {len(findings)} checks {'fails' if count == 1 else 'fail'}; see their remedies"
        )


def gather(arguments: argparse.Namespace) -> "Facts":
    """Return the facts that the checks need."""
    from rayfcp.cluster.doctor.facts import Facts, Needs
    from rayfcp.cluster.doctor.gather import machine_facts

    needs = _needs(arguments.overrides) if arguments.overrides else Needs()
    access = access_facts(needs)
    if arguments.address is None:
        node = machine_facts(device=needs.device, run_dir=needs.run_dir, paths=needs.paths)
        return Facts(nodes=(node,), needs=needs, access=access)
    if "://" in arguments.address:
        raise ConfigError(
            f"--address is {arguments.address!r}, must be auto or HOST:PORT, on a node of the cluster; from outside: "
            f"ray job submit --address {arguments.address} --working-dir . -- python -m rayfcp doctor --address auto"
        )
    from rayfcp.cluster.doctor.gather import cluster_facts

    nodes, cluster = cluster_facts(arguments.address, needs=needs)
    return Facts(nodes=nodes, cluster=cluster, needs=needs, access=access)


def _needs(words: list[str]) -> "Needs":
    from rayfcp.cluster.doctor.facts import needs_of
    from rayfcp.config import load_config

    path, *overrides = words
    return needs_of(load_config(path, overrides=overrides))


def access_facts(needs: "Needs") -> "AccessFacts":
    """Return access facts from the environment; never the token itself."""
    from rayfcp.cluster.doctor.facts import AccessFacts

    named = os.environ.get("RAY_AUTH_TOKEN_PATH") or TOKEN_FILE
    file = Path(named).expanduser()
    found = "RAY_AUTH_TOKEN" if os.environ.get("RAY_AUTH_TOKEN") else named if file.is_file() else ""
    return AccessFacts(
        mode=os.environ.get("RAY_AUTH_MODE", "").lower(),
        token_from=found,
        token_open=found == named and bool(file.stat().st_mode & 0o077),
        metrics_port_taken=bool(needs.metrics_port) and not _is_free(needs.metrics_host, needs.metrics_port),
    )


def _is_free(host: str, port: int) -> bool:
    try:
        socket.create_server((host, port)).close()
    except OSError:
        return False
    return True


def line(finding: "Finding") -> str:
    """Return verdict, place, finding and remedy as one line.

    >>> from rayfcp.cluster.doctor.facts import Finding, Verdict
    >>> line(Finding(verdict=Verdict.WARN, what="disk is full", remedy="free space", node="a"))
    'warn  a: disk is full  ->  free space'
    """
    where = f"{finding.node}: " if finding.node else ""
    remedy = f"  ->  {finding.remedy}" if finding.remedy else ""
    return f"{finding.verdict:<{WIDTH}}  {where}{finding.what}{remedy}"
