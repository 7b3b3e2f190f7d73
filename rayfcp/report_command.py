"""`rayfcp report`: the page of a run, with what static plans would have made of its batches."""

import argparse
import sys

DEFAULT_STEPS = 12
TEXT = "write RUN_DIR/report.html and print the run's summary"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be asked for."""
    parser.add_argument(
        "--baseline-steps",
        type=int,
        default=DEFAULT_STEPS,
        metavar="N",
        help="steps whose batches are planned and simulated again, statically and by the run's strategy; 0 for none "
        f"(default: {DEFAULT_STEPS})",
    )
    parser.epilog = "Example:  rayfcp report runs/quickstart --baseline-steps 30"


def run(arguments: argparse.Namespace) -> None:
    """Write the page; a baseline that cannot be made is said, and left out.

    Raises:
        ConfigError: no run is there.
    """
    from rayfcp.config import ConfigError
    from rayfcp.telemetry.report import write_report
    from rayfcp.telemetry.steps import read_steps
    from rayfcp.telemetry.summary import format_summary, summarize

    if arguments.baseline_steps < 0:
        raise ConfigError(f"--baseline-steps is {arguments.baseline_steps}, must be at least 0; 0 leaves it out")
    try:
        page = write_report(arguments.run_dir)
        if arguments.baseline_steps:
            _with_baseline(arguments)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    summary = summarize(read_steps(page.with_name("steps.jsonl")))
    sys.stdout.write(f"{format_summary(summary, run_dir=arguments.run_dir)}\n")


def _with_baseline(arguments: argparse.Namespace) -> None:
    from rayfcp.cluster.planning.baselines import baseline_of
    from rayfcp.compare.command import Progress
    from rayfcp.config import ConfigError
    from rayfcp.telemetry.report import write_report
    from rayfcp.values import InfeasiblePlanError

    with Progress(arguments.baseline_steps) as progress:
        try:
            baseline = baseline_of(arguments.run_dir, num_steps=arguments.baseline_steps, say=progress)
        except (ConfigError, InfeasiblePlanError, OSError, ValueError) as error:
            progress.say(f"no static baseline: {' '.join(str(error).split())}")
            return
    write_report(arguments.run_dir, baseline=baseline)
