"""Ablation of each part of planning: simulated step time with one part switched off against everything on.

    python jobs/bench/ablation.py --cases 200 --moves 300000,3000000 --json ablation.json

A case is a model, hardware, number of ranks, memory, primitives and a batch of one length distribution, drawn from its
number. One case in eight has ranks of unequal speed. Every plan is lowered and simulated as `rayfcp compare` does; a
plan that equals the one of everything on is not simulated again. Switches patch this process only:

- starts and moves of the joint search (Python level names of `rayfcp.plan.groups`);
- coefficients of the cost model: zero while planning, in place while simulating;
- options of the block and pipeline planners (`plan.blocks`, `plan.pipeline`), on a quarter and a tenth of the cases.

`mean` and `worst` are the relative change of simulated seconds: above zero, the part helps. `close` is the mean over
those cases in which the plan of everything on takes within 5 % of its predicted time: where the cost model misses the
simulator by more (mostly ranks that share a node's uplink), a change of a plan says little about the search.
"""

import argparse
import dataclasses
import importlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rayfcp.compare.distributions import DISTRIBUTIONS
from rayfcp.config.models import PlanConfig
from rayfcp.cost.analytic import device_hardware, device_model
from rayfcp.plan import CostModel, hardware_profile, max_tokens_per_rank, model_profile, plan_batch
from rayfcp.program import Programs, lower
from rayfcp.simulate import simulate
from rayfcp.values import BatchPlan, ClusterSpec, HardwareProfile, InfeasiblePlanError, ModelProfile, SequenceSpec

SEARCH = "rayfcp.plan.groups.joint"
Patch = tuple[str, str, Any]  # module (and class), attribute, value or a function of the present value

MODELS = ("qwen3-1.7b", "llama3-8b", "qwen3-8b", "gpt-13b", "gpt-30b")
HARDWARE = ("h100", "ascend-910c", "a800", "gpu-x")
RANKS = (8, 12, 16, 32, 32, 64, 64, 128, 256)
FILLS = (0.7, 1.5, 3.0, 6.0)  # tokens of the batch over those that all ranks hold
SEQUENCES_PER_RANK = (3, 6, 10, 16)
DIVIDING = ("_forward", "_share")  # shares that divide coefficients between passes or heads, no terms of their own
ESSENTIAL = ("attention_s_per_pair", "linear_s_per_token")  # without them nothing is left to plan

PARTS = ("search", "terms", "blocks", "pipeline")

BLOCKS: Mapping[str, Mapping[str, Any]] = {
    "shares placement": {"placement": "lpt"},
    "pacing": {"paced": False},
    "heads shared": {"heads": 1},
    "coalesced rounds": {"coalesce": 1},
}
PIPELINE: Mapping[str, Mapping[str, Any]] = {
    "balanced chunks": {"chunking": "fixed"},
    "adaptive recomputation": {"recompute": "uniform"},
    "elastic order": {"order": "1f1b"},
    "several pipelines": {"pipelines": 1},
    "several pipelines of more than the best": {"candidates": 1},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One batch on one cluster."""

    number: int
    model: ModelProfile
    hardware: HardwareProfile
    cluster: ClusterSpec
    cost: CostModel
    sequences: tuple[SequenceSpec, ...]
    primitives: tuple[str, ...]

    def lowered(self, plan: BatchPlan) -> Programs:
        return lower(plan, self.sequences)

    def seconds(self, programs: Programs) -> float:
        """Simulated time of a step."""
        speeds = self.cluster.speed_of_rank
        return simulate(programs, model=self.model, hardware=self.hardware, speed_of_rank=speeds).iteration_s

    def simulated_s(self, plan: BatchPlan) -> float:
        return self.seconds(self.lowered(plan))


def case_of(number: int, *, stages: int = 1, on: str = "", tensor_parallel: int = 1) -> Case:
    """The case of that number, `on` a given profile of hardware or one that is drawn; the same in any process. With
    `tensor_parallel`, that of one of so many devices of a rank."""
    rng = np.random.default_rng(number)
    names = list(DISTRIBUTIONS)
    ranks = int(rng.choice(RANKS if stages == 1 else RANKS[:4]))
    model, drawn = model_profile(str(rng.choice(MODELS))), str(rng.choice(HARDWARE))
    model = device_model(model, tensor_parallel)
    hardware = device_hardware(hardware_profile(on or drawn), model, tensor_parallel=tensor_parallel)
    lengths = DISTRIBUTIONS[names[number % len(names)]].sample(ranks * int(rng.choice(SEQUENCES_PER_RANK)), seed=number)
    lengths = lengths.clip(2, 131_072)
    held = int(lengths.sum() / float(rng.choice(FILLS)) / ranks)
    speeds = tuple(float(each) for each in rng.choice((1.0, 1.0, 1.0, 0.8, 0.6), ranks)) if number % 8 == 7 else ()
    sizes: dict[str, Any] = {"num_ranks": ranks, "bytes_per_element": hardware.dtype_bytes}
    if stages > 1:
        budget = max_tokens_per_rank(
            model,
            num_devices=ranks * stages,
            recomputed_layers=0,
            memory_bytes=int(hardware.memory_bytes * float(rng.choice((0.5, 0.75, 1.0)))),
            bytes_per_element=hardware.dtype_bytes,
            reduce_every="step",
        )
    else:
        budget = max(held, -(-int(lengths.max()) // ranks))
    return Case(
        number=number,
        model=model,
        hardware=hardware,
        cluster=ClusterSpec(
            num_ranks=ranks, num_stages=stages, max_tokens_per_rank=budget, speed_of_rank=speeds if stages == 1 else ()
        ),
        cost=CostModel.from_profiles(model, hardware, reduce_every="step", num_stages=stages, **sizes),
        sequences=tuple(
            SequenceSpec(id=at, num_tokens=int(each), num_targets=int(each) - 1) for at, each in enumerate(lengths)
        ),
        primitives=(("ring",), ("ring", "ulysses"))[number % 2],
    )


def group_switches() -> dict[str, list[Patch]]:
    """Parts of the joint search, each with what replaces it."""

    def none(*_: object, **__: object) -> tuple[()]:
        return ()

    cuts, search = "rayfcp.plan.groups.two_stage.Cuts", f"{SEARCH}.SpaceSearch"
    total_s = importlib.import_module("rayfcp.plan.groups.kernels.search").total_s
    perturb, ruin = (getattr(importlib.import_module(SEARCH), name) for name in ("perturb", "ruin"))
    return {
        "fill in turn": [(SEARCH, "FORCED", math.inf), (SEARCH, "SCARCE", math.inf)],
        "fill rounded to node": [(SEARCH, "fill_in_turn", lambda old: lambda problem, **_: old(problem))],
        "pack cuts": [(search, "_pack_cuts", lambda _: none)],
        "even start": [(SEARCH, "even", lambda _: lambda *_, **__: math.inf)],
        "round starts": [(cuts, "rounds", lambda _: none)],
        "cuts by length": [(cuts, "_by_length", lambda _: none)],
        "improve": [(SEARCH, "improve", lambda _: lambda problem, **_: total_s(problem))],
        "staged starts": [(SEARCH, "STAGED_CUTS", 0)],
        "perturb": [(SEARCH, "perturb", lambda _: ruin)],
        "ruin": [(SEARCH, "ruin", lambda _: perturb)],
        "perturb and ruin": [(SEARCH, "TURNS", 0), (search, "race", lambda _: none)],
        "narrower spaces": [(SEARCH, "narrower", lambda _: none)],
        "lines of a round": [(SEARCH, "LINES", 1), (SEARCH, "TURN_SHARE", 2.0)],
        "pinned groups": [("rayfcp.plan.groups.unequal", "_pinned", lambda _: none)],
    }


@contextmanager
def patched(patches: list[Patch]) -> Iterator[None]:
    """Set attributes for a while; a function as value is given the present one."""
    with ExitStack() as stack:
        for path, name, value in patches:
            owner = _owner(path)
            old = getattr(owner, name)
            stack.callback(setattr, owner, name, old)
            setattr(owner, name, value(old) if callable(value) else value)
        yield


def _owner(path: str) -> Any:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, name = path.rsplit(".", 1)
        return getattr(importlib.import_module(module), name)


def zeroed(cost: CostModel) -> Iterator[tuple[str, CostModel]]:
    """The cost model without each of its coefficients that is not zero."""
    for field in dataclasses.fields(CostModel):
        value = getattr(cost, field.name)
        if isinstance(value, float) and value > 0 and field.name not in ESSENTIAL and not field.name.endswith(DIVIDING):
            yield f"cost: {field.name}", cost.with_coefficients(**{field.name: 0.0})


Plan = Callable[[], BatchPlan]


def ways(
    case: Case, *, moves: int, terms: bool = True, switches: bool = True
) -> Iterator[tuple[str, list[Patch], Plan]]:
    """Each switch of a case: its name, what to patch, and the planning."""

    def planned(cost: CostModel) -> Plan:
        options = PlanConfig.model_validate({"primitives": case.primitives, "search_moves": moves})
        return lambda: plan_batch(case.sequences, cluster=case.cluster, cost=cost, options=options)

    yield "", [], planned(case.cost)
    for name, patches in group_switches().items() if switches else ():
        if name != "pinned groups" or case.cluster.speed_of_rank:
            yield f"groups: {name}", patches, planned(case.cost)
    for name, cost in zeroed(case.cost) if terms else ():
        yield name, [], planned(cost)


def planner_ways(
    case: Case, *, strategy: str, section: str, table: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, list[Patch], Plan]]:
    """Options of the block or the pipeline planner."""

    def planned(update: Mapping[str, Any]) -> Plan:
        options = PlanConfig.model_validate({"primitives": case.primitives, section: update})
        return lambda: plan_batch(
            case.sequences, cluster=case.cluster, cost=case.cost, options=options, strategy=strategy
        )

    yield "", [], planned({})
    for name, update in table.items():
        yield f"{section}: {name}", [], planned(update)


CLOSE = 0.05  # of the prediction

Changes = dict[str, list[tuple[float, bool]]]
"""Results by switch: the relative change of each case, and whether its prediction is close."""


def add_changes(case: Case, offered: Iterator[tuple[str, list[Patch], Plan]], changes: Changes) -> None:
    """Append the relative change of each switch; nothing where a plan is infeasible."""
    whole: tuple[BatchPlan, float] | None = None
    close = False
    for name, patches, plan_of in offered:
        with patched(patches):
            try:
                plan = plan_of()
            except InfeasiblePlanError:
                if not name:
                    return
                changes.setdefault(name, []).append((math.inf, False))
                continue
        if whole is None:
            whole = plan, case.simulated_s(plan)
            close = abs(whole[1] / plan.predicted_s - 1.0) < CLOSE
            continue
        same = (plan.microbatches, plan.pipelines) == (whole[0].microbatches, whole[0].pipelines)
        seconds = whole[1] if same else case.simulated_s(plan)
        changes.setdefault(name, []).append((seconds / whole[1] - 1.0, close))


def add_staged(number: int, changes: Changes) -> None:
    """Append what the pipeline planner's options change; nothing where the model does not fit these devices."""
    try:
        case = case_of(number, stages=2 + 2 * (number // 10 % 2))
    except InfeasiblePlanError:
        return
    add_changes(case, planner_ways(case, strategy="elastic-pipeline", section="pipeline", table=PIPELINE), changes)


def summary(changes: Changes) -> dict[str, dict[str, float]]:
    """Mean, worst and best change and number of cases by switch; the same of cases with a close prediction."""
    return {
        name: _figures([change for change, _ in each])
        | {f"{figure}_close": value for figure, value in _figures([change for change, close in each if close]).items()}
        for name, each in changes.items()
    }


def _figures(changes: list[float]) -> dict[str, float]:
    if not changes:
        return {"mean": 0.0, "worst": 0.0, "best": 0.0, "cases": 0}
    return {"mean": statistics.fmean(changes), "worst": max(changes), "best": min(changes), "cases": len(changes)}


def main() -> None:
    """Run all cases for each number of moves; print a table and write JSON."""
    args = _parser().parse_args()
    parts = set(args.parts.split(","))
    if unknown := parts - set(PARTS):
        sys.exit(f"--parts has {', '.join(sorted(unknown))}, must be of {', '.join(PARTS)}; remove it")
    found: dict[str, dict[str, dict[str, float]]] = {}
    for moves in [int(each) for each in args.moves.split(",")]:
        changes: Changes = {}
        begin_s = time.monotonic()
        for number in range(args.first, args.first + args.cases):
            case = case_of(number)
            if parts & {"search", "terms"}:
                offered = ways(case, moves=moves, terms="terms" in parts, switches="search" in parts)
                add_changes(case, offered, changes)
            # Neither share of the cases may follow what the number decides: lengths, primitives, speeds.
            if "blocks" in parts and number % 4 == number // 4 % 4:
                offered = planner_ways(case, strategy="flex-block", section="blocks", table=BLOCKS)
                add_changes(case, offered, changes)
            if "pipeline" in parts and number % 10 == number // 10 % 4:
                add_staged(number, changes)
            if (number + 1) % 10 == 0:
                sys.stderr.write(f"{moves} moves: case {number + 1}, {time.monotonic() - begin_s:.0f} s\n")
                found[str(moves)] = summary(changes)
                if args.json:
                    args.json.write_text(json.dumps(found, indent=1))
        found[str(moves)] = summary(changes)
        _print(moves, found[str(moves)])
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


def _print(moves: int, table: Mapping[str, Mapping[str, float]]) -> None:
    columns = ("mean", "worst", "best", "cases")
    heads = "".join(f"{name:>8}" for name in columns) + " | close:" + "".join(f"{name:>8}" for name in columns)
    sys.stdout.write(f"{f'{moves} moves, %':46}{heads}\n")
    for name, row in table.items():
        parts = [
            "".join(f"{100 * row[column + end]:8.2f}" for column in columns[:3]) + f"{row['cases' + end]:8.0f}"
            for end in ("", "_close")
        ]
        sys.stdout.write(f"{name:46}{' |       '.join(parts)}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--moves", default="300000,3000000", help="search budgets, comma-separated")
    parser.add_argument("--parts", default=",".join(PARTS), help="what to switch off, comma-separated (default: all)")
    parser.add_argument("--json", type=Path, default=None, metavar="OUT")
    return parser


if __name__ == "__main__":
    main()
