"""`rayfcp profile`: arguments and output."""

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rayfcp.compare.arguments import positive

if TYPE_CHECKING:
    from rayfcp.config import Config

TEXT = "Time the workers of a configuration and fit the cost model to them"

USAGE = "rayfcp profile [CONFIG] [key=value ...] [--alone] [--out DIR] [--rounds N] [--max-tokens N]"

EPILOG = """\
Writes profile.json, which `rayfcp train` and `rayfcp plan` use while model and ranks stay the same, and hardware.yaml,
for `--hardware` of `rayfcp compare` and others, into the run directory or --out.

With --alone this process times one device of this machine, without Ray, CONFIG or data. Links between devices are
those of the nearest named profile.

Examples:  rayfcp profile jobs/quickstart.yaml cluster.num_workers=2
           rayfcp profile --alone model.name=qwen3-1.7b model.dtype=bfloat16 --max-tokens 16384 --out profiled
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rayfcp profile`."""
    parser.usage, parser.epilog = USAGE, EPILOG
    parser.add_argument("overrides", metavar="CONFIG key=value", nargs="*", help="YAML file, and overrides of its keys")
    parser.add_argument(
        "--alone", action="store_true", help="time one device of this machine in this process, without Ray"
    )
    parser.add_argument("--out", metavar="DIR", help="directory of the two files (default: the run directory)")
    parser.add_argument("--rounds", type=positive, default=3, help="timed repetitions of each shape (default: 3)")
    parser.add_argument(
        "--max-tokens",
        type=positive,
        help="tokens of the largest pass (default: data.max_seqlen, or what memory holds)",
    )


def run(arguments: argparse.Namespace, *, on_cluster: "Callable[[Config], Config]") -> None:
    """Profile and print the table; `on_cluster` completes a configuration that runs on Ray.

    Raises:
        ConfigError: The configuration cannot be used.
    """
    from rayfcp.cluster.planning.costs import profile_table
    from rayfcp.config import check_paths
    from rayfcp.telemetry.progress import Progress

    config = config_of(arguments)
    profile: Any
    if arguments.alone:
        from rayfcp.bench.alone import profile_alone as profile
    else:
        check_paths(config)
        config = on_cluster(config)
        from rayfcp.cluster.planning.profiling import profile_run as profile
    with Progress(1) as progress:
        profiled = profile(
            config,
            out_dir=arguments.out,
            rounds=arguments.rounds,
            max_tokens=arguments.max_tokens,
            log=progress.log,
        )
    sys.stdout.write(f"\n{profile_table(profiled)}\n")


def config_of(arguments: argparse.Namespace) -> "Config":
    """Return the configuration of the file, or of the keys alone with --alone.

    Raises:
        ConfigError: The file is missing, or a key is wrong.
    """
    from rayfcp.config import ConfigError, config_of_keys, load_config

    words = list(arguments.overrides)
    if words and "=" not in words[0]:
        return load_config(words[0], overrides=words[1:])
    if not arguments.alone:
        raise ConfigError("CONFIG is missing, must be a YAML file; e.g. jobs/quickstart.yaml, or give --alone")
    return config_of_keys(["run.name=alone", *words])
