"""Loss of a plan under a wrong cost model, and what refitting from measured groups recovers.

    python jobs/bench/noise.py --lengths wikipedia.txt --ranks 32 64

Every coefficient of the cost model (shares and counts are none) is multiplied by 1 + its own Gaussian draw of
standard deviation 5 to 50 %, at least 0.05. The plan is made with that model and priced with the true one:
`rise` is its mean excess over the plan made with the true model, for our joint search and for the paper's two
stages (`packing: bfd`, `degrees: dp`), on the same batches under the same draws. `match`: sequences whose group
keeps its degree (Flexible Context Parallelism, Tables 4 and 5). `vs two-stage`: mean true seconds of joint over
those of the two stages. Then five steps of refitting, from the true seconds of the groups that ran, +-2 %.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from reprice import reprice

from rayfcp.config.models import PlanConfig
from rayfcp.cost.placement import node_of_ranks
from rayfcp.cost.refit import GroupWork, Observation, Refit
from rayfcp.plan import CostModel, hardware_profile, max_tokens_per_rank, model_profile, plan_batch
from rayfcp.values import BatchPlan, ClusterSpec, SequenceSpec

LEVELS = (5, 10, 20, 30, 50)
REFIT_LEVELS = (20, 50)
REFIT_STEPS = 5
PLANNERS = {"joint": {"packing": "joint", "degrees": "exact"}, "two-stage": {"packing": "bfd", "degrees": "dp"}}

Batch = Sequence[SequenceSpec]

NOISY = (
    "attention_s_per_pair",
    "attention_half_tokens",
    "linear_s_per_token",
    "fixed_s",
    "ring_intra_s_per_token",
    "ring_inter_s_per_token",
    "ring_s_per_round",
    "shard_s",
    "reduce_s",
    "exposed_s",
    "reduce_exposed_s",
)
"""Coefficients of plans of rings: shares and counts are none."""

LEAST = 0.05
"""Least share of its own value to which a draw can reduce a coefficient."""


def noisy(cost: CostModel, deviation: float, *, rng: np.random.Generator) -> CostModel:
    """Each coefficient times 1 + its own Gaussian draw of standard deviation `deviation`, at least `LEAST`.

    Source: Flexible Context Parallelism (Niu et al.), section 6.4.1.
    """
    factors = np.maximum(1 + deviation * rng.standard_normal(len(NOISY)), LEAST)
    return cost.with_coefficients(
        **{name: float(factor) * getattr(cost, name) for name, factor in zip(NOISY, factors, strict=True)}
    )


def degree_match(plan: BatchPlan, other: BatchPlan) -> float:
    """Share of the sequences whose group has the same degree in both plans of one batch: what Tables 4 and 5 of
    Flexible Context Parallelism call CP match, which the paper does not define."""
    one, two = _degrees(plan), _degrees(other)
    return sum(one[each] == two[each] for each in one) / len(one)


def _degrees(plan: BatchPlan) -> dict[int, int]:
    """Degree of each sequence's group, by the sequence's id."""
    return {
        each: group.degree
        for microbatch in plan.microbatches
        for group in microbatch.groups
        for each in group.sequences
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Setting of a plan, and the cost model that is true there."""

    cluster: ClusterSpec
    cost: CostModel

    def plan(self, batch: Batch, planner: str, *, cost: CostModel) -> BatchPlan:
        options = PlanConfig.model_validate(PLANNERS[planner])
        return plan_batch(batch, cluster=self.cluster, cost=cost, options=options)

    def true_s(self, plan: BatchPlan, batch: Batch) -> float:
        return reprice(plan, batch, cluster=self.cluster, cost=self.cost).predicted_s


def main() -> None:
    """Print both tables for each number of ranks."""
    args = _parser().parse_args()
    for num_ranks in args.ranks:
        world = _world(args, num_ranks)
        batches = [_batch(args, number) for number in range(args.batches)]
        sys.stdout.write(
            f"{num_ranks} ranks of {args.hardware}, {world.cluster.max_tokens_per_rank} tokens each, {args.model}, "
            f"{args.batches} batches of {args.sequences} from {args.lengths.name}, {args.draws} draws\n"
        )
        _robustness(world, batches, draws=args.draws)
        for error in (0.0, 0.02):
            _refitting(world, batches, draws=args.draws, error=error)


def _robustness(world: World, batches: Sequence[Batch], *, draws: int) -> None:
    exact = {name: [world.plan(batch, name, cost=world.cost) for batch in batches] for name in PLANNERS}
    gaps = {name: statistics.fmean(plan.gap for plan in plans) for name, plans in exact.items()}
    sys.stdout.write(f"  without noise: gap {', '.join(f'{name} {gap:.4f}' for name, gap in gaps.items())}\n")
    sys.stdout.write("  noise | joint rise  match | two-stage rise  match | joint vs two-stage, worst draw\n")
    for level in LEVELS:
        rises: dict[str, list[float]] = {name: [] for name in PLANNERS}
        matches: dict[str, list[float]] = {name: [] for name in PLANNERS}
        totals: dict[str, list[float]] = {name: [] for name in PLANNERS}
        for draw in range(draws):
            cost = noisy(world.cost, level / 100, rng=np.random.default_rng([level, draw]))
            for name, plans in exact.items():
                found = [world.plan(batch, name, cost=cost) for batch in batches]
                seconds = [world.true_s(plan, batch) for plan, batch in zip(found, batches, strict=True)]
                rises[name] += [each / plan.predicted_s - 1 for each, plan in zip(seconds, plans, strict=True)]
                matches[name] += [degree_match(one, other) for one, other in zip(found, plans, strict=True)]
                totals[name].append(sum(seconds))
        ratios = [one / other for one, other in zip(totals["joint"], totals["two-stage"], strict=True)]
        joint, stages = (f"{100 * statistics.fmean(rises[name]):+9.2f} %" for name in PLANNERS)
        kept, kept_stages = (f"{100 * statistics.fmean(matches[name]):5.1f}" for name in PLANNERS)
        mean = sum(totals["joint"]) / sum(totals["two-stage"])
        sys.stdout.write(
            f"  {level:3d} % | {joint}  {kept} | {stages}     {kept_stages} | {mean:.4f}, {max(ratios):.4f}\n"
        )


def _refitting(world: World, batches: Sequence[Batch], *, draws: int, error: float) -> None:
    """Mean rise of step k, planned with what k measured steps taught; the batches are taken in turn."""
    for level in REFIT_LEVELS:
        rises: list[list[float]] = [[] for _ in range(REFIT_STEPS + 1)]
        for draw in range(draws):
            rng = np.random.default_rng([level, draw])
            refit = Refit.start(noisy(world.cost, level / 100, rng=rng))
            for step in range(REFIT_STEPS + 1):
                batch = batches[(draw + step) % len(batches)]
                plan = world.plan(batch, "joint", cost=refit.cost)
                best_s = world.plan(batch, "joint", cost=world.cost).predicted_s
                rises[step].append(world.true_s(plan, batch) / best_s - 1)
                refit = refit.after(measured(plan, batch, world=world, error=error, rng=rng))
        shown = "  ".join(f"{100 * statistics.fmean(each):+.2f}" for each in rises)
        sys.stdout.write(
            f"  refit from groups timed +-{100 * error:.0f} %, {level} % noise: rise (%) after 0 to {REFIT_STEPS} "
            f"steps {shown}\n"
        )


def measured(
    plan: BatchPlan, batch: Batch, *, world: World, error: float, rng: np.random.Generator
) -> list[Observation]:
    """True time of each group of the plan, with a little noise."""
    true = reprice(plan, batch, cluster=world.cluster, cost=world.cost)
    nodes = node_of_ranks(world.cluster, ranks_per_node=world.cost.ranks_per_node)
    found = []
    for microbatch in true.microbatches:
        for group, seconds in zip(microbatch.groups, microbatch.group_s, strict=True):
            part = GroupWork(
                num_tokens=sum(batch[each].num_tokens for each in group.sequences),
                num_pairs=sum(batch[each].attention_pairs for each in group.sequences),
                degree=group.degree,
                primitive=group.primitive,
                crosses=len({nodes[rank] for rank in group.ranks}) > 1,
            )
            found.append(Observation(groups=(part,), seconds=seconds * (1 + error * rng.standard_normal())))
    return found


def _world(args: argparse.Namespace, num_ranks: int) -> World:
    model, hardware = model_profile(args.model), hardware_profile(args.hardware)
    recomputed = model.num_layers if args.recompute else 0
    kept = {"recomputed_layers": recomputed, "bytes_per_element": hardware.dtype_bytes, "reduce_every": "step"}
    memory_bytes = hardware.memory_bytes
    room = max_tokens_per_rank(model, num_devices=num_ranks, memory_bytes=memory_bytes, **kept)
    return World(
        cluster=ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=args.max_tokens_per_rank or room),
        cost=CostModel.from_profiles(model, hardware, num_ranks=num_ranks, **kept),
    )


def _batch(args: argparse.Namespace, number: int) -> list[SequenceSpec]:
    rng = np.random.default_rng([args.seed, number])
    lengths = rng.choice(np.loadtxt(args.lengths, dtype=np.int64), args.sequences, replace=False)
    lengths = lengths.clip(2, args.max_seqlen).tolist()
    return [SequenceSpec(id=at, num_tokens=each, num_targets=each - 1) for at, each in enumerate(lengths)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, required=True, help="file with one length a line")
    parser.add_argument("--ranks", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--sequences", type=int, default=512, help="in a global batch")
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--draws", type=int, default=20, help="of the coefficients, at each level of noise")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--hardware", default="ascend-910c")
    parser.add_argument("--recompute", action="store_true", help="recompute every layer: more tokens fit")
    parser.add_argument("--max-seqlen", type=int, default=131_072)
    parser.add_argument("--max-tokens-per-rank", type=int, help="replaces the memory model")
    return parser


if __name__ == "__main__":
    main()
