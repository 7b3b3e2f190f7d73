"""Time of the pipeline planner on one core (CPU time, from lengths to plan, after one untimed plan), how many
layers are recomputed, how much of the time all stages wait at least (bubble), and how far plans are from their lower
bound.

python jobs/bench/pipeline.py --model gpt-13b --stages 4 --max-seqlen 98304
"""

import argparse
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

from rayfcp.compare.distributions import DISTRIBUTIONS, distribution
from rayfcp.config.models import PipelineOptions, PlanConfig
from rayfcp.plan import CostModel, hardware_profile, model_profile
from rayfcp.plan.pipeline.bound import pipeline_bound
from rayfcp.plan.pipeline.planner import plan_pipelines
from rayfcp.plan.strategies.registry import Proposal
from rayfcp.values import ClusterSpec, SequenceSpec

ANY = 1 << 40
"""Tokens of a rank in one chunk: stages' memory is the bound."""


def main() -> None:
    """Plan `--batches` batches of each source of lengths, print a line for each."""
    args = _parser().parse_args()
    hardware = hardware_profile(args.hardware)
    cost = CostModel.from_profiles(
        model_profile(args.model),
        hardware,
        num_ranks=args.ranks,
        num_stages=args.stages,
        bytes_per_element=hardware.dtype_bytes,
        reduce_every=args.reduce_every,
        gather_every=args.gather_every,
    )
    cluster = ClusterSpec(num_ranks=args.ranks, max_tokens_per_rank=ANY, num_stages=args.stages)
    options = PlanConfig(
        primitives=("ring", "ulysses"),
        pipeline=PipelineOptions(chunking=args.chunking, recompute=args.recompute, order=args.order),
    )
    for source in args.lengths:
        batches = [_batch(args, source, number) for number in range(args.batches + 1)]
        plan_pipelines(batches[0], cluster=cluster, cost=cost, options=options)
        took, found = [], []
        for batch in batches[1:]:
            start = time.process_time()
            plan = plan_pipelines(batch, cluster=cluster, cost=cost, options=options)
            took.append(1e3 * (time.process_time() - start))
            found.append((plan, pipeline_bound(batch, cluster=cluster, cost=cost)))
        sys.stdout.write(f"{args.model}, {args.stages} stages of {args.ranks}, {source}: {_line(took, found)}\n")


def _line(took: list[float], found: list[tuple[Proposal, float]]) -> str:
    plans = [plan for plan, _ in found]
    seconds = [sum(each.predicted_s for each in plan.pipelines) for plan in plans]
    layers = [sum(sum(map(sum, each.recomputed_layers)) for each in plan.pipelines) for plan in plans]
    busy_s = [sum(each.predicted_s for each in plan.microbatches) for plan in plans]
    bubbles = [1 - busy / whole for busy, whole in zip(busy_s, seconds, strict=True)]
    slices = [
        max(Counter(each.sequence for part in plan.microbatches for each in part.slices).values(), default=1)
        for plan in plans
    ]
    above = [each / bound_s for each, (_, bound_s) in zip(seconds, found, strict=True)]
    return (
        f"median {statistics.median(took):.0f} ms, max {max(took):.0f} ms; "
        f"{statistics.mean(layers):.0f} layers recomputed; "
        f"step {statistics.mean(seconds):.3f} s, bubble {100 * statistics.mean(bubbles):.1f} %, "
        f"plan / bound {statistics.mean(above):.3f}; chunks {min(len(plan.microbatches) for plan in plans)}-"
        f"{max(len(plan.microbatches) for plan in plans)}, slices up to {max(slices)}, "
        f"pipelines up to {max(len(plan.pipelines) for plan in plans)}"
    )


def _batch(args: argparse.Namespace, source: str, number: int) -> list[SequenceSpec]:
    """Lengths of a distribution, or drawn from a file without replacement."""
    if source in DISTRIBUTIONS:
        lengths = distribution(source).sample(args.sequences, seed=args.seed + number)
    else:
        rng = np.random.default_rng([args.seed, number])
        lengths = rng.choice(np.loadtxt(Path(source), dtype=np.int64), args.sequences, replace=False)
    lengths = lengths.clip(2, args.max_seqlen)
    return [SequenceSpec(id=at, num_tokens=int(each), num_targets=int(each) - 1) for at, each in enumerate(lengths)]


def _parser() -> argparse.ArgumentParser:
    defaults = PipelineOptions()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt-7b")
    parser.add_argument("--hardware", default="a800")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=8, help="of each stage")
    parser.add_argument("--sequences", type=int, default=512, help="in a global batch")
    parser.add_argument("--max-seqlen", type=int, default=98_304)
    parser.add_argument(
        "--lengths", nargs="+", default=["commoncrawl", "github"], help="distributions, or files of one length a line"
    )
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reduce-every", choices=("microbatch", "step"), default="step")
    parser.add_argument("--gather-every", choices=("microbatch", "step"), default="microbatch")
    parser.add_argument("--chunking", default=defaults.chunking)
    parser.add_argument("--recompute", default=defaults.recompute)
    parser.add_argument("--order", default=defaults.order)
    return parser


if __name__ == "__main__":
    main()
