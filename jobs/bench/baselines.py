"""Settings in which a baseline's plan is ahead of `flex-ring`'s, out of those drawn at random: models, machines,
numbers of ranks, memory, recomputation, sizes of batches and lengths. By the seconds of the cost model, which both plan
with.

    python jobs/bench/baselines.py --settings 900
    python jobs/bench/baselines.py --settings 100 --lengths FILE dist:github --strategies static-cp flexsp
"""

import argparse
import random
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from rayfcp.compare.lengths import draw_batches
from rayfcp.config.models import PlanConfig
from rayfcp.plan import CostModel, hardware_profile, max_tokens_per_rank, model_profile, plan_batch
from rayfcp.values import BatchPlan, ClusterSpec, InfeasiblePlanError, SequenceSpec

MODELS = ("qwen3-1.7b", "qwen3-8b", "llama3.2-3b", "llama3-8b", "gpt-13b")
MACHINES = ("ascend-910c", "a800", "h100", "gpu-x")
RANKS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
BATCHES = (4, 8, 16, 32, 64, 128, 256, 512)
LONGEST = (4096, 8192, 32_768, 65_536, 131_072)
REDUCED = ("microbatch", "step")
LENGTHS = ("github", "commoncrawl", "long-tail", "lognormal", "bimodal")
LEAST_ROOM = 256  # tokens a rank: with less a model hardly fits
SCARCER = 0.3  # of the settings: a rank holds only an eighth to all of what its memory would
SAME = 1e-6  # relative difference of seconds
OPTIONS = PlanConfig(primitives=("ring", "ulysses"))


class Setting(NamedTuple):
    """One batch on one machine."""

    title: str
    sequences: list[SequenceSpec]
    cluster: ClusterSpec
    cost: CostModel

    def plan(self, strategy: str) -> BatchPlan | None:
        """None where the batch does not fit."""
        try:
            return plan_batch(self.sequences, cluster=self.cluster, cost=self.cost, strategy=strategy, options=OPTIONS)
        except InfeasiblePlanError:
            return None


def main(argv: Sequence[str] | None = None) -> None:
    """Print every setting in which a baseline is ahead, then in how many, and by how much at most."""
    args = _parser().parse_args(argv)
    rng = random.Random(args.seed)
    done, ahead, most = 0, 0, 0.0
    while done < args.settings:
        setting = _drawn(rng, args.lengths)
        ours = setting.plan("flex-ring") if setting is not None else None
        if setting is None or ours is None:
            continue
        done += 1
        lead = 0.0
        for name in args.strategies:
            plan = setting.plan(name)
            if plan is not None and plan.predicted_s < ours.predicted_s * (1 - SAME):
                by = ours.predicted_s / plan.predicted_s - 1
                lead = max(lead, by)
                sys.stdout.write(f"{name} by {by:.2%}: {setting.title}\n")
        ahead += lead > 0
        most = max(most, lead)
        if done % 50 == 0:
            sys.stderr.write(f"[{done}/{args.settings}]\n")
    sys.stdout.write(f"a baseline is ahead in {ahead} of {done} settings, by at most {most:.2%}\n")


def _drawn(rng: random.Random, lengths: list[str]) -> Setting | None:
    """None if the model leaves ranks no memory."""
    model, hardware = model_profile(rng.choice(MODELS)), hardware_profile(rng.choice(MACHINES))
    ranks, every = rng.choice(RANKS), rng.choice(REDUCED)
    recomputed = rng.choice((0, model.num_layers))
    batch, longest = rng.choice(BATCHES), rng.choice(LONGEST)
    source, seed = rng.choice(lengths), rng.randrange(100)
    sizes: dict[str, Any] = {
        "recomputed_layers": recomputed,
        "bytes_per_element": hardware.dtype_bytes,
        "reduce_every": every,
    }
    try:
        room = max_tokens_per_rank(model, num_devices=ranks, memory_bytes=hardware.memory_bytes, **sizes)
    except InfeasiblePlanError:
        return None
    if rng.random() < SCARCER:
        room = rng.randint(room // 8, room)
    if room < LEAST_ROOM:
        return None
    (sequences,) = draw_batches(source, num_batches=1, global_batch=batch, max_seqlen=longest, seed=seed)
    cost = CostModel.from_profiles(model, hardware, num_ranks=ranks, **sizes)
    title = (
        f"{model.name}, {ranks} x {hardware.name}, {room} tokens a rank, {recomputed} layers recomputed, gradients "
        f"every {every}, {batch} of {source}, longest {longest}, seed {seed}"
    )
    return Setting(title, list(sequences), ClusterSpec(num_ranks=ranks, max_tokens_per_rank=room), cost)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", type=int, default=900)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--lengths",
        nargs="+",
        default=[f"dist:{name}" for name in LENGTHS],
        help="files with one length a line, or dist:",
    )
    parser.add_argument("--strategies", nargs="+", default=["static-cp", "ulysses", "ring", "dynamic-cp"])
    return parser


if __name__ == "__main__":
    main()
