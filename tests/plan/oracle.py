"""Brute force of tiny plans: every cut, grouping, set of ranks and primitive, under all that a planner must keep.

`python -m tests.plan.oracle --first N --count K` searches for counterexamples: a bound above the optimum, a plan better
than the optimum, no plan where one exists, plans that are much slower.
"""

import argparse
import dataclasses
import itertools
import math
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rayfcp.config.constraints import UNCONSTRAINED, HostConstraints
from rayfcp.config.models import PlanConfig
from rayfcp.cost.model import idle_passes_s, speeds_of
from rayfcp.cost.placement import node_of_ranks
from rayfcp.plan import CostModel, hardware_profile, lower_bound, model_profile, plan_batch
from rayfcp.values import ClusterSpec, InfeasiblePlanError, Primitive, SequenceSpec
from tests.plan.helpers import partitions

SAME = 1e-9
MODELS = ("qwen3-1.7b", "llama3-8b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v3", "qwen3-next-80b-a3b")
RECURRENT_MODELS = ("nemotron-h-8b", "kimi-linear-48b-a3b")
DEGREES = ("any", "powers_of_two", (1,), (2,), (1, 2), (1, 2, 4), (1, 3), (2, 4), (3,), (4,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A tiny batch on a tiny cluster."""

    sequences: list[SequenceSpec]
    cluster: ClusterSpec
    cost: CostModel
    primitives: tuple[Primitive, ...] = (Primitive.RING,)
    constraints: HostConstraints = UNCONSTRAINED

    def best_s(self) -> float:
        """Seconds of the fastest plan; infinite if there is none."""
        return _BruteForce(self).best_s()

    def bound_s(self) -> float:
        return lower_bound(
            self.sequences,
            cluster=self.cluster,
            cost=self.cost,
            primitives=self.primitives,
            constraints=self.constraints,
        )

    def planned_s(self) -> float:
        """Predicted seconds of the plan; infinite if none is found."""
        options = PlanConfig(primitives=tuple(each.value for each in self.primitives), constraints=self.constraints)
        try:
            return plan_batch(self.sequences, cluster=self.cluster, cost=self.cost, options=options).predicted_s
        except InfeasiblePlanError:
            return math.inf


class _BruteForce:
    def __init__(self, case: Case) -> None:
        self._case = case
        self._nodes = node_of_ranks(case.cluster, ranks_per_node=case.cost.ranks_per_node)
        self._speeds = speeds_of(case.cluster)
        self._idle_s = idle_passes_s(case.cost, cluster=case.cluster).tolist()
        self._costs = case.cost.in_step(), case.cost.in_step(last=True)
        self._places = list(self._all_places())
        self._priced: dict[tuple[tuple[int, ...], tuple[int, ...], bool], list[tuple[float, ...]]] = {}
        self._spans: dict[tuple[tuple[int, ...], bool], float] = {}
        self._last = False

    def best_s(self) -> float:
        best, constraints = math.inf, self._case.constraints
        for cut in partitions(list(range(len(self._case.sequences)))):
            if constraints.least_microbatches(len(cut)) == len(cut) and self._keeps_units(cut):
                best = min([best, *(self._batch_s(cut, last=at) for at in range(len(cut)))])
        return best

    def _batch_s(self, cut: Sequence[Sequence[int]], *, last: int) -> float:
        """Least seconds of the microbatches of a cut, of which number `last` comes last."""
        seconds = 0.0
        for at, part in enumerate(cut):
            self._last = at == last
            span_s = self._span_s(tuple(sorted(part)))
            if span_s == math.inf:
                return math.inf
            seconds += self._case.cost.microbatch_s(span_s, last=self._last)
        return seconds

    def _all_places(self) -> Iterator[tuple[int, ...]]:
        """Sets of ranks that a group may have."""
        num_ranks, placement = self._case.cluster.num_ranks, self._case.constraints.placement
        for degree in self._case.constraints.permitted(num_ranks):
            for ranks in itertools.combinations(range(num_ranks), degree):
                in_a_row = ranks[-1] - ranks[0] == degree - 1
                if placement == "nodes" or (in_a_row and (placement == "contiguous" or ranks[0] % degree == 0)):
                    yield ranks

    def _keeps_units(self, parts: Sequence[Sequence[int]]) -> bool:
        """Whether no unit is in two of the parts; a unit may be missing."""
        units = [{self._case.sequences[at].unit for at in part} - {None} for part in parts]
        return not any(first & second for first, second in itertools.combinations(units, 2))

    def _span_s(self, members: tuple[int, ...]) -> float:
        """Least makespan of a microbatch of these sequences."""
        key = members, self._last
        if key not in self._spans:
            groupings = (each for each in partitions(list(members)) if self._keeps_units(each))
            self._spans[key] = min(
                (self._placed_s([tuple(sorted(part)) for part in each], (), []) for each in groupings), default=math.inf
            )
        return self._spans[key]

    def _placed_s(
        self, groups: list[tuple[int, ...]], taken: tuple[int, ...], passes: list[tuple[float, ...]]
    ) -> float:
        """Least makespan over all ways to place these groups beside those that have the ranks `taken`."""
        case = self._case
        if not groups:
            if case.constraints.all_ranks and len(taken) < case.cluster.num_ranks:
                return math.inf
            return float(case.cost.makespan_s(list(zip(*passes, self._idle_s, strict=True))))
        free = (ranks for ranks in self._places if not set(ranks) & set(taken))
        return min(
            (
                self._placed_s(groups[1:], taken + ranks, [*passes, each])
                for ranks in free
                for each in self._passes(groups[0], ranks)
            ),
            default=math.inf,
        )

    def _passes(self, members: tuple[int, ...], ranks: tuple[int, ...]) -> list[tuple[float, ...]]:
        """Seconds of the passes with each primitive that holds the group."""
        key = members, ranks, self._last
        if key not in self._priced:
            self._priced[key] = list(self._all_passes(members, ranks))
        return self._priced[key]

    def _all_passes(self, members: tuple[int, ...], ranks: tuple[int, ...]) -> Iterator[tuple[float, ...]]:
        case, sequences = self._case, [self._case.sequences[at] for at in members]
        tokens = sum(each.num_tokens for each in sequences)
        for primitive in case.primitives if len(ranks) > 1 else (Primitive.RING,):
            if tokens > case.cost.room(case.cluster.max_tokens_per_rank, degree=len(ranks), primitive=primitive):
                continue
            passes_s = self._costs[self._last].passes_s(
                sum(each.attention_pairs for each in sequences),
                tokens,
                degree=len(ranks),
                primitive=primitive,
                crosses=len({self._nodes[rank] for rank in ranks}) > 1,
                speed=float(min(self._speeds[rank] for rank in ranks)),
                num_sequences=len(members),
            )
            if math.isfinite(float(sum(passes_s))):
                yield tuple(map(float, passes_s))


def drawn(seed: int) -> Case:
    """A case of 1 to 4 sequences on 1 to 4 ranks: models with windows, latents, experts and recurrent layers, machines,
    unequal speeds, interleaved nodes, units, constraints and primitives."""
    rng = random.Random(seed)
    num_ranks, cost = rng.randint(1, 4), CostModel
    model = model_profile(rng.choice((*MODELS, *RECURRENT_MODELS)))
    hardware = hardware_profile(rng.choice(("h100", "a800", "ascend-910c", "cpu")))
    hardware = dataclasses.replace(
        hardware,
        devices_per_node=rng.choice((1, 2, 3, 4, 8)),
        overlap=rng.choice((0.0, 0.5, 1.0)),
        latency_s=rng.choice((1e-6, 1e-4, 1e-2)),
        microbatch_overhead_s=rng.choice((0.0, 5e-3)),
        inter_node_bandwidth=hardware.inter_node_bandwidth * rng.choice((0.01, 1.0)),
        attention_half_tokens=rng.choice((0, 820)),
    )
    model = dataclasses.replace(model, keeps_attention=rng.random() < 0.3)
    priced = cost.from_profiles(
        model,
        hardware,
        num_ranks=num_ranks,
        recomputed_layers=rng.choice((0, model.num_layers // 2, model.num_layers)),
        bytes_per_element=hardware.dtype_bytes,
        reduce_every=rng.choice(("microbatch", "step")),
        gather_every=rng.choice(("microbatch", "step")),
    )
    scale = rng.choice((1, 300, 3_000, 50_000))
    lengths = [max(1, int(rng.lognormvariate(0.0, 1.2) * scale)) for _ in range(rng.randint(1, 4))]
    if rng.random() < 0.2:
        lengths = lengths[:1] * len(lengths)
    room = max(int(max(lengths) * rng.choice((0.26, 0.34, 0.51, 1.0, 1.5, 4.0))), -(-max(lengths) // num_ranks))
    units = [rng.choice((None, 0, 1)) if rng.random() < 0.3 else None for _ in lengths]
    sequences = [
        SequenceSpec(id=at, num_tokens=n, num_targets=n - 1, layer_kinds=model.layer_kinds, unit=unit)
        for at, (n, unit) in enumerate(zip(lengths, units, strict=True))
    ]
    cluster = ClusterSpec(
        num_ranks=num_ranks,
        max_tokens_per_rank=room,
        speed_of_rank=tuple(rng.choice((1.0, 0.5, 2.0)) for _ in range(num_ranks)) if rng.random() < 0.3 else (),
        node_of_rank=tuple(rng.choice((0, 1)) for _ in range(num_ranks)) if rng.random() < 0.3 else (),
    )
    primitives = rng.choice(((Primitive.RING,), (Primitive.RING, Primitive.ULYSSES), (Primitive.ULYSSES,)))
    return Case(sequences=sequences, cluster=cluster, cost=priced, primitives=primitives, constraints=_constraints(rng))


def _constraints(rng: random.Random) -> HostConstraints:
    if rng.random() < 0.5:
        return UNCONSTRAINED
    given = {
        "degrees": rng.choice(DEGREES),
        "placement": rng.choice(("nodes", "contiguous", "aligned")),
        "all_ranks": rng.random() < 0.4,
        "microbatch_multiple": rng.choice((1, 1, 2, 3)),
        "num_microbatches": rng.choice((None, None, None, 1, 2, 3)),
    }
    try:
        return HostConstraints.model_validate(given)
    except ValueError:
        return UNCONSTRAINED


@dataclass(slots=True, kw_only=True)
class Tally:
    """Cases by what they show; `ratios` of plans to optima by seed."""

    ratios: dict[int, float] = field(default_factory=dict)
    bounds: list[int] = field(default_factory=list)
    better: list[int] = field(default_factory=list)
    missed: list[int] = field(default_factory=list)

    def add(self, seed: int) -> None:
        """Plan a case and compare with the optimum."""
        case = drawn(seed)
        best_s, planned_s = case.best_s(), case.planned_s()
        if best_s == math.inf:
            if planned_s < math.inf:
                self.better.append(seed)
            return
        if case.bound_s() > best_s * (1 + SAME):
            self.bounds.append(seed)
        if planned_s == math.inf:
            self.missed.append(seed)
        else:
            self.ratios[seed] = planned_s / best_s
            if planned_s < best_s * (1 - SAME):
                self.better.append(seed)

    @property
    def faults(self) -> int:
        return len(self.bounds) + len(self.better) + len(self.missed)

    def __str__(self) -> str:
        ratios = list(self.ratios.values())
        worst = sorted(self.ratios, key=lambda seed: -self.ratios[seed])[:5]
        behind = sum(ratio > 1.02 for ratio in ratios) / len(ratios)
        return (
            f"{len(ratios)} cases: bounds above the optimum {self.bounds}, better than the optimum {self.better}, "
            f"missed though a plan exists {self.missed}; plan / optimum mean {statistics.fmean(ratios):.4f}, "
            f"{100 * behind:.2f} % above 1.02, worst {', '.join(f'{self.ratios[seed]:.3f} ({seed})' for seed in worst)}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.plan.oracle", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="first seed (default: 0)")
    parser.add_argument("--count", type=int, default=2000, help="cases (default: 2000)")
    args = parser.parse_args()
    tally = Tally()
    for seed in range(args.first, args.first + args.count):
        tally.add(seed)
    sys.stdout.write(f"{tally}\n")
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
