"""`rayfcp compare` from checked arguments to table, JSON and page."""

import argparse
import json
import sys
from pathlib import Path

from rayfcp.compare.contest import compare
from rayfcp.compare.inputs import Inputs
from rayfcp.compare.names import chosen
from rayfcp.compare.page import render
from rayfcp.compare.progress import Progress
from rayfcp.compare.table import format_table
from rayfcp.config import ConfigError
from rayfcp.telemetry.files import write_whole


def run(arguments: argparse.Namespace) -> None:
    """Compares, prints the table, writes the files that were asked for.

    Raises:
        ConfigError: arguments that cannot be used, or a file that cannot be written.
    """
    inputs = inputs_of(arguments)
    for option, path in (("--json", arguments.json), ("--html", arguments.html)):
        if path is not None and Path(path).is_dir():
            raise ConfigError(f"{option} is {path!r}, a folder; give the path of a file")
    with Progress(1 + len(chosen(inputs.strategies)) * (1 + inputs.batches)) as progress:
        comparison = compare(inputs, say=progress)
    sys.stdout.write(f"{format_table(comparison)}\n")
    if arguments.json is not None:
        _write("--json", arguments.json, text=json.dumps(comparison.as_json(), indent=1) + "\n")
    if arguments.html is not None:
        _write("--html", arguments.html, text=render(comparison))


def inputs_of(arguments: argparse.Namespace) -> Inputs:
    """The arguments as a value."""
    return Inputs(
        lengths=arguments.lengths,
        model=arguments.model,
        hardware=arguments.hardware,
        devices=arguments.devices,
        stages=arguments.stages,
        tensor_parallel=arguments.tensor_parallel,
        global_batch=arguments.global_batch,
        batches=arguments.batches,
        max_seqlen=arguments.max_seqlen,
        memory_gib=arguments.memory_gib,
        max_tokens_per_rank=arguments.max_tokens_per_rank,
        recompute_layers=arguments.recompute_layers,
        reduce_every=None if arguments.reduce_every == "auto" else arguments.reduce_every,
        gather_every=None if arguments.gather_every == "auto" else arguments.gather_every,
        packing=arguments.packing,
        degrees=arguments.degrees,
        strategies=tuple(name.strip() for name in arguments.strategies.split(",") if name.strip()),
        seed=arguments.seed,
    )


def _write(option: str, path: str, *, text: str) -> None:
    try:
        write_whole(path, text)
    except OSError as error:
        raise ConfigError(f"{option} {path!r} cannot be written: {error.strerror}; give another path") from error
