"""Code shared by the scripts of this folder: arguments, tables as text, JSON, progress, and errors in one line."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rayfcp.compare.arguments import Inputs
from rayfcp.config import ConfigError
from rayfcp.values import InfeasiblePlanError

Rows = Sequence[dict[str, Any]]
Columns = Sequence[tuple[str, str, str]]
"""Head, key of the row, format of the value; what is None shows as -."""


def parser_of(
    doc: str | None,
    *,
    model: str | None = None,
    lengths: Sequence[str] = (),
    hardware: str = "ascend-910c",
    batches: int = 3,
    max_seqlen: int = 131_072,
) -> argparse.ArgumentParser:
    """A parser with the options that most scripts take; the keywords (of lengths several) are defaults."""
    parser = parser_of_draws(doc, model=model, lengths=lengths, hardware=hardware, batches=batches)
    parser.add_argument("--global-batch", type=int, default=512, help="sequences in a batch (default: 512)")
    parser.add_argument(
        "--max-seqlen", type=int, default=max_seqlen, help=f"longer ones are cut (default: {max_seqlen})"
    )
    return parser


def parser_of_draws(
    doc: str | None, *, model: str | None, lengths: Sequence[str], hardware: str, batches: int
) -> argparse.ArgumentParser:
    """Without what says how large a batch is."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if model is not None:
        parser.add_argument("--model", default=model, help=f"name or YAML path (default: {model})")
    parser.add_argument("--hardware", default=hardware, help=f"name or YAML path (default: {hardware})")
    parser.add_argument(
        "--lengths",
        nargs="+",
        default=list(lengths),
        metavar="FILE",
        help=f"files of lengths, or dist:NAME (default: {' '.join(lengths)})",
    )
    parser.add_argument(
        "--batches", type=int, default=batches, help=f"batches that figures are means of (default: {batches})"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: 0)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="file for inputs and rows")
    return parser


def inputs_of(args: argparse.Namespace, *, source: str, devices: int, **chosen: Any) -> Inputs:
    """Inputs of a comparison from the options of `parser_of`; `chosen` fields go before them."""
    asked = {
        "model": getattr(args, "model", None),
        "hardware": args.hardware,
        "global_batch": args.global_batch,
        "batches": args.batches,
        "max_seqlen": args.max_seqlen,
        "seed": args.seed,
    }
    return Inputs(lengths=source, devices=devices, **(asked | chosen))


def lengths_name(source: str) -> str:
    """`github` of `dist:github`, `mine` of `some/mine.txt`."""
    return source.removeprefix("dist:") if source.startswith("dist:") else Path(source).stem


def table(rows: Rows, columns: Columns) -> str:
    """Aligned lines below a line of heads; text to the left, numbers to the right; a newline at the end."""
    cells = [[head for head, _, _ in columns]]
    cells += [[_shown(row[key], spec) for _, key, spec in columns] for row in rows]
    widths = [max(len(line[at]) for line in cells) for at in range(len(columns))]
    sides = ["<" if spec == "s" else ">" for _, _, spec in columns]
    lines = [
        "  ".join(f"{text:{side}{width}}" for text, side, width in zip(line, sides, widths, strict=True)).rstrip()
        for line in cells
    ]
    return "\n".join(lines) + "\n"


def _shown(value: Any, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def log(text: str) -> None:
    """A line of progress."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def show(text: str) -> None:
    """A part of the result."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_json(path: Path | None, *, args: argparse.Namespace, rows: Rows) -> None:
    """Inputs and rows, if a file was asked for."""
    if path is None:
        return
    inputs = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    path.write_text(json.dumps({"inputs": inputs, "rows": list(rows)}, indent=1) + "\n", encoding="utf-8")


def exit_code(main: Callable[[], None]) -> int:
    """Runs it; 2 and one line on stderr where the inputs cannot be used."""
    try:
        main()
    except (ConfigError, InfeasiblePlanError) as error:
        log(str(error))
        return 2
    return 0
