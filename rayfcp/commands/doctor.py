"""`rayfcp doctor`: arguments and output."""

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rayfcp.commands import CommandFailedError, add_config
from rayfcp.config import ConfigError, config_of_keys, load_config

if TYPE_CHECKING:
    from rayfcp.cluster.tools.doctor.facts import Facts, NodeFacts

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
    from rayfcp.cluster.tools.doctor.checks import examine

    findings = examine(_facts(arguments))
    if arguments.json:
        sys.stdout.write(json.dumps([asdict(each) for each in findings], indent=1) + "\n")
    else:
        sys.stdout.write("".join(f"{each}\n" for each in findings))
    if count := sum(each.verdict == "fail" for each in findings):
        verb = "fails" if count == 1 else "fail"
        raise CommandFailedError(f"{count} of {len(findings)} checks {verb}; see their remedies")


def _facts(arguments: argparse.Namespace) -> "Facts":
    from rayfcp.cluster.tools.doctor.facts import Facts
    from rayfcp.cluster.tools.doctor.gather import (
        access_facts,
        cluster_facts,
        local_paths,
        machine_facts,
        model_size,
    )

    words, address = arguments.overrides, arguments.address
    config = load_config(words[0], overrides=words[1:]) if words else config_of_keys(())
    asked: dict[str, Any] = {"device": config.cluster.device}
    if words:
        asked |= {"run_dir": config.run_dir, "paths": local_paths(config)}
    cluster = None
    if address is None:
        nodes: tuple[NodeFacts, ...] = (machine_facts(**asked),)
    elif "://" in address:
        raise ConfigError(
            f"--address is {address!r}, must be auto or HOST:PORT, on a node of the cluster; from outside: "
            f"ray job submit --address {address} --working-dir . -- python -m rayfcp doctor --address auto"
        )
    else:
        nodes, cluster = cluster_facts(address, asked=asked)
    num_trained, frozen_bytes = (model_size(config) if words else None) or (None, 0)
    return Facts(
        nodes=nodes,
        config=config,
        cluster=cluster,
        access=access_facts(config),
        num_parameters=num_trained,
        frozen_bytes=frozen_bytes,
    )
