"""Tables 4 and 5 of Flexible Context Parallelism: noise on the coefficients of the cost model, 32 and 64 devices.

    python jobs/reproduce/ring_tables4_5.py
    python jobs/reproduce/ring_tables4_5.py --lengths my_lengths.txt --draws 20 --json tables4_5.json

Each coefficient is multiplied by 1 + its own Gaussian draw of standard deviation 5 to 50 %. A plan is made with that
cost model and priced with the true one, on the same batches under the same draws, by

    letter   the paper's two stages to the letter: memory alone fills the bins, the dynamic program gives degrees
    stages   flex-ring with `packing: bfd`, `degrees: dp`, which searches capacities of bins and cuts as well
    joint    flex-ring as it plans by default

`rise`: mean excess over the plan made with the true model. `match`: share of the sequences whose group keeps its
degree. `joint/stages`, `joint/letter`: true seconds of the plans made under noise, means. Groups are rings.
The paper names neither model nor data set of these tables. What refitting gives back: jobs/bench/noise.py.
"""

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from literal import literal_plan
from tables import exit_code, inputs_of, log, parser_of, show, table, write_json

from rayfcp.compare.comparison import given_layout
from rayfcp.compare.layouts import best_setting
from rayfcp.compare.lengths import Batch
from rayfcp.compare.planning import plan_timed
from rayfcp.compare.settings import Setting
from rayfcp.config.models import PlanConfig
from rayfcp.plan import CostModel
from rayfcp.values import BatchPlan

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))
from noise import degree_match, noisy
from reprice import reprice

STRATEGY = "flex-ring"
OPTIONS = {"stages": PlanConfig(packing="bfd", degrees="dp"), "joint": PlanConfig()}
PLANNERS = ("letter", *OPTIONS)
LEVELS = (0, 5, 10, 20, 30, 50)
PAPER = {
    32: {0: (0.0, 100.0), 5: (0.0, 100.0), 10: (0.0, 100.0), 20: (0.0, 100.0), 30: (3.27, 92.7), 50: (4.84, 91.3)},
    64: {0: (0.0, 100.0), 5: (0.0, 100.0), 10: (0.0, 100.0), 20: (0.0, 100.0), 30: (5.73, 90.4), 50: (6.16, 88.8)},
}
"""Rise and match in % by devices and noise."""

COLUMNS = (
    ("devices", "devices", "d"),
    ("noise %", "noise", "d"),
    ("paper: rise %", "paper_rise", ".2f"),
    ("match %", "paper_match", ".1f"),
    ("letter: rise %", "letter_rise", ".2f"),
    ("match %", "letter_match", ".1f"),
    ("stages: rise %", "stages_rise", ".2f"),
    ("match %", "stages_match", ".1f"),
    ("joint: rise %", "joint_rise", ".2f"),
    ("match %", "joint_match", ".1f"),
    ("joint/letter", "joint_over_letter", ".3f"),
    ("joint/stages", "joint_over_stages", ".3f"),
)
Batches = tuple[Batch, ...]


def main(argv: Sequence[str] | None = None) -> None:
    """Plan under noise, print both tables."""
    parser = parser_of(__doc__, model="qwen3-8b", lengths=("dist:commoncrawl",))
    parser.add_argument("--devices", type=int, nargs="+", default=[32, 64], help="default: 32 64")
    parser.add_argument("--draws", type=int, default=10, help="of the coefficients at each level (default: 10)")
    args = parser.parse_args(argv)
    rows = []
    for source in args.lengths:
        for devices in args.devices:
            candidate = given_layout(inputs_of(args, source=source, devices=devices), options=OPTIONS["joint"])
            setting = best_setting(STRATEGY, candidate)  # for all planners
            rows += _rows(args, candidate.case.batches, source=source, setting=setting)
        show(f"{args.model}, {source}\n")
        show(table([row for row in rows if row["lengths"] == source], COLUMNS))
    write_json(args.json, args=args, rows=rows)


def _rows(args: argparse.Namespace, batches: Batches, *, source: str, setting: Setting) -> list[dict[str, Any]]:
    """One for each level of noise."""
    devices = setting.cluster.num_ranks
    exact = {name: [_plan(name, batch, setting=setting) for batch in batches] for name in PLANNERS}
    rows = []
    for level in LEVELS:
        log(f"{devices} devices, {level} % noise")
        totals: dict[str, float] = dict.fromkeys(PLANNERS, 0.0)
        rises: dict[str, list[float]] = {name: [] for name in PLANNERS}
        matches: dict[str, list[float]] = {name: [] for name in PLANNERS}
        for draw in range(args.draws if level else 1):
            cost = noisy(setting.cost, level / 100, rng=np.random.default_rng([args.seed, level, draw]))
            for name, plans in exact.items():
                for batch, best in zip(batches, plans, strict=True):
                    plan = _plan(name, batch, setting=setting, cost=cost)
                    totals[name] += plan.predicted_s
                    rises[name].append(plan.predicted_s / best.predicted_s - 1)
                    matches[name].append(degree_match(plan, best))
        rise, match = PAPER.get(devices, {}).get(level, (None, None))
        rows.append(
            {
                "lengths": source,
                "devices": devices,
                "noise": level,
                "paper_rise": rise,
                "paper_match": match,
                **{f"{name}_rise": 100 * statistics.fmean(each) for name, each in rises.items()},
                **{f"{name}_match": 100 * statistics.fmean(each) for name, each in matches.items()},
                "joint_over_letter": totals["joint"] / totals["letter"],
                "joint_over_stages": totals["joint"] / totals["stages"],
            }
        )
    return rows


def _plan(name: str, sequences: Batch, *, setting: Setting, cost: CostModel | None = None) -> BatchPlan:
    """A plan made with `cost`, if given, its seconds those of the setting's own."""
    cluster, made_with = setting.cluster, cost or setting.cost
    if name == "letter":
        plan = literal_plan(sequences, cluster=cluster, cost=made_with)
    else:
        given = dataclasses.replace(setting, cost=made_with)
        plan, _ = plan_timed(sequences, strategy=STRATEGY, setting=given, options=OPTIONS[name])
    return reprice(plan, sequences, cluster=cluster, cost=setting.cost)


if __name__ == "__main__":
    sys.exit(exit_code(main))
