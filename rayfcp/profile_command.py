"""`rayfcp profile`: its arguments and what it prints."""

import argparse
import sys
from typing import TYPE_CHECKING

from rayfcp.compare.arguments import positive

if TYPE_CHECKING:
    from rayfcp.config import Config

TEXT = "time the workers of a configuration and fit the cost model to them"

EPILOG = """\
Writes profile.json, which `rayfcp train` and `rayfcp plan` then use as long as model and ranks are the same,
and hardware.yaml for `rayfcp compare --hardware`, into the run's folder or --out.

Example:  rayfcp profile jobs/quickstart.yaml cluster.num_workers=2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `rayfcp profile` takes beside the configuration and its overrides."""
    parser.add_argument("--out", metavar="DIR", help="folder of the two files (default: the run's)")
    parser.add_argument("--rounds", type=positive, default=3, help="times that each shape is timed (default: 3)")
    parser.add_argument(
        "--max-tokens", type=positive, help="largest pass of a rank (default: data.max_seqlen, or what memory holds)"
    )
    parser.epilog = EPILOG


def run(config: "Config", arguments: argparse.Namespace) -> None:
    """Profile, and print the table."""
    from rayfcp.cluster.profiling import profile_run, profile_table
    from rayfcp.telemetry.progress import Progress

    with Progress(1) as progress:
        profiled = profile_run(
            config,
            out_dir=arguments.out,
            rounds=arguments.rounds,
            max_tokens=arguments.max_tokens,
            say=progress.say,
        )
    sys.stdout.write(f"\n{profile_table(profiled)}\n")
