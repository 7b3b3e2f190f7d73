"""Figure 3 of Flexible Context Parallelism: iteration time of six models on three text data sets, 64 devices.

    python jobs/reproduce/ring_figure3.py
    python jobs/reproduce/ring_figure3.py --models qwen3-8b --lengths my_lengths.txt --json figure3.json

For each model and source of lengths, simulated seconds of a global batch, means over batches:

    Megatron   static-cp: one degree of rings, tuned, packs by length alone
    DeepSpeed  ulysses: one degree of all-to-all over heads, tuned, packs by length alone
    tuned      the better of both with packs balanced by time, which the paper does not have
    stages     flex-ring with the paper's two stages: `packing: bfd`, `degrees: dp`
    joint      flex-ring as it plans by default

and the speedups of stages and joint over the better of Megatron and DeepSpeed, beside the paper's where its text has
one (the others are in a picture only, between 1.05 and 1.37, 8 of 18 above 1.2). `ceiling`: the speedup of a plan at
the lower bound, which none can pass. `joint/tuned`: how many times faster joint is than tuned.
"""

import sys
from collections.abc import Sequence
from typing import Any

from comparisons import ComparedSystems, compared
from tables import exit_code, inputs_of, lengths_name, log, parser_of, show, table, write_json

MODELS = ("qwen3-1.7b", "qwen3-4b", "qwen3-8b", "llama3.2-1b", "llama3.2-3b", "llama3-8b")
LENGTHS = ("dist:github", "dist:commoncrawl", "dist:wikipedia")
PAPER = {
    ("qwen3-8b", "github"): 1.37,
    ("llama3-8b", "github"): 1.36,
    ("qwen3-8b", "commoncrawl"): 1.30,
    ("llama3-8b", "commoncrawl"): 1.29,
    ("llama3.2-1b", "wikipedia"): 1.05,
}
PAPER_SUMMARY = "paper: 1.05-1.37, 8 of 18 above 1.2"
COLUMNS = (
    ("model", "model", "s"),
    ("lengths", "lengths", "s"),
    ("Megatron s", "megatron", ".3f"),
    ("DeepSpeed s", "deepspeed", ".3f"),
    ("tuned s", "tuned", ".3f"),
    ("stages s", "stages", ".3f"),
    ("joint s", "joint", ".3f"),
    ("paper", "paper", ".2f"),
    ("stages", "stages_speedup", ".2f"),
    ("joint", "joint_speedup", ".2f"),
    ("ceiling", "ceiling", ".2f"),
    ("joint/tuned", "joint_over_tuned", ".2f"),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Compare all, print the table."""
    parser = parser_of(__doc__, lengths=LENGTHS)
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="names or YAML paths")
    parser.add_argument("--devices", type=int, default=64, help="default: 64")
    args = parser.parse_args(argv)
    pairs = [(model, source) for model in args.models for source in args.lengths]
    rows = []
    for number, (model, source) in enumerate(pairs, start=1):
        log(f"[{number}/{len(pairs)}] {model} on {source}")
        inputs = inputs_of(args, source=source, devices=args.devices, model=model)
        rows.append(_row(compared(inputs), model=model, source=source))
    show(table(rows, COLUMNS))
    show(_summary(rows))
    write_json(args.json, args=args, rows=rows)


def _row(found: ComparedSystems, *, model: str, source: str) -> dict[str, Any]:
    best_s, seconds = found.best_baseline_s, found.seconds
    return {
        "model": model,
        "lengths": lengths_name(source),
        **seconds,
        "paper": PAPER.get((model, lengths_name(source))),
        "stages_speedup": best_s / seconds["stages"],
        "joint_speedup": best_s / seconds["joint"],
        "joint_over_tuned": seconds["tuned"] / seconds["joint"],
        "ceiling": best_s / (found.joint.lower_bound_s or best_s),
    }


def _summary(rows: Sequence[dict[str, Any]]) -> str:
    lines = [PAPER_SUMMARY]
    for name in ("stages", "joint"):
        speedups = [row[f"{name}_speedup"] for row in rows]
        above = sum(speedup > 1.2 for speedup in speedups)
        lines.append(f"{name}: {min(speedups):.2f}-{max(speedups):.2f}, {above} of {len(rows)} above 1.2")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(exit_code(main))
