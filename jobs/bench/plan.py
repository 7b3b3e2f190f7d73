"""Time of planning on one core (CPU time, from lengths to plan, without the bound), and how far plans are
from their lower bound.

python jobs/bench/plan.py --sequences 512 --ranks 64
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from rayfcp.config.models import PlanConfig
from rayfcp.plan import CostModel, hardware_profile, lower_bound, max_tokens_per_rank, model_profile, plan_batch
from rayfcp.plan.moves import FIRST
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
    parser.add_argument("--lengths", type=Path, help="file with one length a line; log-normal if absent")
    return parser


if __name__ == "__main__":
    main()
