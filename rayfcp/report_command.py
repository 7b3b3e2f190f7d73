"""`rayfcp report`: the page of a run, with static plans of its batches as a baseline."""

import argparse
import sys

DEFAULT_STEPS = 12
TEXT = "Write RUN_DIR/report.html and print the run's summary"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rayfcp report`."""
    parser.add_argument(
        "--baseline-steps",
        type=int,
        default=DEFAULT_STEPS,
        metavar="N",
        help="steps whose batches are planned and simulated again, by a static baseline and by the run's strategy; 0: "
        "none "
        f"(default: {DEFAULT_STEPS})",
    )
    parser.epilog = "Example:  rayfcp report runs/quickstart --baseline-steps 30"


def run(arguments: argparse.Namespace) -> None:
    """Write the page; without a baseline, and with a message, if none can be made.

    Raises:
        ConfigError: The directory holds no run.
    """
    from rayfcp.config import ConfigError
    from rayfcp.telemetry.report import summary_of, write_report
    from rayfcp.telemetry.summary import format_summary

    if arguments.baseline_steps < 0:
        raise ConfigError(f"--baseline-steps is {arguments.baseline_steps}, must be at least 0; 0 omits the baseline")
    try:
        page = write_report(arguments.run_dir)
        if arguments.baseline_steps:
            _with_baseline(arguments)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    summary = summary_of(page.parent)
    assert summary is not None, "a report has steps"
    sys.stdout.write(f"{format_summary(summary, run_dir=arguments.run_dir)}\n")


def _with_baseline(arguments: argparse.Namespace) -> None:
    from rayfcp.cluster.planning.baselines import baseline_of
    from rayfcp.compare.command import Progress
    from rayfcp.config import ConfigError
    from rayfcp.telemetry.report import write_report
    from rayfcp.values import InfeasiblePlanError

    with Progress(arguments.baseline_steps) as progress:
        try:
            baseline = baseline_of(arguments.run_dir, num_steps=arguments.baseline_steps, log=progress)
        except (ConfigError, InfeasiblePlanError, OSError, ValueError) as error:
            progress.log(f"no static baseline: {' '.join(str(error).split())}")
            return
    write_report(arguments.run_dir, baseline=baseline)
