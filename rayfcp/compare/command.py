"""`rayfcp compare`: from checked arguments to table, JSON and page."""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO

from rayfcp.compare.advice import AdviceRequest, Advisor, format_layouts, layout_section
from rayfcp.compare.arguments import Inputs, chosen
from rayfcp.compare.comparison import compare
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
    if arguments.write_config is not None or None in (arguments.stages, arguments.tensor_parallel):
        _advise(inputs, arguments)
        return
    with Progress(1 + len(chosen(inputs.strategies)) * (1 + inputs.batches)) as progress:
        comparison = compare(inputs, log=progress)
    sys.stdout.write(f"{format_table(comparison)}\n")
    _write_all(arguments, results=comparison.as_json(), page=lambda: render(comparison))


def _advise(inputs: Inputs, arguments: argparse.Namespace) -> None:
    """Search layouts, and write a configuration if requested."""
    request = AdviceRequest(
        inputs=inputs, stages=arguments.stages, tensor_parallel=arguments.tensor_parallel, data=arguments.data
    )
    advisor = Advisor(request)
    with Progress(advisor.num_pairs) as progress:
        advice = advisor.advise(log=progress)
    sys.stdout.write(f"{format_table(advice.comparison)}\n\n{format_layouts(advice)}\n")
    _write_all(
        arguments,
        results=advice.as_json(),
        page=lambda: render(advice.comparison, more=layout_section(advice), searched=advice.request.searched),
    )
    if arguments.write_config is not None:
        _write("--write-config", arguments.write_config, text=run_config_text(advice))


def _write_all(arguments: argparse.Namespace, *, results: dict[str, Any], page: Callable[[], str]) -> None:
    if arguments.json is not None:
        _write("--json", arguments.json, text=json.dumps(results, indent=1) + "\n")
    if arguments.html is not None:
        _write("--html", arguments.html, text=page())


def inputs_of(arguments: argparse.Namespace) -> Inputs:
    """Return the arguments as a value; sizes that are searched are 1."""
    given = {field.name: getattr(arguments, field.name) for field in fields(Inputs)}
    given = {name: None if value == "auto" else value for name, value in given.items()}
    return Inputs(**given | {"stages": given["stages"] or 1, "tensor_parallel": given["tensor_parallel"] or 1})


def _write(option: str, path: str, *, text: str) -> None:
    try:
        write_whole(path, text)
    except OSError as error:
        raise ConfigError(f"{option} {path!r} cannot be written: {error.strerror}; give another path") from error
