"""Table 6 of Flexible Context Parallelism: the degrees of two batches on 32 devices, and what they gain.

    python jobs/reproduce/ring_table6.py
    python jobs/reproduce/ring_table6.py --lengths a.txt b.txt --json table6.json

One case per source of lengths, the first batch of each: the groups of every microbatch as `<degree> x count`, for
Megatron (static-cp) and DeepSpeed (ulysses), which have one degree, for flex-ring with the paper's two stages and for
flex-ring as it plans by default (joint); and the simulated speedup of both over the better of the first two. The
paper's cases are videos (OpenVid, MSRVTT) and show one microbatch; ours are texts unless told otherwise, and show all.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from comparisons import ComparedSystems, compared
from tables import exit_code, inputs_of, lengths_name, log, parser_of, show, table, write_json

from rayfcp.values import BatchPlan, MicrobatchPlan

PAPER = (
    "the paper's case 1: DeepSpeed and Megatron <8>x4; theirs <8>x1 <6>x2 <4>x1 <2>x2 <1>x4, 1.27x\n"
    "the paper's case 2: DeepSpeed and Megatron <4>x8; theirs <4>x2 <3>x4 <2>x6, 1.19x\n"
)
COLUMNS = (
    ("case", "case", "s"),
    ("planner", "planner", "s"),
    ("iteration s", "iteration_s", ".3f"),
    ("speedup", "speedup", ".2f"),
    ("groups by microbatch", "groups", "s"),
)
PLANNERS = ("megatron", "deepspeed", "stages", "joint")


def main(argv: Sequence[str] | None = None) -> None:
    """Plan both cases, print their groups."""
    parser = parser_of(__doc__, model="qwen3-8b", lengths=("dist:github", "dist:commoncrawl"))
    parser.add_argument("--devices", type=int, default=32, help="default: 32")
    parser.set_defaults(batches=1)
    args = parser.parse_args(argv)
    rows = []
    for source in args.lengths:
        log(f"{args.model} on {source}")
        inputs = inputs_of(args, source=source, devices=args.devices)
        rows += _rows(compared(inputs), source=source)
    show(table(rows, COLUMNS))
    show(PAPER)
    write_json(args.json, args=args, rows=rows)


def _rows(found: ComparedSystems, *, source: str) -> list[dict[str, Any]]:
    return [
        {
            "case": lengths_name(source),
            "planner": name,
            "iteration_s": found.seconds[name],
            "speedup": found.best_baseline_s / found.seconds[name],
            "groups": groups_text(getattr(found, f"{name}_plan")),
        }
        for name in PLANNERS
    ]


def groups_text(plan: BatchPlan) -> str:
    """`<8>x1 <4>x6`, microbatches with a bar between them; equal ones are told once, as `3 of <8>x4`."""
    texts = Counter(_groups(microbatch) for microbatch in plan.microbatches)
    return " | ".join(text if count == 1 else f"{count} of {text}" for text, count in texts.items())


def _groups(microbatch: MicrobatchPlan) -> str:
    degrees = Counter(group.degree for group in microbatch.groups)
    return " ".join(f"<{degree}>x{degrees[degree]}" for degree in sorted(degrees, reverse=True))


if __name__ == "__main__":
    sys.exit(exit_code(main))
