"""The extreme batch of Flexible Context Parallelism (section 6.2): one sequence of 128K tokens beside many of 2-8K.

How much faster than the best static plan can any plan be, and how much of that does `flex-ring` reach?

    python jobs/reproduce/extreme.py
    python jobs/reproduce/extreme.py --primitives ring --max-tokens-per-rank 4200,8400,16800 --json extreme.json

For each number of ranks and of short sequences (and of tokens that a rank can hold: the less memory, the larger the
degree that one long sequence forces on all others of a static plan), means over seeds of:

    bound     seconds that no plan can beat
    static    the best static plan: one degree for the whole batch, searched over all degrees and all microbatch
              counts, rings and Ulysses, packs balanced by time as well as packed by length
    ceiling   static / bound: the largest speedup that there is to be had
    flex      seconds of the `flex-ring` plan
    speedup   static / flex
    share     speedup / ceiling, the target is at least 0.96
    standard  the best static plan with packs by length alone, as Megatron-LM and DeepSpeed have them, with its
              own ceiling and speedup; the paper's baselines use standard packing and its speedup is 2.24

Seconds are those of the cost model.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import numpy as np

from rayfcp.config.models import PlanConfig
from rayfcp.plan import CostModel, hardware_profile, max_tokens_per_rank, model_profile, plan_batch
from rayfcp.plan.moves import FIRST
from rayfcp.values import BatchPlan, ClusterSpec, InfeasiblePlanError, SequenceSpec

PAPER_SPEEDUP = 2.24
TARGET_SHARE = 0.96


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Means over seeds for one number of ranks and of short sequences; `best_static` is that of the first seed."""

    ranks: int
    short: int
    tokens_per_rank: int
    bound_s: float
    static_s: float
    flex_s: float
    standard_s: float
    best_static: str

    @property
    def ceiling(self) -> float:
        return self.static_s / self.bound_s

    @property
    def speedup(self) -> float:
        return self.static_s / self.flex_s

    @property
    def share(self) -> float:
        return self.bound_s / self.flex_s

    @property
    def standard_ceiling(self) -> float:
        return self.standard_s / self.bound_s

    @property
    def standard_speedup(self) -> float:
        return self.standard_s / self.flex_s

    def as_json(self) -> dict[str, object]:
        """Fields and ratios."""
        ratios = ("ceiling", "speedup", "share", "standard_ceiling", "standard_speedup")
        return asdict(self) | {name: getattr(self, name) for name in ratios}


COLUMNS = (
    ("tok/rank", "tokens_per_rank", "d"),
    ("ranks", "ranks", "d"),
    ("short", "short", "d"),
    ("bound s", "bound_s", ".3f"),
    ("static s", "static_s", ".3f"),
    ("flex s", "flex_s", ".3f"),
    ("ceiling", "ceiling", ".3f"),
    ("speedup", "speedup", ".3f"),
    ("share", "share", ".4f"),
    ("standard s", "standard_s", ".3f"),
    ("ceiling", "standard_ceiling", ".3f"),
    ("speedup", "standard_speedup", ".3f"),
    ("best static", "best_static", "s"),
)


def main() -> None:
    """Scan, print the table as it grows, then where the ceiling passes the paper's speedup."""
    args = _parser().parse_args()
    rooms = args.max_tokens_per_rank or (None,)
    pairs = list(product(rooms, args.ranks, args.short))
    sys.stdout.write("  ".join(f"{title:>10}" for title, _, _ in COLUMNS) + "\n")
    rows: list[Row] = []
    for number, (room, ranks, short) in enumerate(pairs, start=1):
        sys.stderr.write(f"[{number}/{len(pairs)}] {ranks} ranks, {short} short sequences\n")
        try:
            row = _row(args, room=room, ranks=ranks, short=short)
        except InfeasiblePlanError as error:
            sys.stderr.write(f"  passed over: {error}\n")
            continue
        rows.append(row)
        sys.stdout.write("  ".join(f"{format(getattr(row, name), spec):>10}" for _, name, spec in COLUMNS) + "\n")
        sys.stdout.flush()
    sys.stdout.write(_summary(rows) if rows else "nothing fits: give more tokens per rank, or ranks\n")
    if args.json is not None:
        inputs = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
        text = json.dumps({"inputs": inputs, "rows": [row.as_json() for row in rows]}, indent=2)
        args.json.write_text(text + "\n", encoding="utf-8")


def _summary(rows: Sequence[Row]) -> str:
    shares = [row.share for row in rows]
    return (
        f"share of the ceiling: least {min(shares):.4f}, mean {statistics.mean(shares):.4f}; below {TARGET_SHARE}: "
        f"{_places([row for row in rows if row.share < TARGET_SHARE], of=rows)}\n"
        f"ceiling of the best static plan: highest {max(row.ceiling for row in rows):.2f}; above {PAPER_SPEEDUP}: "
        f"{_places([row for row in rows if row.ceiling > PAPER_SPEEDUP], of=rows)}\n"
        f"ceiling of standard packing: highest {max(row.standard_ceiling for row in rows):.2f}; above "
        f"{PAPER_SPEEDUP}: {_places([row for row in rows if row.standard_ceiling > PAPER_SPEEDUP], of=rows)}\n"
    )


def _places(rows: Sequence[Row], *, of: Sequence[Row]) -> str:
    """Number of cases, and numbers of short sequences for each number of ranks and of tokens per rank."""
    machines: dict[tuple[int, int], list[str]] = {}
    for row in rows:
        machines.setdefault((row.ranks, row.tokens_per_rank), []).append(str(row.short))
    places = [f"\n  {ranks} ranks of {room} tokens: {', '.join(short)}" for (ranks, room), short in machines.items()]
    return f"{len(rows)} of {len(of)}{''.join(places)}"


def _row(args: argparse.Namespace, *, room: int | None, ranks: int, short: int) -> Row:
    cluster, cost = _machine(args, num_ranks=ranks, room=room)
    bound_s, static_s, flex_s, standard_s, kinds = [], [], [], [], []
    for seed in range(args.seeds):
        sequences = _batch(args, short=short, seed=seed)
        options = PlanConfig(primitives=args.primitives, search_moves=args.search_moves)
        flex = plan_batch(sequences, cluster=cluster, cost=cost, options=options)
        static = _best_static(sequences, cluster=cluster, cost=cost, args=args, packing="joint")
        standard = _best_static(sequences, cluster=cluster, cost=cost, args=args, packing="bfd")
        bound_s.append(flex.lower_bound_s)
        flex_s.append(flex.predicted_s)
        static_s.append(static.predicted_s)
        standard_s.append(standard.predicted_s)
        kinds.append(f"{static.strategy} d={max(static.degrees)} m={len(static.microbatches)}")
    return Row(
        ranks=ranks,
        short=short,
        tokens_per_rank=cluster.max_tokens_per_rank,
        bound_s=statistics.mean(bound_s),
        static_s=statistics.mean(static_s),
        flex_s=statistics.mean(flex_s),
        standard_s=statistics.mean(standard_s),
        best_static=kinds[0],
    )


def _best_static(
    sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, args: argparse.Namespace, packing: str
) -> BatchPlan:
    """The better of static rings and static Ulysses; every microbatch count is open to them."""
    options = PlanConfig.model_validate(
        {"primitives": args.primitives, "packing": packing, "max_microbatches": len(sequences)}
    )
    plans = []
    for strategy, primitive in (("static-cp", "ring"), ("ulysses", "ulysses")):
        if primitive not in args.primitives:
            continue
        try:
            plans.append(plan_batch(sequences, cluster=cluster, cost=cost, strategy=strategy, options=options))
        except InfeasiblePlanError as error:
            sys.stderr.write(f"  {strategy}: {error}\n")
    return min(plans, key=lambda plan: plan.predicted_s)


def _machine(args: argparse.Namespace, *, num_ranks: int, room: int | None) -> tuple[ClusterSpec, CostModel]:
    model, hardware = model_profile(args.model), hardware_profile(args.hardware)
    layers = model.num_layers if args.recompute else 0
    cost = CostModel.from_profiles(
        model,
        hardware,
        num_ranks=num_ranks,
        recomputed_layers=layers,
        bytes_per_element=hardware.dtype_bytes,
        reduce_every=args.reduce_every,
    )
    room = room or max_tokens_per_rank(
        model,
        num_devices=num_ranks,
        memory_bytes=hardware.memory_bytes,
        recomputed_layers=layers,
        bytes_per_element=hardware.dtype_bytes,
        reduce_every=args.reduce_every,
    )
    return ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=room), cost


def _batch(args: argparse.Namespace, *, short: int, seed: int) -> list[SequenceSpec]:
    rng = np.random.default_rng([seed, short])
    lengths = [args.long, *rng.integers(args.shortest, args.longest, short, endpoint=True).tolist()]
    return [SequenceSpec(id=at, num_tokens=each, num_targets=each - 1) for at, each in enumerate(lengths)]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(","))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=_numbers, default=(16, 32, 48, 64, 96, 128), help="numbers of ranks, by commas")
    parser.add_argument("--short", type=_numbers, default=(31, 63, 127, 255, 511), help="numbers of short sequences")
    parser.add_argument("--seeds", type=int, default=3, help="batches for each pair, seeds 0 on")
    parser.add_argument("--long", type=int, default=131_072, help="tokens of the one long sequence")
    parser.add_argument("--shortest", type=int, default=2048, help="short ones are uniform from this")
    parser.add_argument("--longest", type=int, default=8192, help="to this")
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--hardware", default="ascend-910c")
    parser.add_argument("--primitives", type=lambda text: tuple(text.split(",")), default=("ring", "ulysses"))
    parser.add_argument("--search-moves", type=int, default=FIRST, help="budget of flex-ring")
    parser.add_argument(
        "--recompute", action=argparse.BooleanOptionalAction, default=True, help="every layer: more tokens fit"
    )
    parser.add_argument("--reduce-every", choices=("step", "microbatch"), default="step", help="gradients")
    parser.add_argument("--max-tokens-per-rank", type=_numbers, help="replaces the memory model; several by commas")
    parser.add_argument("--json", type=Path, help="write inputs and rows there")
    return parser


if __name__ == "__main__":
    main()
