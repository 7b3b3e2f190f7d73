"""`rayfcp evaluate`: arguments and output."""

import argparse
import json
import math
import sys
from typing import TYPE_CHECKING

from rayfcp.commands import CommandFailedError
from rayfcp.compare.arguments import positive

if TYPE_CHECKING:
    from rayfcp.cluster.jobs.evaluate import Evaluated
    from rayfcp.values import EvalResult

USAGE = "rayfcp evaluate RUN_OR_MODEL [CONFIG] [key=value ...] [--step N] [--json]"

EPILOG = """\
RUN_OR_MODEL is a run directory, of which the newest intact checkpoint is evaluated, or a Hugging Face folder. The sets
are those of eval.sets: in the run's configuration, in CONFIG, whose keys replace those of the run, or in overrides.
The mean loss is over all targets of a set, or over all pairs of answers; the same on any number of devices.

Examples:  rayfcp evaluate runs/quickstart eval.sets.val.paths=held-out.jsonl cluster.num_workers=2
           rayfcp evaluate Qwen3-1.7B eval.sets.code.paths='[src]' eval.sets.code.include='*.py' model.dtype=bfloat16
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rayfcp evaluate`."""
    parser.usage, parser.epilog = USAGE, EPILOG
    parser.add_argument("target", metavar="RUN_OR_MODEL", help="run directory, or Hugging Face folder")
    parser.add_argument("overrides", metavar="CONFIG key=value", nargs="*", help="YAML file, and overrides of its keys")
    parser.add_argument("--step", type=positive, help="step of the run's checkpoint (default: the newest intact one)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def run(arguments: argparse.Namespace) -> None:
    """Evaluate, and print a line for each set.

    Raises:
        ConfigError: The user's input is wrong.
        CommandFailedError: A worker or the controller failed.
    """
    from rayfcp.cluster.errors import RunFailedError
    from rayfcp.cluster.evaluation import evaluate_sets
    from rayfcp.telemetry.progress import Progress

    words: list[str] = arguments.overrides
    file = words[0] if words and "=" not in words[0] else None
    overrides = words[file is not None :]
    with Progress(1) as progress:
        try:
            found = evaluate_sets(
                arguments.target, config_file=file, overrides=overrides, step=arguments.step, watcher=progress
            )
        except RunFailedError as error:
            raise CommandFailedError(error) from error
    if arguments.json:
        sys.stdout.write(f"{json.dumps(_as_json(arguments.target, found), indent=1)}\n")
    else:
        sys.stdout.write(f"\n{table(found)}\n")


def _as_json(target: str, found: "Evaluated") -> dict[str, object]:
    from rayfcp.telemetry.summary import finite

    sets: dict[str, dict[str, float]] = {name: figures(each) for name, each in found.results.items()}
    for name, each in found.results.items():
        sets[name] |= {"broken_rows": each.broken_rows} if each.broken_rows else {}
    return {"target": target, "step": found.step, "seconds": found.seconds, "sets": finite(sets)}


def figures(result: "EvalResult") -> dict[str, float]:
    """Return the numbers of an evaluation set, by name."""
    if result.pairs is None:
        return {"loss": result.loss, "perplexity": result.perplexity, "tokens": result.tokens}
    pairs = result.pairs
    rewards = {"chosen": pairs.chosen, "rejected": pairs.rejected, "margin": pairs.margin}
    return {"loss": result.loss, "accuracy": pairs.accuracy, **rewards, "pairs": pairs.num_pairs}


def table(found: "Evaluated") -> str:
    """Return the results as a table, and how long they took."""
    from rayfcp.telemetry.summary import broken_text, number, seconds

    columns = [figures(each) for each in found.results.values()]
    rows = [("set", *columns[0])]
    for name, given in zip(found.results, columns, strict=True):
        loss, *others = (None if math.isnan(each) else each for each in given.values())
        words = [f"{each:,}" if isinstance(each, int) else number(each) for each in others]
        rows.append((name, number(loss) if loss is None else f"{loss:.6f}", *words))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(field.rjust(width) for field, width in zip(row, widths, strict=True)) for row in rows]
    lines += [f"{name}: {broken_text(each.broken_rows)}" for name, each in found.results.items() if each.broken_rows]
    return "\n".join([*lines, f"after step {found.step}, evaluated in {seconds(found.seconds)}"])
