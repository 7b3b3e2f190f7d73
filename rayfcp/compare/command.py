"""`rayfcp compare`: from checked arguments to table, JSON and page."""

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO

from rayfcp.compare.advice import Advisor, format_layouts, layout_section
from rayfcp.compare.arguments import DEFAULT_BATCHES, DEFAULT_STRATEGIES, STAGED_STRATEGIES, Inputs, chosen
from rayfcp.compare.comparison import Comparison, compare
from rayfcp.compare.lengths import DISTRIBUTION, longest_of, read_rows, tokens_of
from rayfcp.compare.page import render
from rayfcp.compare.run_config import run_config_text
from rayfcp.compare.table import entry_line, format_table
from rayfcp.config import ConfigError
from rayfcp.telemetry.files import write_whole
from rayfcp.telemetry.progress import Terminal

UNSET = object()


class Progress(Terminal):
    """Progress on stderr: `progress(text)` announces the next piece of work, of which there are about `total`."""

    def __init__(self, total: int, *, stream: TextIO | None = None) -> None:
        super().__init__(total, counts=False, stream=stream)
        self._num_begun = 0

    def __call__(self, text: str) -> None:
        if self.move(self._num_begun, (text,)):
            self._num_begun += 1
        else:
            self.log(text)


def run(inputs: Inputs, arguments: argparse.Namespace) -> None:
    """Compare, or search layouts too; print the results and write the requested files.

    Raises:
        ConfigError: Inputs that cannot be used, or a file that cannot be written.
    """
    written = getattr(arguments, "write_config", None)
    if written is not None or inputs.searched:
        advisor = Advisor(inputs)
        with Progress(advisor.num_pairs) as progress:
            advice = advisor.advise(log=progress, on_entry=lambda entry: progress.log(entry_line(entry)))
        sys.stdout.write(f"{format_table(advice.comparison, recommends=False)}\n\n{format_layouts(advice)}\n")
        _write_results(arguments, advice.as_json(), comparison=advice.comparison, section=layout_section(advice))
        if written is not None:
            text = run_config_text(advice, data=getattr(arguments, "data", None))
            write_output("--write-config", written, text=text)
    else:
        with Progress(_pieces(inputs)) as progress:
            comparison = compare(inputs, log=progress, on_entry=lambda entry: progress.log(entry_line(entry)))
        sys.stdout.write(f"{format_table(comparison)}\n")
        _write_results(arguments, comparison.as_json(), comparison=comparison)


def check_outputs(arguments: argparse.Namespace) -> None:
    """Check the paths of the files to write, before anything is read.

    Raises:
        ConfigError: A folder in place of a file, or --data without --write-config.
    """
    for name in ("json", "html", "write_config"):
        path = getattr(arguments, name, None)
        if path is not None and Path(path).is_dir():
            raise ConfigError(f"--{name.replace('_', '-')} is {path!r}, a folder; give the path of a file")
    if hasattr(arguments, "data") and not hasattr(arguments, "write_config"):
        raise ConfigError(
            "--data is given without --write-config, of which it is a part; give --write-config its path too"
        )


def _pieces(inputs: Inputs) -> int:
    """Pieces of work that `compare` announces, about: constraints are priced for strategies of ours alone."""
    from rayfcp.plan.strategies.registry import get

    names, each = chosen(inputs.strategies), len(inputs.constraints.each())
    variants = (1 + each if each > 1 else each) * sum(not get(name).is_baseline for name in names)
    return 1 + len(names) * (1 + inputs.batches) + variants * (2 + inputs.batches)


REQUIRED = {
    "lengths": "a file, a prepared folder or dist:NAME",
    "model": "a name such as qwen3-8b, a Hugging Face folder, or a YAML file",
    "hardware": "a name such as h100, or a YAML file",
    "devices": "their number, e.g. --devices 8",
    "global_batch": "sequences, e.g. --global-batch 32",
}
CONFIGURABLE = ("lengths", "model", "global_batch")


def given_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options that were given, keyed by field of `Inputs`."""
    return {field.name: value for field in fields(Inputs) if (value := getattr(arguments, field.name, UNSET)) != UNSET}


def inputs_of(given: dict[str, Any]) -> Inputs:
    """Return the values by field as `Inputs`, with defaults that depend on others; sizes that are searched are 1.

    Raises:
        ConfigError: A value that has no default is missing.
    """
    for name, what in REQUIRED.items():
        if given.get(name) is None:
            remedy = f"give {what}" + (", or CONFIG, a configuration of rayfcp train" * (name in CONFIGURABLE))
            raise ConfigError(f"--{name.replace('_', '-')} is missing, must be given; {remedy}")
    searched = tuple(name for name in ("stages", "tensor_parallel") if given.get(name, 1) is None)
    found = {name: None if value == "auto" else value for name, value in given.items()}
    if "strategies" not in given:
        found["strategies"] = DEFAULT_STRATEGIES + STAGED_STRATEGIES * (given.get("stages", 1) != 1)
    return Inputs(**_with_batches(found) | dict.fromkeys(searched, 1) | {"searched": searched})


def _with_batches(given: dict[str, Any]) -> dict[str, Any]:
    """Return the values with the number of batches, and the longest sequence, that the lengths have."""
    lengths, rows = given["lengths"], given.get("rows")
    if {"batches", "max_seqlen"} <= given.keys() or (rows is None and lengths.startswith(DISTRIBUTION)):
        defaults: dict[str, Any] = {"batches": DEFAULT_BATCHES}
        return defaults | ({} if "max_seqlen" in given else {"max_seqlen": longest_of(lengths)}) | given
    found = read_rows(lengths) if rows is None else rows
    num_batches = max(min(DEFAULT_BATCHES, len(found) // given["global_batch"]), 1)
    return {"batches": num_batches, "max_seqlen": max(map(tokens_of, found))} | given


def _write_results(
    arguments: argparse.Namespace, results: dict[str, Any], *, comparison: Comparison, section: str = ""
) -> None:
    if hasattr(arguments, "json"):
        write_output("--json", arguments.json, text=json.dumps(results, indent=1) + "\n")
    if hasattr(arguments, "html"):
        write_output("--html", arguments.html, text=render(comparison, more=section))


def write_output(option: str, path: str, *, text: str) -> None:
    """Write the file of an option; a ConfigError names the option if it cannot be written."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise ConfigError(f"{option} {path!r} cannot be written: {error.strerror}; give another path") from error
