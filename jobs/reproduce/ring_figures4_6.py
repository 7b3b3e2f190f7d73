"""Figures 4 and 6 of Flexible Context Parallelism: iteration time of six models that see on three sets of videos, 64
devices, with the vision encoder trained (4) and frozen (6).

    python jobs/reproduce/ring_figures4_6.py
    python jobs/reproduce/ring_figures4_6.py --vision frozen --models qwen3-vl-8b --lengths rows.json --json out.json

For each model and source of lengths, simulated seconds of a global batch, means over batches:

    Megatron   static-cp: one degree of rings, packs by length alone; every rank of a group encodes all of its pictures,
               as Megatron-LM does; degree and setting tuned for that (`everywhere.py`)
    DeepSpeed  ulysses: the same with one degree of all-to-all over heads; - where heads or memory permit none
    even       the better of both if groups shared their pictures out evenly over their ranks, which neither does
    joint      flex-ring as it plans by default: pictures go to all ranks by their work

and the speedups of joint over the better of Megatron and DeepSpeed and over even, beside the paper's over its baselines
where its text has one (the others are in a picture only). `ceiling`: the first speedup of a plan at the lower bound,
which none can pass. `encoder`: its share of joint's predicted seconds. Plans are proven with `--check`, which takes as
long again.
"""

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from everywhere import everywhere_s
from tables import exit_code, inputs_of, lengths_name, log, parser_of, show, table, write_json

from rayfcp.compare.arguments import Inputs
from rayfcp.compare.comparison import Comparison, compare
from rayfcp.compare.lengths import lengths_of
from rayfcp.compare.settings import settings_of
from rayfcp.values import InfeasiblePlanError

MODELS = ("internvl3-2b", "internvl2.5-4b", "internvl3-8b", "qwen3-vl-2b", "qwen3-vl-4b", "qwen3-vl-8b")
LENGTHS = ("dist:msrvtt", "dist:internvid", "dist:openvid")
BASELINES = ("static-cp", "ulysses")
PAPER = {
    "trained": {
        ("internvl3-2b", "internvid"): 1.14,
        ("internvl3-8b", "msrvtt"): 1.38,
        ("internvl3-8b", "openvid"): 1.35,
        ("qwen3-vl-8b", "msrvtt"): 1.37,
        ("qwen3-vl-8b", "openvid"): 1.34,
    },
    "frozen": {
        ("internvl3-2b", "internvid"): 1.16,
        ("internvl3-8b", "msrvtt"): 1.40,
        ("internvl3-8b", "openvid"): 1.37,
        ("qwen3-vl-8b", "msrvtt"): 1.39,
        ("qwen3-vl-8b", "openvid"): 1.35,
    },
}
PAPER_SUMMARY = {
    "trained": "figure 4, the paper: 1.14-1.38, 15 of 18 above 1.2",
    "frozen": "figure 6, the paper: 1.16-1.40, 15 of 18 above 1.2",
}
COLUMNS = (
    ("model", "model", "s"),
    ("lengths", "lengths", "s"),
    ("vision", "vision", "s"),
    ("Megatron s", "megatron_s", ".3f"),
    ("DeepSpeed s", "deepspeed_s", ".3f"),
    ("even s", "even_s", ".3f"),
    ("joint s", "joint_s", ".3f"),
    ("encoder", "encoder", ".0%"),
    ("paper", "paper", ".2f"),
    ("joint", "speedup", ".2f"),
    ("ceiling", "ceiling", ".2f"),
    ("joint/even", "even_speedup", ".2f"),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Compare all, print the table."""
    parser = parser_of(__doc__, lengths=LENGTHS, batches=1)
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="names or YAML paths")
    parser.add_argument("--devices", type=int, default=64, help="default: 64")
    parser.add_argument("--vision", nargs="+", choices=tuple(PAPER), default=list(PAPER), help="default: both")
    parser.add_argument("--check", action="store_true", help="prove the plans of the first batch")
    args = parser.parse_args(argv)
    pairs = [(vision, model, source) for vision in args.vision for model in args.models for source in args.lengths]
    rows = []
    for number, (vision, model, source) in enumerate(pairs, start=1):
        log(f"[{number}/{len(pairs)}] {model} on {source}, {vision}")
        rows.append(_row(args, vision=vision, model=model, source=source))
        write_json(args.json, args=args, rows=rows)
    show(table(rows, COLUMNS))
    for vision in args.vision:
        show(_summary([row for row in rows if row["vision"] == vision], vision=vision))


def _row(args: argparse.Namespace, *, vision: str, model: str, source: str) -> dict[str, Any]:
    asked = inputs_of(args, source=source, devices=args.devices, model=model, frozen_vision=vision == "frozen")
    standard = compare(dataclasses.replace(asked, strategies=BASELINES, packing="bfd"), check=args.check)
    ours = compare(dataclasses.replace(asked, strategies=("flex-ring",)), check=args.check)
    published = {name: _everywhere_s(asked, standard, name) for name in BASELINES}
    (joint,) = ours.entries
    if joint.iteration_s is None:
        raise InfeasiblePlanError(joint.reason)
    best_s = _least(published.values())
    even_s = _least(entry.iteration_s for entry in standard.entries)
    microbatches = ours.scenes[0].plan.microbatches
    return {
        "model": model,
        "lengths": lengths_name(source),
        "vision": vision,
        "megatron_s": published["static-cp"],
        "deepspeed_s": published["ulysses"],
        "even_s": even_s,
        "joint_s": joint.iteration_s,
        "encoder": sum(each.encoder_s for each in microbatches) / sum(each.predicted_s for each in microbatches),
        "paper": PAPER[vision].get((model, lengths_name(source))),
        "speedup": best_s and best_s / joint.iteration_s,
        "ceiling": best_s and joint.lower_bound_s and best_s / joint.lower_bound_s,
        "even_speedup": even_s and even_s / joint.iteration_s,
    }


def _everywhere_s(asked: Inputs, comparison: Comparison, name: str) -> float | None:
    """Mean over the batches of a comparison; None where one has no plan."""
    case = comparison.case
    try:
        settings = settings_of(asked, model=case.model, hardware=case.hardware, longest=max(lengths_of(case.batches)))
    except InfeasiblePlanError:
        return None
    seconds = [
        everywhere_s(
            name,
            batch,
            settings=settings,
            options=case.options,
        )
        for batch in case.batches
    ]
    return None if None in seconds else statistics.fmean(each for each in seconds if each is not None)


def _least(seconds: Any) -> float | None:
    return min((each for each in seconds if each is not None), default=None)


def _summary(rows: Sequence[dict[str, Any]], *, vision: str) -> str:
    lines = [PAPER_SUMMARY[vision]]
    for name, key in (("joint", "speedup"), ("joint/even", "even_speedup")):
        speedups = [row[key] for row in rows if row[key]]
        if speedups:
            above = sum(speedup > 1.2 for speedup in speedups)
            lines.append(f"{name}, {vision}: {min(speedups):.2f}-{max(speedups):.2f}, {above} of {len(rows)} above 1.2")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(exit_code(main))
