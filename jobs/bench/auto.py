"""`auto` beside every single strategy: the same batches, ranks and costs for all, simulated, with and without stages.

python jobs/bench/auto.py --json auto.json

A row for each distribution of lengths, number of devices and of stages: seconds of a step with the best single strategy
and with `auto`, their ratio, which strategy `auto` took, and the CPU milliseconds that it planned for, simulation
included. Strategies that have no plan for a batch are left out of it.
"""

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from rayfcp.compare.arguments import Inputs
from rayfcp.compare.comparison import given_layout
from rayfcp.compare.layouts import best_setting, plan_chosen_timed
from rayfcp.compare.lengths import Batch
from rayfcp.compare.planning import OPTIONS, plan_timed
from rayfcp.compare.results import timeline_of
from rayfcp.compare.settings import Setting
from rayfcp.plan import strategy_names
from rayfcp.program import lower
from rayfcp.values import BatchPlan, InfeasiblePlanError
from rayfcp.verify import check_plan

DISTRIBUTIONS = ("lognormal", "bimodal", "long-tail", "github")
SHOWN = ("lengths", "devices", "stages", "best single", "s", "auto s", "auto/best", "planning ms", "took")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Means over batches; `single_s`: of each strategy that has a plan for all of them. `best_of_batch_s`: of the
    strategies that are best for each batch. `plan_ms`: CPU time, median."""

    distribution: str
    devices: int
    stages: int
    single_s: dict[str, float]
    best_of_batch_s: float
    auto_s: float
    plan_ms: float
    taken: dict[str, int]

    @property
    def best(self) -> str:
        return min(self.single_s, key=lambda name: self.single_s[name])

    @property
    def ratio(self) -> float:
        """`auto` over the best single strategy of all batches."""
        return self.auto_s / self.single_s[self.best]


def main() -> None:
    """All cases, a table, JSON if asked for."""
    args = _parser().parse_args()
    cases = []
    sys.stdout.write(_row(SHOWN))
    for distribution, devices, stages in product(args.distributions, args.devices, args.stages):
        case = run(_inputs(args, distribution, devices, stages), strategies=args.strategies)
        cases.append(case)
        sys.stdout.write(_row(_cells(case)))
        sys.stdout.flush()
    worst = max(case.ratio for case in cases)
    sys.stdout.write(f"auto over the best single strategy: worst {worst:.4f}\n")
    if args.json:
        lines = [asdict(case) | {"best": case.best, "ratio": case.ratio} for case in cases]
        Path(args.json).write_text(json.dumps({"worst": worst, "cases": lines}, indent=1) + "\n")


def run(inputs: Inputs, *, strategies: Sequence[str]) -> Case:
    """One case. The first batch's plan of `auto` is proven by the validator.

    Raises:
        InfeasiblePlanError: no strategy has a plan.
    """
    candidate = given_layout(inputs, options=OPTIONS)
    setting, batches = best_setting("auto", candidate), candidate.case.batches
    singles = {name: _single(name, batches, setting=setting) for name in strategies}
    single_s = {name: seconds for name, seconds in singles.items() if seconds}
    found = [plan_chosen_timed(batch, strategy="auto", setting=setting, options=OPTIONS) for batch in batches]
    check_plan(found[0][0], batches[0], cluster=setting.cluster, cost=setting.cost)
    auto_s = [_simulated(plan, batch, setting=setting) for (plan, _, _), batch in zip(found, batches, strict=True)]
    return Case(
        distribution=inputs.lengths.removeprefix("dist:"),
        devices=inputs.devices,
        stages=inputs.stages,
        single_s={name: statistics.fmean(seconds) for name, seconds in single_s.items()},
        best_of_batch_s=statistics.fmean(min(each) for each in zip(*single_s.values(), strict=True)),
        auto_s=statistics.fmean(auto_s),
        plan_ms=1e3 * statistics.median(plan_s for _, _, plan_s in found),
        taken=dict(Counter(plan.strategy for plan, _, _ in found)),
    )


def _single(name: str, batches: Sequence[Batch], *, setting: Setting) -> list[float]:
    """Seconds of each batch; none if the strategy has no plan for one of them."""
    try:
        plans = [plan_timed(batch, strategy=name, setting=setting, options=OPTIONS)[0] for batch in batches]
    except InfeasiblePlanError:
        return []
    return [_simulated(plan, batch, setting=setting) for plan, batch in zip(plans, batches, strict=True)]


def _simulated(plan: BatchPlan, batch: Batch, *, setting: Setting) -> float:
    programs = lower(plan, batch, reduce_every=setting.reduce_every)
    return timeline_of(programs, setting=setting).iteration_s


def _inputs(args: argparse.Namespace, distribution: str, devices: int, stages: int) -> Inputs:
    return Inputs(
        lengths=f"dist:{distribution}",
        model=args.model,
        hardware=args.hardware,
        devices=devices,
        stages=stages,
        global_batch=args.sequences,
        batches=args.batches,
        max_seqlen=args.max_seqlen,
        reduce_every="step",
        gather_every="microbatch" if stages > 1 else None,
        seed=args.seed,
    )


def _cells(case: Case) -> tuple[str, ...]:
    taken = ", ".join(f"{name} {count}" for name, count in sorted(case.taken.items()))
    best = case.best
    figures = f"{case.single_s[best]:.3f}", f"{case.auto_s:.3f}", f"{case.ratio:.4f}", f"{case.plan_ms:.0f}"
    return (case.distribution, str(case.devices), str(case.stages), best, *figures, taken)


def _row(cells: Sequence[str]) -> str:
    widths = (10, 8, 7, 17, 8, 8, 10, 12, 0)
    return "".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip() + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--distributions", nargs="+", default=list(DISTRIBUTIONS), metavar="NAME")
    parser.add_argument("--devices", nargs="+", type=int, default=[8, 16, 32], metavar="D")
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 4], metavar="P")
    parser.add_argument("--strategies", nargs="+", metavar="NAME", help="to compare with (default: all)")
    parser.add_argument("--sequences", type=int, default=128, help="in a global batch")
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--max-seqlen", type=int, default=65536)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="OUT", help="file for all figures")
    parser.set_defaults(strategies=[name for name in strategy_names() if name != "auto"])
    return parser


if __name__ == "__main__":
    main()
