"""Time of planning on one core (CPU time, from lengths to plan, without the bound), and how far plans are
from their lower bound.

python jobs/bench/plan.py --sequences 512 --ranks 64
python jobs/bench/plan.py --batches 100 --pool 2    # and batches per second of a pool of two planners
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from rayfcp import PlannerPool
from rayfcp.config.models import PlanConfig
from rayfcp.plan import CostModel, hardware_profile, lower_bound, max_tokens_per_rank, model_profile, plan_batch
from rayfcp.plan.moves import FIRST
from rayfcp.program import check_progress, lower
from rayfcp.values import ClusterSpec, HardwareProfile, ModelProfile, SequenceSpec


def main() -> None:
    """Plan `--batches` batches, print milliseconds and gaps."""
    args = _parser().parse_args()
    model, hardware = model_profile(args.model), hardware_profile(args.hardware)
    recomputed = model.num_layers if args.recompute else 0
    cost = CostModel.from_profiles(
        model,
        hardware,
        num_ranks=args.ranks,
        recomputed_layers=recomputed,
        bytes_per_element=hardware.dtype_bytes,
        reduce_every="step",
    )
    room = args.max_tokens_per_rank or _room(model, hardware, num_ranks=args.ranks, recomputed=recomputed)
    cluster = ClusterSpec(num_ranks=args.ranks, max_tokens_per_rank=room)
    options = PlanConfig(packing=args.packing, degrees=args.degrees, search_moves=args.search_moves)
    batches = [_batch(args, number) for number in range(args.batches + 1)]
    plan_batch(batches[0], cluster=cluster, cost=cost, strategy=args.strategy, options=options)
    took, gaps, counts = [], [], []
    for batch in batches[1:]:
        start = time.process_time()
        plan = plan_batch(batch, cluster=cluster, cost=cost, strategy=args.strategy, options=options)
        stop = time.process_time()
        lower_bound(batch, cluster=cluster, cost=cost)
        took.append(1e3 * (2 * stop - start - time.process_time()))
        gaps.append(plan.gap)
        counts.append(len(plan.microbatches))
    sys.stdout.write(
        f"{args.strategy}: {args.sequences} sequences, {args.ranks} ranks, {room} tokens per rank: "
        f"median {statistics.median(took):.1f} ms, max {max(took):.1f} ms; gap mean {statistics.mean(gaps):.4f}, "
        f"max {max(gaps):.4f}; microbatches {min(counts)}-{max(counts)}\n"
    )
    if args.pool:
        facts = {"cluster": cluster, "cost": cost, "strategy": args.strategy, "options": options}
        _print_throughput(batches, num_planners=args.pool, facts=facts)


def _print_throughput(batches: list[list[SequenceSpec]], *, num_planners: int, facts: dict[str, Any]) -> None:
    """Print batches per second, from lengths to checked programs, and this process's CPU time: if it plans them, and if
    it takes them from a pool. The first batches warm up and are not timed."""
    warm, timed = batches[:1] * num_planners, batches[1:]
    with PlannerPool(**facts, num_planners=num_planners, lookahead=2 * num_planners, programs=True) as pool:
        for _ in pool.map(warm):
            pass
        start = time.perf_counter(), time.process_time()
        plans = [planned.plan for planned in pool.map(timed)]
        of_pool = _rates(start, count=len(timed))
    start = time.perf_counter(), time.process_time()
    for batch, found in zip(timed, plans, strict=True):
        plan = plan_batch(batch, **facts)
        check_progress(lower(plan, batch))
        assert plan == found, "a pool's plan has the same bytes"
    sys.stdout.write(f"planned here: {_rates(start, count=len(timed))}\nby {num_planners} planners: {of_pool}\n")


def _rates(start: tuple[float, float], *, count: int) -> str:
    wall_s, cpu_s = time.perf_counter() - start[0], time.process_time() - start[1]
    return f"{count / wall_s:.1f} batches per second, {1e3 * cpu_s / count:.1f} ms of this process's CPU time each"


def _room(model: ModelProfile, hardware: HardwareProfile, *, num_ranks: int, recomputed: int) -> int:
    return max_tokens_per_rank(
        model,
        num_devices=num_ranks,
        memory_bytes=hardware.memory_bytes,
        recomputed_layers=recomputed,
        bytes_per_element=hardware.dtype_bytes,
        reduce_every="step",
    )


def _batch(args: argparse.Namespace, number: int) -> list[SequenceSpec]:
    """Lengths drawn from a file without replacement, or log-normal with a long tail."""
    rng = np.random.default_rng([args.seed, number])
    if args.lengths is not None:
        lengths = rng.choice(np.loadtxt(args.lengths, dtype=np.int64), args.sequences, replace=False)
    else:
        lengths = rng.lognormal(7.0, 1.5, args.sequences).astype(np.int64)
    lengths = lengths.clip(2, args.max_seqlen)
    return [SequenceSpec(id=at, num_tokens=int(each), num_targets=int(each) - 1) for at, each in enumerate(lengths)]


def _parser() -> argparse.ArgumentParser:
    defaults = PlanConfig()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=512, help="in a global batch")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--strategy", default="flex-ring")
    parser.add_argument("--packing", default=defaults.packing, help="of flex-ring: joint or bfd")
    parser.add_argument("--degrees", default=defaults.degrees, help="of flex-ring: exact or dp")
    parser.add_argument("--search-moves", type=int, default=FIRST)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--hardware", default="ascend-910c")
    parser.add_argument("--recompute", action="store_true", help="recompute every layer: more tokens fit")
    parser.add_argument("--max-seqlen", type=int, default=131_072)
    parser.add_argument("--max-tokens-per-rank", type=int, help="replaces the memory model")
    parser.add_argument("--pool", type=int, default=0, help="planners of a pool to be timed too (default: none)")
    parser.add_argument("--lengths", type=Path, help="file with one length a line; log-normal if absent")
    return parser


if __name__ == "__main__":
    main()
