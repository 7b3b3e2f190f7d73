"""Figure 5 of Flexible Context Parallelism: tokens a second of a device on 8, 16, 32 and 64 devices.

    python jobs/reproduce/ring_figure5.py
    python jobs/reproduce/ring_figure5.py --model qwen3-8b --lengths my_lengths.txt --json figure5.json

Simulated, in thousands of tokens a second of each device, means over batches, for Megatron (static-cp), DeepSpeed
(ulysses), `stages` (flex-ring with the paper's two stages) and `joint` (flex-ring as it plans by default), and the
ratios to DeepSpeed, beside the paper's where its text has one. The paper names neither model nor data set of this
figure; ours are Qwen3-8B and GitHub-like lengths.
"""

import sys
from collections.abc import Sequence
from typing import Any

from comparisons import compared
from tables import exit_code, inputs_of, log, parser_of, show, table, write_json

PAPER_FLEX = {8: 1.02, 64: 1.16}
PAPER_MEGATRON_K = {8: 1.8, 64: 1.52}
PAPER_DEEPSPEED_K = {8: 2.0, 64: 1.7}
COLUMNS = (
    ("devices", "devices", "d"),
    ("Megatron k", "megatron_k", ".2f"),
    ("paper", "paper_megatron_k", ".2f"),
    ("DeepSpeed k", "deepspeed_k", ".2f"),
    ("paper", "paper_deepspeed_k", ".2f"),
    ("stages k", "stages_k", ".2f"),
    ("joint k", "joint_k", ".2f"),
    ("Megatron/DeepSpeed", "megatron_ratio", ".2f"),
    ("stages/DeepSpeed", "stages_ratio", ".2f"),
    ("joint/DeepSpeed", "joint_ratio", ".2f"),
    ("paper", "paper_flex_ratio", ".2f"),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Compare on each number of devices, print the table."""
    parser = parser_of(__doc__, model="qwen3-8b", lengths=("dist:github",))
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 16, 32, 64], help="default: 8 16 32 64")
    args = parser.parse_args(argv)
    found = []
    for source in args.lengths:
        rows = [_row(args, devices=devices, source=source) for devices in args.devices]
        show(f"{args.model}, {source}\n")
        show(table(rows, COLUMNS))
        found += rows
    write_json(args.json, args=args, rows=found)


def _row(args: Any, *, devices: int, source: str) -> dict[str, Any]:
    log(f"{devices} devices, {source}")
    inputs = inputs_of(args, source=source, devices=devices)
    speeds = compared(inputs).tokens_per_s
    return {
        "lengths": source,
        "devices": devices,
        **{f"{name}_k": speed / 1e3 for name, speed in speeds.items()},
        **{f"{name}_ratio": speed / speeds["deepspeed"] for name, speed in speeds.items()},
        "paper_megatron_k": PAPER_MEGATRON_K.get(devices),
        "paper_deepspeed_k": PAPER_DEEPSPEED_K.get(devices),
        "paper_flex_ratio": PAPER_FLEX.get(devices),
    }


if __name__ == "__main__":
    sys.exit(exit_code(main))
