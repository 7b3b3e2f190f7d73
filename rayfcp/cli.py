"""The `rayfcp` command. Heavy libraries are imported by the commands that need them, not at start."""

import argparse
import io
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from rayfcp import __version__
from rayfcp.commands import (
    DONE,
    FAILED,
    WRONG_INPUT,
    CommandFailedError,
    add_config,
    bench,
    compare,
    doctor,
    evaluate,
    submit,
)
from rayfcp.compare.arguments import add_arguments, not_negative, positive
from rayfcp.config import Config, ConfigError, check_paths, config_of_keys, load_config

DESCRIPTION = """\
Train long-context models on variable-length data with flexible context parallelism.

For every global batch rayfcp computes, ahead of time, the fastest way to spread its
sequences over the available ranks, and sends that plan to the workers.
"""

OVERRIDES = """\
Any key of the configuration can be overridden:
  train.steps=100  cluster.num_workers=2  model.dtype=bfloat16  model.architecture.num_layers=8
"""

PROFILE_USAGE = "rayfcp profile [CONFIG] [key=value ...] [--alone] [--out DIR] [--rounds N] [--max-tokens N]"

PROFILE = """\
Writes profile.json, which `rayfcp train` and `rayfcp plan` use while model and ranks stay the same, and hardware.yaml,
for `--hardware` of `rayfcp compare` and others, into the run directory or --out.

With --alone this process times one device of this machine, without Ray, CONFIG or data. Links between devices are
those of the nearest named profile.

Examples:  rayfcp profile jobs/quickstart.yaml cluster.num_workers=2
           rayfcp profile --alone model.name=qwen3-1.7b model.dtype=bfloat16 --max-tokens 16384 --out profiled
"""

WARM_UP = """\
Compiled code lies beside the installed package, or in NUMBA_CACHE_DIR if that is set, and serves every process with
the same rayfcp, numba and kind of CPU. Put it at the end of an image's build, as the user who will run rayfcp; for
nodes of several kinds of CPU set NUMBA_CPU_NAME there and in the image, e.g. to x86-64-v2, or generic on Arm.

Example:  NUMBA_CPU_NAME=x86-64-v2 NUMBA_CACHE_DIR=/var/cache/rayfcp rayfcp warm-up
"""

BASELINE_STEPS = 12
"""Steps that `rayfcp report` plans again by default: about a minute, and enough for a mean."""


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG_INPUT, f"rayfcp: error: {message}; see {self.prog} --help\n")


_Commands: TypeAlias = "argparse._SubParsersAction[_Parser]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Return 0 when done, 2 if the user's input is wrong (one line on stderr), else 1."""
    from rayfcp.values import InfeasiblePlanError

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # file names and charts may hold what the terminal cannot write
            stream.reconfigure(errors="backslashreplace")
    arguments = _parse(argv)
    try:
        arguments.command(arguments)
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

    train = _with_config(commands, "train", run=_train, text="Train a model, or resume a run that was stopped")
    train.epilog = f"{OVERRIDES}\nExample:  rayfcp train jobs/quickstart.yaml train.steps=50 cluster.num_workers=2"
    text = "Print the plan of one global batch as a time x rank grid"
    _add_plan_arguments(_with_config(commands, "plan", run=_plan, text=text))
    text = "Tokenize the data of a configuration into columnar shards"
    prepare = _with_config(commands, "prepare", run=_prepare, text=text)
    prepare.add_argument("--out", required=True, metavar="DIR", help="directory or fsspec URL for the shards")
    prepare.epilog = f"{OVERRIDES}\nExample:  rayfcp prepare jobs/quickstart.yaml --out shards data.max_seqlen=4096"
    text = "Plan and simulate strategies on the same batches, without a cluster"
    add_arguments(_command(commands, "compare", run=compare.run, text=text))
    text = "Time the workers of a configuration and fit the cost model to them"
    _add_profile_arguments(_command(commands, "profile", run=_profile, text=text))
    text = "Measure one device, without a cluster"
    benchmarks = commands.add_parser("bench", help=text, description=f"{text}.")
    what = benchmarks.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    text = "Run the attention of all ranks of real plans on one device, and compare it with a single kernel"
    bench.add_arguments(_command(what, "attention", run=bench.run, text=text))
    text = "Train on a cluster as a Ray job; follow or stop it"
    submit.add_arguments(_command(commands, "submit", run=submit.run, text=text))
    text = "Check that a machine or cluster is ready, and how to fix what is not"
    doctor.add_arguments(_command(commands, "doctor", run=doctor.run, text=text))
    text = "Compile the planners' kernels ahead of the first run"
    _command(commands, "warm-up", run=_warm_up, text=text).epilog = WARM_UP
    _add_commands_of_runs(commands)
    return parser


def _add_commands_of_runs(commands: _Commands) -> None:
    _add_report(commands)
    text = "Follow a run that is training, and print the address of its live page"
    _with_run(commands, "watch", run=_watch, text=text)
    _add_export(commands)
    text = "Evaluate a checkpoint of a run, or a Hugging Face model, on held-out data"
    evaluate.add_arguments(_command(commands, "evaluate", run=evaluate.run, text=text))


def _command(
    commands: _Commands, name: str, *, run: Callable[[argparse.Namespace], None], text: str
) -> argparse.ArgumentParser:
    layout = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(name, help=text, description=f"{text}.", formatter_class=layout)
    parser.set_defaults(command=run)
    return parser


def _with_config(
    commands: _Commands, name: str, *, run: Callable[[argparse.Namespace], None], text: str
) -> argparse.ArgumentParser:
    parser = _command(commands, name, run=run, text=text)
    parser.add_argument("config", metavar="CONFIG", help="YAML file, e.g. jobs/quickstart.yaml")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="overrides of configuration keys")
    return parser


def _with_run(
    commands: _Commands, name: str, *, run: Callable[[argparse.Namespace], None], text: str
) -> argparse.ArgumentParser:
    parser = _command(commands, name, run=run, text=text)
    parser.add_argument("run_dir", metavar="RUN_DIR", help="run directory, e.g. runs/quickstart")
    parser.epilog = f"Example:  rayfcp {name} runs/quickstart"
    return parser


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


def _add_profile_arguments(profile: argparse.ArgumentParser) -> None:
    profile.usage, profile.epilog = PROFILE_USAGE, PROFILE
    add_config(profile)
    profile.add_argument(
        "--alone", action="store_true", help="time one device of this machine in this process, without Ray"
    )
    profile.add_argument("--out", metavar="DIR", help="directory of the two files (default: the run directory)")
    profile.add_argument("--rounds", type=positive, default=3, help="timed repetitions of each shape (default: 3)")
    profile.add_argument(
        "--max-tokens",
        type=positive,
        help="tokens of the largest pass (default: data.max_seqlen, or what memory holds)",
    )


def _add_report(commands: _Commands) -> None:
    text = "Write RUN_DIR/report.html and print the run's summary"
    report = _with_run(commands, "report", run=_report, text=text)
    report.add_argument(
        "--baseline-steps",
        type=not_negative,
        default=BASELINE_STEPS,
        metavar="N",
        help="steps whose batches are planned and simulated again, by a static baseline and by the run's strategy; 0: "
        f"none (default: {BASELINE_STEPS})",
    )
    report.epilog = "Example:  rayfcp report runs/quickstart --baseline-steps 30"


def _add_export(commands: _Commands) -> None:
    export = _with_run(commands, "export", run=_export, text="Export a checkpoint of a run as a Hugging Face model")
    export.add_argument("out_dir", metavar="OUT_DIR", help="directory for `from_pretrained`")
    export.add_argument("--step", type=positive, help="step of the checkpoint (default: the newest intact one)")
    export.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="precision of the weights (default: model.dtype of the run)"
    )
    export.add_argument("--merge", action="store_true", help="add adapters (model.lora) to the weights beside them")
    export.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="replace keys of the run's configuration")
    export.epilog = "Example:  rayfcp export runs/quickstart exported --dtype bfloat16"


def _config(arguments: argparse.Namespace, *, trains: bool = False) -> Config:
    config = load_config(arguments.config, overrides=arguments.overrides, trains=trains)
    check_paths(config)
    return config


def _with_cluster_of_job(config: Config) -> Config:
    """Use the job's own cluster inside a Ray job, unless the configuration names another."""
    if config.cluster.address is not None or "RAY_ADDRESS" not in os.environ:
        return config
    return config.changed(cluster={"address": "auto"})


def _train(arguments: argparse.Namespace) -> None:
    config = _config(arguments, trains=True)
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


def _plan(arguments: argparse.Namespace) -> None:
    if arguments.lengths is None:
        config = _config(arguments)
        from rayfcp.cluster import plan_step

        sys.stdout.write(f"{plan_step(config, step=arguments.step)}\n")
        return
    from rayfcp.cluster.tools.preview import OfflinePlan

    config = load_config(arguments.config, overrides=arguments.overrides, trains=False)
    given = {"lengths": arguments.lengths, "hardware": arguments.hardware, "model": arguments.model}
    sys.stdout.write(f"{OfflinePlan.of(config, step=arguments.step, **given).describe()}\n")


def _prepare(arguments: argparse.Namespace) -> None:
    config = _config(arguments)
    from rayfcp.cluster import prepare_data
    from rayfcp.telemetry.progress import Progress

    with Progress(1) as progress:
        lines = prepare_data(_with_cluster_of_job(config), out_dir=arguments.out, log=progress.log)
    sys.stdout.write("\n".join([*lines, ""]))


def _profile(arguments: argparse.Namespace) -> None:
    from rayfcp.cluster.facts.costs import profile_table
    from rayfcp.telemetry.progress import Progress

    words: list[str] = arguments.overrides
    profile: Any
    if words and "=" not in words[0]:
        config = load_config(words[0], overrides=words[1:])
    elif arguments.alone:
        config = config_of_keys(["run.name=alone", *words])
    else:
        raise ConfigError("CONFIG is missing, must be a YAML file; e.g. jobs/quickstart.yaml, or give --alone")
    if arguments.alone:
        from rayfcp.bench.alone import profile_alone as profile
    else:
        check_paths(config)
        config = _with_cluster_of_job(config)
        from rayfcp.cluster.tools.profiling import profile_run as profile
    with Progress(1) as progress:
        limits = {"rounds": arguments.rounds, "max_tokens": arguments.max_tokens}
        profiled = profile(config, out_dir=arguments.out, log=progress.log, **limits)
    sys.stdout.write(f"\n{profile_table(profiled)}\n")


def _warm_up(_: argparse.Namespace) -> None:
    """Compile everything, with a line for each strategy, and print where the compiled code lies."""
    begin_s = time.monotonic()

    def log(text: str) -> None:
        sys.stdout.write(f"{time.monotonic() - begin_s:6.1f} s  {text}\n")
        sys.stdout.flush()

    folder = compile_kernels(log)
    log(f"done, kept in {folder}" if folder else "done, but no folder can be written to: set NUMBA_CACHE_DIR")


def compile_kernels(log: Callable[[str], None]) -> Path | None:
    """Compile the kernels of planning and simulation; return the folder that keeps them, None if none does."""
    from rayfcp.plan.first import cache_folder, warm_up
    from rayfcp.simulate import simulate_plan

    for name, plan, sequences in warm_up():
        if not plan.pipelines:
            simulate_plan(plan, sequences, model="qwen3-1.7b", hardware="h100")
        log(name)
    return cache_folder()


def _report(arguments: argparse.Namespace) -> None:
    """Write the page; without a baseline, and with a message, if none can be made."""
    from rayfcp.telemetry.report import summary_of, write_report
    from rayfcp.telemetry.summary import format_summary

    try:
        page = write_report(arguments.run_dir)
        if arguments.baseline_steps:
            _add_baseline(arguments)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    summary = summary_of(page.parent)
    assert summary is not None, "a report has steps"
    sys.stdout.write(f"{format_summary(summary, run_dir=arguments.run_dir)}\n")


def _add_baseline(arguments: argparse.Namespace) -> None:
    from rayfcp.cluster.tools.replanning import baseline_of
    from rayfcp.compare.command import Progress
    from rayfcp.telemetry.report import write_report
    from rayfcp.values import InfeasiblePlanError

    with Progress(arguments.baseline_steps) as progress:
        try:
            baseline = baseline_of(arguments.run_dir, num_steps=arguments.baseline_steps, log=progress)
        except (InfeasiblePlanError, OSError, ValueError) as error:
            progress.log(f"no static baseline: {' '.join(str(error).split())}")
            return
    write_report(arguments.run_dir, baseline=baseline)


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
        merge=arguments.merge,
        overrides=arguments.overrides,
        log=lambda text: sys.stderr.write(f"rayfcp: {text}\n"),
    )
    sys.stdout.write(f"{checkpoint} -> {arguments.out_dir}\n")
