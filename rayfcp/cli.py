"""The `rayfcp` command. Heavy libraries are imported by the commands that need them, not at start."""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from rayfcp import (
    __version__,
    bench_command,
    doctor_command,
    profile_command,
    report_command,
    submit_command,
    warm_up_command,
)
from rayfcp.compare.arguments import add_arguments, positive

if TYPE_CHECKING:
    from rayfcp.config import Config

DONE, FAILED, WRONG_INPUT = 0, 1, 2

DESCRIPTION = """\
Train long-context models on variable-length data with flexible context parallelism.

For every global batch rayfcp computes, ahead of time, the fastest way to spread its
sequences over the available ranks, and sends that plan to the workers.
"""

OVERRIDES = """\
Any key of the configuration can be overridden:
  train.steps=100  cluster.num_workers=2  model.dtype=bfloat16  model.architecture.num_layers=8
"""


class CommandFailedError(Exception):
    """A command failed; the message is complete, no traceback is needed."""


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG_INPUT, f"rayfcp: error: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Return 0 when done, 2 if the user's input is wrong (one line on stderr), else 1."""
    from rayfcp.config import ConfigError
    from rayfcp.values import InfeasiblePlanError

    arguments = _parse(argv)
    command: Callable[[argparse.Namespace], None] = arguments.command
    try:
        command(arguments)
    except (ConfigError, InfeasiblePlanError) as error:
        # An error that crossed from a Ray worker carries the original as its cause.
        line = " ".join(str(getattr(error, "cause", None) or error).split())
        sys.stderr.write(f"rayfcp: error: {line}\n")
        return WRONG_INPUT
    except CommandFailedError as error:
        sys.stderr.write(f"rayfcp: error: {error}\n")
        return FAILED
    except KeyboardInterrupt:
        sys.stderr.write("rayfcp: stopped before the end\n")
        return FAILED
    except Exception:
        traceback.print_exc()
        return FAILED
    return DONE


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command and its arguments. argparse does not collect a list of words on both sides of an option, so
    overrides after an option are added to those before it."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if any(word.startswith("-") for word in rest) or (rest and not hasattr(arguments, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="rayfcp",
        description=DESCRIPTION,
        epilog="Start with:  rayfcp train jobs/quickstart.yaml",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rayfcp {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    train = _with_config(commands, _train, "train", "Train a model, or resume a run that was stopped")
    train.epilog = f"{OVERRIDES}\nExample:  rayfcp train jobs/quickstart.yaml train.steps=50 cluster.num_workers=2"

    plan = _with_config(commands, _plan, "plan", "Print the plan of one global batch as a time x rank grid")
    _add_plan_arguments(plan)

    prepare = _with_config(commands, _prepare, "prepare", "Tokenize the data of a configuration into columnar shards")
    prepare.add_argument("--out", required=True, metavar="DIR", help="directory or fsspec URL for the shards")
    prepare.epilog = f"{OVERRIDES}\nExample:  rayfcp prepare jobs/quickstart.yaml --out shards data.max_seqlen=4096"

    compare = _command(
        commands, _compare, "compare", "Plan and simulate strategies on the same batches, without a cluster"
    )
    add_arguments(compare)

    profile_command.add_arguments(_command(commands, _profile, "profile", profile_command.TEXT))

    _add_bench(commands)

    submit_command.add_arguments(_command(commands, _submit, "submit", submit_command.TEXT))

    doctor_command.add_arguments(_command(commands, _doctor, "doctor", doctor_command.TEXT))

    warm_up_command.add_arguments(_command(commands, warm_up_command.run, "warm-up", warm_up_command.TEXT))

    report_command.add_arguments(_with_run(commands, report_command.run, "report", report_command.TEXT))
    _with_run(commands, _watch, "watch", "Follow a run that is training, and print the address of its live page")
    _add_export(commands)
    return parser


def _add_export(commands: "argparse._SubParsersAction[_Parser]") -> None:
    export = _with_run(commands, _export, "export", "Export a checkpoint of a run as a Hugging Face model")
    export.add_argument("out_dir", metavar="OUT_DIR", help="directory for `from_pretrained`")
    export.add_argument("--step", type=positive, help="step of the checkpoint (default: the newest intact one)")
    export.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="precision of the weights (default: model.dtype of the run)"
    )
    export.epilog = "Example:  rayfcp export runs/quickstart exported --dtype bfloat16"


def _add_bench(commands: "argparse._SubParsersAction[_Parser]") -> None:
    bench = commands.add_parser("bench", help=bench_command.TEXT, description=f"{bench_command.TEXT}.")
    what = bench.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    bench_command.add_arguments(_command(what, _bench, "attention", bench_command.ATTENTION))


def _add_plan_arguments(plan: argparse.ArgumentParser) -> None:
    plan.add_argument("--step", type=positive, default=1, help="step whose batch is planned, from 1 (default: 1)")
    declared = plan.add_argument_group("offline, for a cluster as the configuration declares it")
    declared.add_argument(
        "--lengths", metavar="FILE", help="sequence lengths in place of the data: a file or dist:NAME"
    )
    declared.add_argument("--hardware", metavar="NAME", help="hardware profile (default: that of cluster.device)")
    declared.add_argument("--model", metavar="NAME", help="model profile (default: the configured model)")
    plan.epilog = (
        f"{OVERRIDES}\nExamples:  rayfcp plan jobs/quickstart.yaml cluster.num_workers=8 --step 3\n"
        "           rayfcp plan jobs/qwen3-8b-128k-gpu.yaml --lengths dist:github"
    )


def _command(
    commands: "argparse._SubParsersAction[_Parser]", run: Callable[[argparse.Namespace], None], name: str, text: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=text, description=f"{text}.", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(command=run)
    return parser


def _with_config(
    commands: "argparse._SubParsersAction[_Parser]", run: Callable[[argparse.Namespace], None], name: str, text: str
) -> argparse.ArgumentParser:
    parser = _command(commands, run, name, text)
    parser.add_argument("config", metavar="CONFIG", help="YAML file, e.g. jobs/quickstart.yaml")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="overrides of configuration keys")
    return parser


def _with_run(
    commands: "argparse._SubParsersAction[_Parser]", run: Callable[[argparse.Namespace], None], name: str, text: str
) -> argparse.ArgumentParser:
    parser = _command(commands, run, name, text)
    parser.add_argument("run_dir", metavar="RUN_DIR", help="run directory, e.g. runs/quickstart")
    parser.epilog = f"Example:  rayfcp {name} runs/quickstart"
    return parser


def _config(arguments: argparse.Namespace) -> "Config":
    from rayfcp.config import check_paths, load_config

    config = load_config(arguments.config, overrides=arguments.overrides)
    check_paths(config)
    return config


def _train(arguments: argparse.Namespace) -> None:
    config = _config(arguments)
    from rayfcp.cluster import FlexTrainer, RunFailedError
    from rayfcp.telemetry.progress import Progress
    from rayfcp.telemetry.report import summary_of
    from rayfcp.telemetry.summary import format_summary

    trainer = FlexTrainer(_with_cluster_of_job(config))
    with Progress(config.train.steps) as progress:
        try:
            result = trainer.fit(watcher=progress)
        except RunFailedError as error:
            raise CommandFailedError(error) from error
    summary = summary_of(result.path)
    if summary is not None:
        sys.stdout.write(f"\n{format_summary(summary, run_dir=config.run_dir)}\n")
    if (result.metrics or {}).get("stopped"):
        raise KeyboardInterrupt


def _with_cluster_of_job(config: "Config") -> "Config":
    """Use the job's own cluster inside a Ray job, unless the configuration names another."""
    if config.cluster.address is not None or "RAY_ADDRESS" not in os.environ:
        return config
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"address": "auto"})})


def _plan(arguments: argparse.Namespace) -> None:
    if arguments.lengths is not None:
        sys.stdout.write(f"{_declared_plan(arguments)}\n")
        return
    config = _config(arguments)
    from rayfcp.cluster import plan_step

    sys.stdout.write(f"{plan_step(config, step=arguments.step)}\n")


def _declared_plan(arguments: argparse.Namespace) -> str:
    """Return a plan made without data, devices and weights."""
    from rayfcp.cluster.planning.preview import OfflinePlan, describe
    from rayfcp.config import load_config

    config = load_config(arguments.config, overrides=arguments.overrides)
    given = {"lengths": arguments.lengths, "hardware": arguments.hardware, "model": arguments.model}
    return describe(OfflinePlan.of(config, step=arguments.step, **given))


def _prepare(arguments: argparse.Namespace) -> None:
    config = _config(arguments)
    from rayfcp.cluster import prepare_data
    from rayfcp.telemetry.progress import Progress

    with Progress(1) as progress:
        manifest = prepare_data(_with_cluster_of_job(config), out_dir=arguments.out, log=progress.log)
    sys.stdout.write(f"{manifest}\n")


def _compare(arguments: argparse.Namespace) -> None:
    from rayfcp.compare.command import run

    run(arguments)


def _profile(arguments: argparse.Namespace) -> None:
    profile_command.run(arguments, on_cluster=_with_cluster_of_job)


def _bench(arguments: argparse.Namespace) -> None:
    try:
        bench_command.run(arguments)
    except bench_command.WrongResultError as error:
        raise CommandFailedError(error) from error


def _submit(arguments: argparse.Namespace) -> None:
    try:
        submit_command.run(arguments)
    except submit_command.JobFailedError as error:
        raise CommandFailedError(error) from error


def _doctor(arguments: argparse.Namespace) -> None:
    try:
        doctor_command.run(arguments)
    except doctor_command.ChecksFailedError as error:
        raise CommandFailedError(error) from error


def _watch(arguments: argparse.Namespace) -> None:
    from rayfcp.telemetry.watching import watch

    try:
        watch(arguments.run_dir, stream=sys.stdout)
    except KeyboardInterrupt:
        sys.stdout.write("\n")  # the run continues


def _export(arguments: argparse.Namespace) -> None:
    from rayfcp.cluster import export_run

    checkpoint = export_run(
        arguments.run_dir,
        out_dir=arguments.out_dir,
        step=arguments.step,
        dtype=arguments.dtype,
        log=lambda text: sys.stderr.write(f"rayfcp: {text}\n"),
    )
    sys.stdout.write(f"{checkpoint} -> {arguments.out_dir}\n")
