"""Our planner under Megatron-LM's constraints against the planner of its dynamic context parallelism.

    git clone --bare --branch dev https://github.com/NVIDIA/Megatron-LM megatron.git
    python -m jobs.bench.megatron_planner --megatron megatron.git --ref dev

Both plan the same batches for the same memory per rank, and both plans keep the same constraints (checked). Megatron's
planner is read from a checkout or a bare clone; only its planning functions run, which need neither torch nor GPUs. It
takes one figure, the tokens of a rank, which also bounds how uneven its microbatches may be; it gets `LIMITS`, and
the best of its plans counts. `as configured` is its plan for all of the memory alone. Plans of groups that Megatron-LM
does not create (of 8 ranks out of 14) are counted as none.

Three judges price the plans: our cost model (with the simulated step beside it), the one that was published with
FlexSP, and the sum of squared lengths, which is what Megatron's planner makes small. Our planner plans for the judge's
cost model, as Megatron's plans for its own. Printed for each: batches, the share in which our plan is faster, the mean
and the least ratio of Megatron's time to ours, and our time over the lower bound. Then CPU milliseconds of planning.
"""

import argparse
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jobs.bench.megatron_source import Rows, megatron_planner
from rayfcp.compare.lengths import draw_batches
from rayfcp.config.constraints import PRESETS
from rayfcp.config.models import AUTO_MOVES, PlanConfig
from rayfcp.cost.kernels.group_time import Terms
from rayfcp.plan import CostModel, hardware_profile, lower_bound, model_profile
from rayfcp.plan.assembly import Draft, assemble, columns_of
from rayfcp.plan.constraints import broken_constraint
from rayfcp.plan.strategies.registry import get
from rayfcp.program import lower
from rayfcp.simulate import simulate
from rayfcp.values import BatchPlan, ClusterSpec, MicrobatchPlan, SequenceSpec

FAMILIES = ("dist:wikipedia", "dist:commoncrawl", "dist:github", "dist:bimodal")
RANKS = (8, 10, 14, 16, 20, 32, 48, 64)
FILL = 0.5
"""Longest sequence, as a share of the tokens that all ranks hold: longer ones are cut, so that two fit."""
LIMITS = (1.0, 0.75, 0.5, 0.375, 0.25, 0.125)
"""Of the tokens that a rank holds, that Megatron's planner is told."""
LEVEL = 1e-4
"""Relative difference of times that are level."""
MEGATRON = PRESETS["megatron"]

Sequences = Sequence[SequenceSpec]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """A cost model that our planner is given, and the seconds of a plan; `simulates`: whether plans are simulated
    too."""

    name: str
    cost: CostModel
    simulates: bool = False


class FlexSpCost(CostModel):
    """Seconds of a group by FlexSP's published solver for GPT-7B on A100: (a1 sum L^2 + a2 sum L) / d + b1, and an
    all-to-all of 16 bytes a token, layer and feature at the bandwidth measured for its degree, nothing of it hidden."""

    __slots__ = ()

    def terms(self, degree: Any, **_: Any) -> tuple[Terms, Terms]:
        """Forward and backward, a third and two thirds of everything."""
        ranks = np.asarray(degree, np.float64)
        moved_s = np.where(ranks > 1, ALL_TO_ALL_BYTES / ranks / np.interp(ranks, DEGREES, BANDWIDTHS), 0.0)
        passes = CostModel.terms(self, ranks)
        shares = (THIRD, 1 - THIRD)
        forward, backward = (
            terms._replace(moved_s_per_token=share * moved_s) for terms, share in zip(passes, shares, strict=True)
        )
        return forward, backward


THIRD = 1 / 3
DEGREES = (2, 4, 8, 16, 32, 64)
BANDWIDTHS = [each * 2**30 for each in (119.54, 104.07, 96.5, 10.33, 5.94, 4.87)]
"""Bytes a second by degree, as published; degrees between are interpolated."""
ALL_TO_ALL_BYTES = 4 * 2 * 32 * 4096 * 2
"""Of a token: 32 layers of 4,096 features."""
ONLY_COMPUTE = {
    "ring_intra_s_per_token": 0.0,
    "ring_inter_s_per_token": 0.0,
    "ring_s_per_round": 0.0,
    "ranks_per_node": 8,
    "overlap": 0.0,
    "attention_forward": THIRD,
    "linear_forward": THIRD,
}
FLEXSP = Judge(
    name="FlexSP's cost model",
    cost=FlexSpCost(
        attention_s_per_pair=2 * 5.128e-9,
        linear_s_per_token=183.9576e-6 - 5.128e-9,  # pairs are (L^2 + L) / 2
        fixed_s=0.6293563,
        **ONLY_COMPUTE,
    ),
)
SQUARES = Judge(
    name="squared lengths",
    cost=CostModel(attention_s_per_pair=2e-9, linear_s_per_token=0.0, fixed_s=0.0, **ONLY_COMPUTE),
)


def cases(
    family: str, *, ranks: int, batches: int, seed: int, args: argparse.Namespace
) -> Iterator[tuple[Sequences, ClusterSpec, CostModel]]:
    """Yield `batches` batches of `args.sequences_per_rank` sequences per rank, with their cluster and cost model."""
    hardware = hardware_profile(args.hardware)
    cost = CostModel.from_profiles(
        model_profile(args.model),
        hardware,
        num_ranks=ranks,
        bytes_per_element=hardware.dtype_bytes,
        reduce_every="step",
    )
    for batch in draw_batches(
        family,
        num_batches=batches,
        global_batch=args.sequences_per_rank * ranks,
        max_seqlen=min(args.max_seqlen, int(FILL * ranks * args.max_tokens_per_rank)),
        seed=seed,
    ):
        yield batch, ClusterSpec(num_ranks=ranks, max_tokens_per_rank=args.max_tokens_per_rank), cost


def plan_of(rows: Rows, batch: Sequences, *, cluster: ClusterSpec, cost: CostModel) -> tuple[MicrobatchPlan, ...]:
    """Megatron's plan: neighbouring ranks with equal ids are a group."""
    columns = columns_of(batch, cost=cost)
    place = {each: at for at, each in enumerate(columns.ids)}
    drafts = []
    for row in rows:
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, ids in enumerate(row):
            groups.setdefault(tuple(sorted(place[each] for each in ids)), []).append(rank)
        drafts.append([Draft(members=held, degree=len(ranks), among=tuple(ranks)) for held, ranks in groups.items()])
    return assemble(drafts, batch=columns, cluster=cluster, cost=cost)


def main() -> None:
    """Print a table of the judges, and times of planning."""
    args = _parser().parse_args()
    theirs = megatron_planner(args.megatron, ref=args.ref)
    found: dict[str, list[dict[str, float]]] = {}
    failed, failed_first = Counter[int](), Counter[int]()
    for ranks in args.ranks:
        for family in FAMILIES:
            for batch, cluster, cost in cases(family, ranks=ranks, batches=args.batches, seed=args.seed, args=args):
                rows = their_rows(theirs, batch, cluster=cluster)
                failed[ranks] += not rows
                failed_first[ranks] += LIMITS[0] not in rows
                for judge in (Judge(name="our cost model", cost=cost, simulates=True), FLEXSP, SQUARES):
                    if rows:
                        found.setdefault(judge.name, []).append(_measure(judge, batch, cluster, rows=rows, args=args))
        sys.stderr.write(f"{ranks} ranks done\n")
    for name, measured in found.items():
        _print(name, measured)
    for what, counts in (("at any limit", failed), ("as configured", failed_first)):
        text = ", ".join(f"{count} on {ranks} ranks" for ranks, count in counts.items() if count)
        sys.stdout.write(f"batches that Megatron's planner has no plan for {what}: {text or 0}\n")
    _print_times(theirs, args)


def their_rows(
    theirs: Callable[..., Rows], batch: Sequences, *, cluster: ClusterSpec, limits: Sequence[float] = LIMITS
) -> dict[float, Rows]:
    """Plans of Megatron's planner by limit, where it has one that Megatron-LM can run."""
    lengths = [(each.id, each.num_tokens) for each in batch]
    found = {}
    for share in limits:
        max_tokens = int(share * cluster.max_tokens_per_rank)
        try:
            rows = theirs(lengths, num_ranks=cluster.num_ranks, max_tokens=max_tokens)
        except (IndexError, AssertionError):  # of its own: no group is left to grow, or none is large enough
            continue
        plan = plan_of(rows, batch, cluster=cluster, cost=SQUARES.cost)
        if broken_constraint(plan, batch, cluster=cluster, constraints=MEGATRON) is None:
            found[share] = rows
    return found


def _measure(
    judge: Judge, batch: Sequences, cluster: ClusterSpec, *, rows: dict[float, Rows], args: argparse.Namespace
) -> dict[str, float]:
    """Seconds of both plans, predicted and, if the judge simulates, simulated."""
    plans = {share: plan_of(each, batch, cluster=cluster, cost=judge.cost) for share, each in rows.items()}
    theirs = min(plans.values(), key=_seconds)
    ours = planned(batch, cluster, cost=judge.cost, moves=args.search_moves)
    bound_s = lower_bound(batch, cluster=cluster, cost=judge.cost, constraints=MEGATRON)
    measured = {
        "ratio": _seconds(theirs) / _seconds(ours),
        "gap": _seconds(ours) / bound_s,
    }
    if LIMITS[0] in plans:
        measured["as configured"] = _seconds(plans[LIMITS[0]]) / _seconds(ours)
    if judge.simulates:
        measured["simulated"] = simulated_s(theirs, batch, args=args) / simulated_s(ours, batch, args=args)
    return measured


def _seconds(microbatches: Sequence[MicrobatchPlan]) -> float:
    return sum(each.predicted_s for each in microbatches)


def planned(batch: Sequences, cluster: ClusterSpec, *, cost: CostModel, moves: int | str) -> tuple[MicrobatchPlan, ...]:
    """Our plan under Megatron's constraints."""
    options = PlanConfig.model_validate({"primitives": "ring", "constraints": MEGATRON, "search_moves": moves})
    return get("flex-ring").plan(batch, cluster=cluster, cost=cost, options=options).microbatches


def simulated_s(microbatches: tuple[MicrobatchPlan, ...], batch: Sequences, *, args: argparse.Namespace) -> float:
    """Seconds of the step when its programs are replayed."""
    plan = BatchPlan(
        strategy="flex-ring",
        num_ranks=max(rank for group in microbatches[0].groups for rank in group.ranks) + 1,
        generation=0,
        microbatches=microbatches,
        recomputed_layers=0,
        predicted_s=_seconds(microbatches),
        lower_bound_s=0.0,
        reason="",
    )
    programs = lower(plan, batch, reduce_every="step")
    return simulate(programs, model=model_profile(args.model), hardware=hardware_profile(args.hardware)).iteration_s


def _print(name: str, measured: Sequence[dict[str, float]]) -> None:
    parts = []
    for column in ("ratio", "simulated", "as configured"):
        ratios = [each[column] for each in measured if column in each]
        if ratios:
            ahead, level = (sum(each > limit for each in ratios) / len(ratios) for limit in (1 + LEVEL, 1 - LEVEL))
            text = f"ahead in {100 * ahead:.1f} %, level in {100 * (level - ahead):.1f} %"
            text += f", mean {statistics.fmean(ratios):.3f}, least {min(ratios):.3f}"
            parts.append(f"{'best of its limits' if column == 'ratio' else column}: {text}")
    gap = statistics.fmean(each["gap"] for each in measured)
    sys.stdout.write(f"{name}, {len(measured)} batches: {'; '.join(parts)}; our gap {gap:.3f}\n")
    sys.stdout.flush()


def _print_times(theirs: Callable[..., Rows], args: argparse.Namespace) -> None:
    """CPU milliseconds of planning `--timed` batches of 512 sequences on 64 ranks, and what fewer moves cost."""
    batches = [
        each
        for family in FAMILIES
        for each in cases(family, ranks=64, batches=args.timed // len(FAMILIES), seed=args.seed + 1, args=args)
    ]
    first_s: list[float] = []
    for moves in (AUTO_MOVES, 1_000_000, 300_000):
        took, seconds = [], []
        for batch, cluster, cost in batches:
            start_s = time.process_time()
            seconds.append(_seconds(planned(batch, cluster, cost=cost, moves=moves)))
            took.append(1e3 * (time.process_time() - start_s))
        first_s = first_s or seconds
        longer = statistics.fmean(each / first for each, first in zip(seconds, first_s, strict=True))
        _print_time(f"ours, search_moves {moves}", took, after=f", step {100 * (longer - 1):+.2f} %")
    took = []
    for batch, _, _ in batches:
        start_s = time.process_time()
        theirs([(each.id, each.num_tokens) for each in batch], num_ranks=64, max_tokens=args.max_tokens_per_rank)
        took.append(1e3 * (time.process_time() - start_s))
    _print_time("Megatron's", took)


def _print_time(name: str, took: list[float], *, after: str = "") -> None:
    p99 = sorted(took)[math.ceil(0.99 * len(took)) - 1]
    sys.stdout.write(f"{name}: median {statistics.median(took):.1f} ms, p99 {p99:.1f} ms{after}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megatron", type=Path, required=True, help="checkout or bare clone of Megatron-LM")
    parser.add_argument("--ref", default="dev", help="branch or commit, for a bare clone")
    parser.add_argument("--ranks", nargs="*", type=int, default=RANKS, help="none: only times of planning")
    parser.add_argument("--batches", type=int, default=7, help="of each family and number of ranks")
    parser.add_argument("--timed", type=int, default=200, help="batches of which planning is timed")
    parser.add_argument("--search-moves", default=AUTO_MOVES)
    parser.add_argument("--sequences-per-rank", type=int, default=8)
    parser.add_argument("--max-seqlen", type=int, default=131_072)
    parser.add_argument("--max-tokens-per-rank", type=int, default=16_384)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    main()
