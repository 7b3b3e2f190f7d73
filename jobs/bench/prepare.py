"""CPU milliseconds from the lengths of a batch to programs ready to send, part by part, on one core: plan, layouts,
lower, check, loads of ranks, serialize; KiB of the programs of all ranks; and what one rank spends on reading its own.

Batches are drawn from four families of lengths, without files: `long-tailed` (log-normal, median 1,100 tokens), `short`
(log-normal, median 400), `mixed` (three quarters short, a quarter log-normal of median 16K) and `uniform` (2 to 32K),
all up to `--max-seqlen`. Printed are medians over batches, and the exponent by which the sum grows with
sequences x ranks.

python jobs/bench/prepare.py --sizes 512x64 2048x256 8192x1024 --batches 20
"""

import argparse
import gc
import pickle
import statistics
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from rayfcp.config.models import PlanConfig
from rayfcp.plan import CostModel, hardware_profile, max_tokens_per_rank, model_profile, plan_batch
from rayfcp.plan.imbalance import rank_loads
from rayfcp.plan.layout import placements_of
from rayfcp.program import check_progress, lower
from rayfcp.values import ClusterSpec, SequenceSpec

FAMILIES: dict[str, Callable[[np.random.Generator, int], npt.NDArray[np.float64]]] = {
    "long-tailed": lambda rng, count: rng.lognormal(7.0, 1.5, count),
    "short": lambda rng, count: rng.lognormal(6.0, 1.0, count),
    "mixed": lambda rng, count: rng.lognormal(np.where(rng.random(count) < 0.75, 6.0, 9.7), 0.8),
    "uniform": lambda rng, count: rng.uniform(2, 32_768, count),
}
PARTS = ("plan", "layouts", "lower", "check", "loads", "serialize")

T = TypeVar("T")


class Clock:
    """CPU milliseconds of what is called, by name."""

    def __init__(self) -> None:
        self.spent_ms: dict[str, float] = {}

    def of(self, name: str, call: Callable[[], T]) -> T:
        start_s = time.process_time()
        found = call()
        self.spent_ms[name] = 1e3 * (time.process_time() - start_s)
        return found


class Setting:
    """The cluster, costs and options of one size."""

    def __init__(self, args: argparse.Namespace, num_ranks: int) -> None:
        model, hardware = model_profile(args.model), hardware_profile(args.hardware)
        sizes = {"bytes_per_element": hardware.dtype_bytes, "reduce_every": "step", "recomputed_layers": 0}
        self.cost = CostModel.from_profiles(model, hardware, num_ranks=num_ranks, **sizes)
        room = max_tokens_per_rank(model, num_devices=num_ranks, memory_bytes=hardware.memory_bytes, **sizes)
        self.cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=room)
        self.options = PlanConfig(search_moves=args.search_moves)
        self.strategy = args.strategy

    def prepared(self, sequences: list[SequenceSpec]) -> dict[str, float]:
        """Milliseconds by part, of one rank's reading, and kilobytes of all programs."""
        clock, cost = Clock(), self.cost
        given = {"cluster": self.cluster, "cost": cost, "strategy": self.strategy, "options": self.options}
        gc.collect()
        plan = clock.of("plan", lambda: plan_batch(sequences, **given))
        placements = clock.of("layouts", lambda: placements_of(plan, sequences))
        programs = clock.of("lower", lambda: lower(plan, sequences, placements=placements))
        clock.of("check", lambda: check_progress(programs))
        clock.of("loads", lambda: rank_loads(plan, sequences, cost=cost, placements=placements))
        buffers: list[pickle.PickleBuffer] = []
        sent = clock.of("serialize", lambda: pickle.dumps(programs, protocol=5, buffer_callback=buffers.append))
        clock.of("read", lambda: pickle.loads(sent, buffers=buffers)[0])
        kib = (len(sent) + sum(each.raw().nbytes for each in buffers)) / 1024
        return {**clock.spent_ms, "all": sum(clock.spent_ms[part] for part in PARTS), "KiB": kib}


def main() -> None:
    """Print medians by size and family."""
    args = _parser().parse_args()
    sizes = [tuple(map(int, size.split("x"))) for size in args.sizes]
    sys.stdout.write(
        "sequences x ranks  lengths      " + "".join(f"{part:>10}" for part in (*PARTS, "all", "read", "KiB")) + "\n"
    )
    totals: dict[int, list[float]] = {}
    for num_sequences, num_ranks in sizes:
        setting = Setting(args, num_ranks)
        for name in args.families:
            rows = [
                setting.prepared(_batch(name, num_sequences, seed=(args.seed, number), longest=args.max_seqlen))
                for number in range(args.batches + 1)
            ][1:]  # the first one compiles
            medians = {part: statistics.median(row[part] for row in rows) for part in rows[0]}
            totals.setdefault(num_sequences * num_ranks, []).append(medians["all"])
            shown = "".join(f"{medians[part]:>10.1f}" for part in (*PARTS, "all", "read", "KiB"))
            sys.stdout.write(f"{num_sequences:>9} x {num_ranks:<6} {name:<12}{shown}\n")
            sys.stdout.flush()
    if len(totals) > 1:
        means = [statistics.mean(each) for each in totals.values()]
        exponent = np.polyfit(np.log(list(totals)), np.log(means), 1)[0]
        sys.stdout.write(f"all grows with (sequences x ranks) ^ {exponent:.2f}\n")


def _batch(name: str, count: int, *, seed: tuple[int, int], longest: int) -> list[SequenceSpec]:
    lengths = FAMILIES[name](np.random.default_rng(seed), count).astype(np.int64).clip(2, longest)
    return [SequenceSpec(id=at, num_tokens=each, num_targets=each - 1) for at, each in enumerate(lengths.tolist())]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["512x64", "2048x256"], help="sequences x ranks")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--batches", type=int, default=20, help="measured ones of each family")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategy", default="flex-ring")
    parser.add_argument("--search-moves", type=int, default=300_000)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--max-seqlen", type=int, default=131_072)
    return parser


if __name__ == "__main__":
    main()
