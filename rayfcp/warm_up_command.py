"""`rayfcp warm-up`: compile the kernels of planning ahead, for container images and shared installations."""

import argparse
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

TEXT = "compile the planners' kernels ahead of the first run"

EPILOG = """\
Compiled code lies beside the installed package, or in NUMBA_CACHE_DIR if that is set, and serves every process with
the same rayfcp, numba and kind of CPU. Put it at the end of an image's build.

Example:  RUN rayfcp warm-up
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rayfcp warm-up`: none."""
    parser.epilog = EPILOG


def run(_: argparse.Namespace) -> None:
    """Compile everything, with a line for each strategy, and print where the compiled code lies."""
    begin_s = time.monotonic()

    def log(text: str) -> None:
        sys.stdout.write(f"{time.monotonic() - begin_s:6.1f} s  {text}\n")
        sys.stdout.flush()

    folder = compile_all(log)
    log(f"done, kept in {folder}" if folder else "done, but no folder can be written to: set NUMBA_CACHE_DIR")


def compile_all(log: Callable[[str], None]) -> "Path | None":
    """Compile the kernels of planning and simulation; returns the folder that keeps them, None if none does."""
    from rayfcp.plan.first import cache_folder, warm_up
    from rayfcp.simulate import simulate_plan

    for name, plan, sequences in warm_up():
        if not plan.pipelines:
            simulate_plan(plan, sequences, model="qwen3-1.7b", hardware="h100")
        log(name)
    return cache_folder()
