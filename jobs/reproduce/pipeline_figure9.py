"""Figure 9 of InfiniPipe: where an iteration's time goes, 13B, batches of 512.

    python jobs/reproduce/pipeline_figure9.py
    python jobs/reproduce/pipeline_figure9.py --max-seqlen 98304 --lengths dist:github

Simulated seconds, means over devices and batches: `ZeRO`, parameters and gradients; `exchange`, all-to-all and rings;
`P2P`, between stages; of each what nothing hides. `waiting`: for other ranks and stages (of pipelines: bubbles), which
the paper has among `others` where there are no stages. The paper names neither lengths nor context of this figure.
"""

import sys
from collections.abc import Sequence
from typing import Any

from pipelines import MODELS, OURS, compare_systems, model_name, pipeline_parser, speedup
from tables import exit_code, lengths_name, log, show, table, write_json

PARTS = {
    "ZeRO": ("sharding",),
    "exchange": ("all_to_all", "ring"),
    "P2P": ("hop",),
    "waiting": ("bubble",),
    "compute": ("compute",),
}
SHOWN = ("DeepSpeed", "FlexSP", "Seq1F1B", OURS)
PAPER = {"DeepSpeed": 1.71, "FlexSP": 1.52, "Seq1F1B": None, OURS: 1.0}
COLUMNS = (
    ("lengths", "lengths", "s"),
    ("system", "system", "s"),
    ("iteration s", "iteration_s", ".2f"),
    *((name, name, ".2f") for name in PARTS),
    ("ZeRO + exchange %", "traffic", ".1f"),
    ("P2P + waiting %", "bubble", ".1f"),
    ("over it", "speedup", ".2f"),
    ("paper", "paper", ".2f"),
)


def main(argv: Sequence[str] | None = None) -> None:
    """A row for each source of lengths and system."""
    parser = pipeline_parser(__doc__, model=MODELS[1])
    args = parser.parse_args(argv)
    rows = [row for source in args.lengths for row in _rows(args, source)]
    show(f"{model_name(args.model)}, {args.devices} x {args.hardware}, sequences up to {args.max_seqlen:,} tokens\n")
    show(table(rows, COLUMNS))
    show("paper, InfiniPipe: ZeRO and all-to-all 17 % of an iteration, bubbles and P2P under 20 %\n")
    write_json(args.json, args=args, rows=rows)


def _rows(args: Any, source: str) -> list[dict[str, Any]]:
    log(lengths_name(source))
    entries = compare_systems(args, source=source, systems=SHOWN)
    rows = []
    for name, entry in entries.items():
        seconds = {
            part: None if entry.breakdown is None else sum(getattr(entry.breakdown, each) for each in fields)
            for part, fields in PARTS.items()
        }
        whole = entry.iteration_s
        rows.append(
            {
                "lengths": lengths_name(source),
                "system": name,
                "iteration_s": whole,
                **seconds,
                "traffic": _percent(whole, seconds["ZeRO"], seconds["exchange"]),
                "bubble": _percent(whole, seconds["P2P"], seconds["waiting"]),
                "speedup": speedup(entries, name),
                "paper": PAPER[name],
            }
        )
    return rows


def _percent(whole: float | None, *parts: float | None) -> float | None:
    return 100 * sum(part or 0.0 for part in parts) / whole if whole else None


if __name__ == "__main__":
    sys.exit(exit_code(main))
