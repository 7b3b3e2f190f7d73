"""Gain of plans that account for slow ranks: simulated seconds over the lower bound, unaware and aware.

python jobs/bench/speeds.py --ranks 8 --strategies flex-ring flex-block
"""

import argparse
import sys
import time
from dataclasses import replace

import numpy as np

from rayfcp.plan import CostModel, hardware_profile, model_profile, plan_batch
from rayfcp.program import Programs, lower
from rayfcp.simulate import simulate
from rayfcp.values import BatchPlan, ClusterSpec, SequenceSpec
from rayfcp.verify import check_programs

SLOW = ((0.5,), (0.8,), (0.5, 0.5), (0.8, 0.8), (0.5, 0.8))


def main() -> None:
    """A line for each strategy, mix and set of slow ranks."""
    args = _parser().parse_args()
    model, hardware = model_profile(args.model), hardware_profile(args.hardware)
    cost = CostModel.from_profiles(
        model, hardware, num_ranks=args.ranks, bytes_per_element=hardware.dtype_bytes, reduce_every="step"
    )
    usual = ClusterSpec(num_ranks=args.ranks, max_tokens_per_rank=args.max_tokens_per_rank)
    sys.stdout.write("strategy    mix          slow ranks   unaware    aware   (simulated / bound)   planned in ms\n")
    for strategy in args.strategies:
        for name, sequences in _mixes(args.max_tokens_per_rank).items():
            unaware, _ = _planned(sequences, usual, cost=cost, strategy=strategy)
            for slow in SLOW:
                speeds = (1.0,) * (args.ranks - len(slow)) + slow
                cluster = replace(usual, speed_of_rank=speeds)
                aware, took_s = _planned(sequences, cluster, cost=cost, strategy=strategy)
                over = [
                    simulate(
                        _checked(plan, sequences), model=model, hardware=hardware, speed_of_rank=speeds
                    ).iteration_s
                    / aware.lower_bound_s
                    for plan in (unaware, aware)
                ]
                shown = ", ".join(f"{speed:g}" for speed in slow)
                sys.stdout.write(
                    f"{strategy:11} {name:12} {shown:10} {over[0]:9.3f} {over[1]:9.3f} {'':22} {1e3 * took_s:9.0f}\n"
                )
                sys.stdout.flush()


def _planned(
    sequences: list[SequenceSpec], cluster: ClusterSpec, *, cost: CostModel, strategy: str
) -> tuple[BatchPlan, float]:
    """The plan, and CPU seconds for it once its code is warm."""
    plan_batch(sequences[:8], cluster=cluster, cost=cost, strategy=strategy)
    start_s = time.process_time()
    plan = plan_batch(sequences, cluster=cluster, cost=cost, strategy=strategy)
    return plan, time.process_time() - start_s


def _checked(plan: BatchPlan, sequences: list[SequenceSpec]) -> Programs:
    programs = lower(plan, sequences, reduce_every="step")
    check_programs(programs, sequences)
    return programs


def _mixes(room: int) -> dict[str, list[SequenceSpec]]:
    """Long tails, short ones only, and one sequence that takes the memory of several ranks among short ones."""
    rng = np.random.default_rng(0)
    mixes = {
        "long tail": rng.lognormal(7.0, 1.5, 120).clip(2, 2 * room),
        "short": rng.lognormal(6.0, 1.0, 300).clip(2, room / 2),
        "one long": np.concatenate([[5 * room], rng.integers(500, 9000, 60)]),
    }
    return {
        name: [SequenceSpec(id=at, num_tokens=int(each), num_targets=int(each) - 1) for at, each in enumerate(tokens)]
        for name, tokens in mixes.items()
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-1.7b")
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--max-tokens-per-rank", type=int, default=16_384)
    parser.add_argument("--strategies", nargs="+", default=["flex-ring", "flex-block"])
    return parser


if __name__ == "__main__":
    main()
