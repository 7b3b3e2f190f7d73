"""Predicted against simulated seconds of plans, and `flex-ring` against the narrower families that it contains.

    python -m jobs.bench.agreement --cases 200 --hardware h100 a800 --tensor-parallel 1 4 --families
    python -m jobs.bench.agreement --cases 200 --hardware h100 a800 --strategy flex-block --most-ranks 64
    python -m jobs.bench.agreement --cases 48 --hardware h100 --strategy elastic-pipeline --stages 2

Cases are those of `ablation.py`, on each profile of hardware and with each number of tensor-parallel devices. A line by
profile: mean and largest error of the prediction, of the simulated time; in how many cases a narrower family is
simulated to be more than 0.1 % faster, and by how much at most. Families: static context parallelism with rings, the
same over heads where the case has that primitive, and degrees that are powers of two.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator

from jobs.bench.ablation import Case, case_of
from rayfcp.config.models import PlanConfig
from rayfcp.cost.profiles import HARDWARE
from rayfcp.plan.batch import plan_candidates
from rayfcp.simulate.simulate import choose
from rayfcp.values import BatchPlan, InfeasiblePlanError

FAMILIES = ("static-cp", "ulysses", "dynamic-cp")
BEHIND = 1.001
SIZES = (1, 2, 4)
"""Numbers of tensor-parallel devices that divide the heads of all models of the cases."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--hardware", nargs="+", default=[each for each in HARDWARE if each != "cpu"])
    parser.add_argument("--tensor-parallel", nargs="+", type=int, choices=SIZES, default=[1])
    parser.add_argument("--strategy", default="flex-ring")
    parser.add_argument("--stages", type=int, default=1, help="pipeline stages, for strategies that plan them")
    parser.add_argument("--most-ranks", type=int, default=256, help="leave larger cases out")
    parser.add_argument("--families", action="store_true", help="plan the narrower families too")
    parser.add_argument("--worst", type=int, default=0, help="name so many cases with the largest errors")
    args = parser.parse_args()
    for name in args.hardware:
        for size in args.tensor_parallel:
            _report(f"{name} x{size}", list(_cases(name, size, args=args)), args=args)


def _cases(name: str, size: int, *, args: argparse.Namespace) -> Iterator[Case]:
    """Cases whose stages fit in memory."""
    for number in range(args.first, args.first + args.cases):
        try:
            case = case_of(number, on=name, tensor_parallel=size, stages=args.stages)
        except InfeasiblePlanError:
            continue
        if case.cluster.num_ranks <= args.most_ranks:
            yield case


def _report(label: str, cases: list[Case], *, args: argparse.Namespace) -> None:
    errors, behind = [], []
    for case in cases:
        try:
            plan = _plan(case, args.strategy)
        except InfeasiblePlanError:
            continue
        simulated_s = case.simulated_s(plan)
        errors.append((plan.predicted_s / simulated_s - 1, case))
        if args.families:
            behind += [(simulated_s / case.simulated_s(other), case, other.strategy) for other in _narrower(case)]
    if not errors:
        sys.stdout.write(f"{label}: none of {len(cases)} cases has a plan\n")
        return
    sizes = [abs(error) for error, _ in errors]
    line = f"{label}: {len(errors)} cases, mean {100 * statistics.fmean(sizes):.2f} %, worst {100 * max(sizes):.1f} %"
    if behind:
        ratios = [ratio for ratio, *_ in behind]
        late = sum(ratio > BEHIND for ratio in ratios)
        line += f"; behind a narrower family {late} of {len(behind)}, at most {100 * (max(ratios) - 1):.1f} %"
    sys.stdout.write(line + "\n")
    for error, case in sorted(errors, key=lambda each: -abs(each[0]))[: args.worst]:
        ranks, budget = case.cluster.num_ranks, case.cluster.max_tokens_per_rank
        sys.stdout.write(f"  case {case.number}: {100 * error:+.1f} %, {case.model.name}, {ranks} ranks of {budget}\n")
    for ratio, case, family in sorted(behind, key=lambda each: -each[0])[: args.worst]:
        sys.stdout.write(f"  case {case.number}: {100 * (ratio - 1):+.1f} % behind {family}\n")
    sys.stdout.flush()


def _narrower(case: Case) -> list[BatchPlan]:
    """Plans of the families that have one."""
    found = []
    for name in FAMILIES:
        if name == "ulysses" and "ulysses" not in case.primitives:
            continue
        try:
            found.append(_plan(case, name))
        except InfeasiblePlanError:
            continue
    return found


def _plan(case: Case, strategy: str) -> BatchPlan:
    """Return the plan that a run takes, which may choose by simulation."""
    options = PlanConfig(primitives=case.primitives)
    plans = plan_candidates(case.sequences, cluster=case.cluster, cost=case.cost, strategy=strategy, options=options)
    return choose(plans, strategy=strategy, lowered=case.lowered, seconds=case.seconds).plan


if __name__ == "__main__":
    main()
