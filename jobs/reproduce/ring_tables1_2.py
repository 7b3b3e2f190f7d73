"""Tables 1 and 2 of Flexible Context Parallelism: planning time by global batch and by number of devices.

    python jobs/reproduce/ring_tables1_2.py
    python jobs/reproduce/ring_tables1_2.py --lengths dist:msrvtt my_rows.json --json tables1_2.json

CPU milliseconds of one core, medians over batches and repeats after untimed plans, of

    solver     from lengths to a plan
    schedule   the same and lowering it to one program per rank; the paper's has, unsaid, more in it

of flex-ring as it plans by default (joint) and of the paper's two stages (`packing: bfd`, `degrees: dp`), beside the
predicted seconds of the batch, vision encoder included, and all of it beside the paper's, whose data set is not named.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from tables import exit_code, inputs_of, log, parser_of, show, table, write_json

from rayfcp.compare.comparison import given_layout
from rayfcp.compare.layouts import best_setting
from rayfcp.compare.planning import OPTIONS, plan_timed
from rayfcp.program import lower

STRATEGY = "flex-ring"
PLANNERS = {
    "joint": OPTIONS,
    "stages": OPTIONS.model_copy(update={"packing": "bfd", "degrees": "dp"}),
}
PAPER = {
    (128, 64): (23, 448, 6.34),
    (256, 64): (45, 696, 7.58),
    (512, 64): (86, 905, 11.65),
    (512, 16): (20, 282, 34.45),
    (512, 32): (44, 537, 18.26),
}
"""Solver ms, schedule ms, compute s by global batch and devices."""

COLUMNS = (
    ("batch", "global_batch", "d"),
    ("devices", "devices", "d"),
    ("solver ms: joint", "joint_solver_ms", ".1f"),
    ("stages", "stages_solver_ms", ".1f"),
    ("paper", "paper_solver_ms", "d"),
    ("schedule ms: joint", "joint_schedule_ms", ".0f"),
    ("stages", "stages_schedule_ms", ".0f"),
    ("paper", "paper_schedule_ms", "d"),
    ("compute s: joint", "joint_s", ".2f"),
    ("stages", "stages_s", ".2f"),
    ("paper", "paper_s", ".2f"),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Time both tables, print them."""
    parser = parser_of(__doc__, model="qwen3-vl-2b", lengths=("dist:openvid",), batches=1)
    parser.add_argument("--devices", type=int, nargs="+", default=[16, 32, 64], help="of table 2; the last of table 1")
    parser.add_argument("--global-batches", type=int, nargs="+", default=[128, 256, 512], help="of table 1")
    parser.add_argument("--repeats", type=int, default=3, help="of each batch (default: 3)")
    args = parser.parse_args(argv)
    pairs = [(1, size, args.devices[-1]) for size in args.global_batches]
    pairs += [(2, args.global_batch, devices) for devices in args.devices]
    rows = []
    for source in args.lengths:
        for number, size, devices in pairs:
            log(f"table {number}: {size} sequences on {devices} devices, {source}")
            rows.append({"table": number} | _row(args, source=source, size=size, devices=devices))
        for number in (1, 2):
            show(f"table {number}: {args.model}, {source}\n")
            show(table([row for row in rows if row["table"] == number and row["lengths"] == source], COLUMNS))
    write_json(args.json, args=args, rows=rows)


def _row(args: argparse.Namespace, *, source: str, size: int, devices: int) -> dict[str, Any]:
    solver_ms, schedule_ms, compute_s = PAPER.get((size, devices), (None, None, None))
    row: dict[str, Any] = {
        "lengths": source,
        "global_batch": size,
        "devices": devices,
        "paper_solver_ms": solver_ms,
        "paper_schedule_ms": schedule_ms,
        "paper_s": compute_s,
    }
    for name in PLANNERS:
        row |= _timed(args, name, source=source, size=size, devices=devices)
    return row


def _timed(args: argparse.Namespace, name: str, *, source: str, size: int, devices: int) -> dict[str, float]:
    """Medians of one planner, under the setting that suits it best."""
    inputs = inputs_of(args, source=source, devices=devices, global_batch=size)
    candidate = given_layout(inputs, options=PLANNERS[name])
    setting = best_setting(STRATEGY, candidate)
    solver_s, schedule_s, predicted_s = [], [], []
    for batch in candidate.case.batches * args.repeats:
        plan, plan_s = plan_timed(batch, strategy=STRATEGY, setting=setting, options=PLANNERS[name])
        start_s = time.process_time()
        lower(plan, batch, reduce_every=setting.reduce_every)
        solver_s.append(plan_s)
        schedule_s.append(plan_s + time.process_time() - start_s)
        predicted_s.append(plan.predicted_s)
    return {
        f"{name}_solver_ms": 1e3 * statistics.median(solver_s),
        f"{name}_schedule_ms": 1e3 * statistics.median(schedule_s),
        f"{name}_s": statistics.fmean(predicted_s),
    }


if __name__ == "__main__":
    sys.exit(exit_code(main))
