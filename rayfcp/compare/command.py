"""`rayfcp compare`: from checked arguments to table, JSON and page."""

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO

from rayfcp.compare.advice import Advisor, format_layouts, layout_section
from rayfcp.compare.arguments import Inputs, chosen
from rayfcp.compare.comparison import Comparison, compare
from rayfcp.compare.page import render
from rayfcp.compare.run_config import run_config_text
from rayfcp.compare.table import format_table
from rayfcp.config import ConfigError
from rayfcp.telemetry.files import write_whole
from rayfcp.telemetry.progress import Terminal


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


def run(arguments: argparse.Namespace) -> None:
    """Compare, or search layouts too; print the results and write the requested files.

    Raises:
        ConfigError: Arguments that cannot be used, or a file that cannot be written.
    """
    inputs = inputs_of(arguments)
    for name in ("json", "html", "write_config"):
        path = getattr(arguments, name)
        if path is not None and Path(path).is_dir():
            raise ConfigError(f"--{name.replace('_', '-')} is {path!r}, a folder; give the path of a file")
    if arguments.data is not None and arguments.write_config is None:
        raise ConfigError(
            "--data is given without --write-config, of which it is a part; give --write-config its path too"
        )
    searches = arguments.write_config is not None or bool(inputs.searched)
    if searches and inputs.constraints.bind:
        raise ConfigError(
            "--constraints is of another trainer, and layouts are searched for rayfcp train; drop it, or auto and "
            "--write-config"
        )
    if searches:
        advisor = Advisor(inputs)
        with Progress(advisor.num_pairs) as progress:
            advice = advisor.advise(log=progress)
        sys.stdout.write(f"{format_table(advice.comparison)}\n\n{format_layouts(advice)}\n")
        _write_results(arguments, advice.as_json(), comparison=advice.comparison, section=layout_section(advice))
        if arguments.write_config is not None:
            write_output("--write-config", arguments.write_config, text=run_config_text(advice, data=arguments.data))
    else:
        with Progress(_pieces(inputs)) as progress:
            comparison = compare(inputs, log=progress)
        sys.stdout.write(f"{format_table(comparison)}\n")
        _write_results(arguments, comparison.as_json(), comparison=comparison)


def _pieces(inputs: Inputs) -> int:
    """Pieces of work that `compare` announces, about: constraints are priced for strategies of ours alone."""
    from rayfcp.plan.strategies.registry import get

    names, each = chosen(inputs.strategies), len(inputs.constraints.each())
    variants = (1 + each if each > 1 else each) * sum(not get(name).is_baseline for name in names)
    return 1 + len(names) * (1 + inputs.batches) + variants * (2 + inputs.batches)


def inputs_of(arguments: argparse.Namespace) -> Inputs:
    """Return the arguments as a value; sizes that are searched are 1."""
    given: dict[str, Any] = {field.name: getattr(arguments, field.name, None) for field in fields(Inputs)}
    given |= {name: None for name, value in given.items() if value == "auto"}
    given["searched"] = tuple(name for name in ("stages", "tensor_parallel") if given[name] is None)
    return Inputs(**given | dict.fromkeys(given["searched"], 1))


def _write_results(
    arguments: argparse.Namespace, results: dict[str, Any], *, comparison: Comparison, section: str = ""
) -> None:
    if arguments.json is not None:
        write_output("--json", arguments.json, text=json.dumps(results, indent=1) + "\n")
    if arguments.html is not None:
        write_output("--html", arguments.html, text=render(comparison, more=section))


def write_output(option: str, path: str, *, text: str) -> None:
    """Write the file of an option; a ConfigError names the option if it cannot be written."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise ConfigError(f"{option} {path!r} cannot be written: {error.strerror}; give another path") from error
