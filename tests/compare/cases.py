"""A small comparison that runs in a moment."""

from pathlib import Path
from typing import Any

from rayfcp.compare.arguments import Inputs

ROOT = Path(__file__).resolve().parents[2]

LENGTHS = [300, 12_000, 700, 1_500, 90, 4_000, 2_200, 650, 800, 5_000, 1_100, 60, 3_000, 410, 20_000, 900]


def write_lengths(folder: Path) -> Path:
    path = folder / "lengths.txt"
    path.write_text("\n".join(map(str, LENGTHS)) + "\n")
    return path


def small(folder: Path, **changes: Any) -> Inputs:
    given: dict[str, Any] = {
        "lengths": str(write_lengths(folder)),
        "model": "llama3.2-1b",
        "hardware": "h100",
        "devices": 4,
        "global_batch": 8,
        "batches": 2,
        "max_seqlen": 8192,
        "max_tokens_per_rank": 6_000,
        "strategies": ("flex-ring", "static-cp", "ring"),
    }
    return Inputs(**(given | changes))


def arguments(folder: Path, **changes: Any) -> list[str]:
    """The same as words of a command line; None leaves an option out."""
    given: dict[str, Any] = {
        "lengths": write_lengths(folder),
        "model": "llama3.2-1b",
        "hardware": "h100",
        "devices": 4,
        "global-batch": 8,
        "batches": 2,
        "max-seqlen": 8192,
        "max-tokens-per-rank": 6_000,
        "strategies": "flex-ring,static-cp,ring",
        "seed": 0,
    }
    words = ["compare"]
    for name, value in (given | changes).items():
        words += [] if value is None else [f"--{name}", str(value)]
    return words
