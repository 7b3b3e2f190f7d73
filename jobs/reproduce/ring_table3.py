"""Table 3 of Flexible Context Parallelism: by how much predicted seconds are off, in per cent.

    python jobs/reproduce/ring_table3.py
    python jobs/reproduce/ring_table3.py --models qwen3-vl-8b --lengths rows.json --json table3.json

The paper compares its fitted cost model with times measured on its devices, over modules that it does not name. Ours
compares the closed form by which plans are made (`CostModel`) with the replay of the plan's programs, instruction by
instruction and message by message, on the same hardware profile: what is off is what the closed form leaves out (who
waits for whom, in which round), not what a profile gets wrong of a device; that is measured by `rayfcp profile`. Of
flex-ring's plans, means over sources of lengths and batches of how far the prediction is from the replay, either way:

    language   a step whose features are at hand
    encoder    what pictures add to it
    step       both together
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tables import exit_code, inputs_of, log, parser_of, show, table, write_json

from rayfcp.compare.comparison import given_layout
from rayfcp.compare.layouts import best_setting
from rayfcp.compare.lengths import Batch
from rayfcp.compare.planning import OPTIONS, plan_timed
from rayfcp.compare.results import timeline_of
from rayfcp.compare.settings import Setting
from rayfcp.program import lower
from rayfcp.values import BatchPlan

STRATEGY = "flex-ring"
LENGTHS = ("dist:msrvtt", "dist:internvid", "dist:openvid")
PAPER = {
    "qwen3-vl-2b": 7.93,
    "qwen3-vl-4b": 6.71,
    "qwen3-vl-8b": 4.27,
    "internvl3-2b": 7.48,
    "internvl2.5-4b": 6.54,
    "internvl3-8b": 4.12,
}
COLUMNS = (
    ("model", "model", "s"),
    ("language %", "language", ".2f"),
    ("encoder %", "encoder", ".2f"),
    ("step %", "step", ".2f"),
    ("paper %", "paper", ".2f"),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Plan and replay all, print the table."""
    parser = parser_of(__doc__, lengths=LENGTHS, batches=1)
    parser.add_argument("--models", nargs="+", default=list(PAPER), help="names or YAML paths")
    parser.add_argument("--devices", type=int, default=64, help="default: 64")
    args = parser.parse_args(argv)
    rows = []
    for model in args.models:
        found = []
        for source in args.lengths:
            log(f"{model} on {source}")
            found += _errors(args, model=model, source=source)
        means = {name: statistics.fmean(each[name] for each in found) for name in ("language", "encoder", "step")}
        rows.append({"model": model, **means, "paper": PAPER.get(model), "cases": found})
    show(table(rows, COLUMNS))
    write_json(args.json, args=args, rows=rows)


def _errors(args: argparse.Namespace, *, model: str, source: str) -> list[dict[str, Any]]:
    """Per cent of each batch."""
    inputs = inputs_of(args, source=source, devices=args.devices, model=model)
    candidate = given_layout(inputs, options=OPTIONS)
    setting = best_setting(STRATEGY, candidate)
    return [{"lengths": source, **_off(batch, setting=setting)} for batch in candidate.case.batches]


def _off(batch: Batch, *, setting: Setting) -> dict[str, float]:
    plan, _ = plan_timed(batch, strategy=STRATEGY, setting=setting)
    encoder_s = sum(each.encoder_s for each in plan.microbatches)
    step_s = _replayed_s(plan, batch, setting=setting)
    language_s = _replayed_s(
        _without_pictures(plan),
        tuple(replace(each, images=()) for each in batch),
        setting=replace(setting, model=replace(setting.model, vision=None)),
    )
    return {
        "language": _per_cent(plan.predicted_s - encoder_s, language_s),
        "encoder": _per_cent(encoder_s, step_s - language_s),
        "step": _per_cent(plan.predicted_s, step_s),
    }


def _without_pictures(plan: BatchPlan) -> BatchPlan:
    microbatches = tuple(
        replace(each, encoding=(), encoder_s=0.0, predicted_s=each.predicted_s - each.encoder_s)
        for each in plan.microbatches
    )
    return replace(plan, microbatches=microbatches)


def _replayed_s(plan: BatchPlan, batch: Batch, *, setting: Setting) -> float:
    programs = lower(plan, batch, reduce_every=setting.reduce_every)
    return timeline_of(programs, setting=setting).iteration_s


def _per_cent(predicted_s: float, replayed_s: float) -> float:
    return 100 * abs(predicted_s / replayed_s - 1)


if __name__ == "__main__":
    sys.exit(exit_code(main))
