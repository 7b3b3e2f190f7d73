"""`rayfcp doctor`: arguments and output."""

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from rayfcp.commands import CommandFailedError, add_config
from rayfcp.config import ConfigError, load_config

if TYPE_CHECKING:
    from rayfcp.cluster.doctor.facts import Facts

USAGE = "rayfcp doctor [CONFIG [key=value ...]] [--address ADDRESS] [--json]"

EPILOG = """\
Without --address this machine is checked; with it every node of a Ray cluster, from one of its nodes. With CONFIG also
the needs of that run: devices, storage and data. Exit code 0 if no check fails, 1 otherwise.

Examples:  rayfcp doctor jobs/quickstart.yaml
           rayfcp doctor jobs/qwen3-8b-128k-gpu.yaml --address auto
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rayfcp doctor`."""
    parser.usage, parser.epilog = USAGE, EPILOG
    add_config(parser)
    parser.add_argument(
        "--address", metavar="ADDRESS", help="address of a Ray cluster: auto, or HOST:PORT of its head (6379)"
    )
    parser.add_argument("--json", action="store_true", help="print findings as a JSON list")


def run(arguments: argparse.Namespace) -> None:
    """Run the checks and print a line for each finding.

    Raises:
        ConfigError: The user's input is wrong.
        CommandFailedError: A check fails.
    """
    from rayfcp.cluster.doctor.checks import examine, is_well

    findings = examine(_facts(arguments))
    if arguments.json:
        sys.stdout.write(json.dumps([asdict(each) for each in findings], indent=1) + "\n")
    else:
        sys.stdout.write("".join(f"{each}\n" for each in findings))
    if not is_well(findings):
        count = sum(each.verdict == "fail" for each in findings)
        verb = "fails" if count == 1 else "fail"
        raise CommandFailedError(f"{count} of {len(findings)} checks {verb}; see their remedies")


def _facts(arguments: argparse.Namespace) -> "Facts":
    from rayfcp.cluster.doctor.facts import Facts, Needs, needs_of
    from rayfcp.cluster.doctor.gather import access_facts, cluster_facts, machine_facts

    words = arguments.overrides
    needs = needs_of(load_config(words[0], overrides=words[1:])) if words else Needs()
    access = access_facts(needs)
    if arguments.address is None:
        node = machine_facts(device=needs.device, run_dir=needs.run_dir, paths=needs.paths)
        return Facts(nodes=(node,), needs=needs, access=access)
    if "://" in arguments.address:
        raise ConfigError(
            f"--address is {arguments.address!r}, must be auto or HOST:PORT, on a node of the cluster; from outside: "
            f"ray job submit --address {arguments.address} --working-dir . -- python -m rayfcp doctor --address auto"
        )
    nodes, cluster = cluster_facts(arguments.address, needs=needs)
    return Facts(nodes=nodes, cluster=cluster, needs=needs, access=access)
