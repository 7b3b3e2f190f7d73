"""The price of the constraints of trainers that execute our plans: how much longer the predicted step takes.

    python -m jobs.bench.constraints --batches 4

For every number of ranks and every length family, the same batches are planned by flex-ring without constraints, with
each constraint alone, and with those of Megatron-LM's dynamic context parallelism; groups are rings, as there. Printed
are ratios of predicted step times, the mean over batches and in parentheses the worst batch: by number of ranks over
all families, then by family over all numbers of ranks. `gap`: step time over the lower
bound of its own family of plans, the mean.
"""

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from rayfcp.compare.lengths import draw_batches
from rayfcp.config.constraints import PRESETS, UNCONSTRAINED, HostConstraints
from rayfcp.config.models import PlanConfig
from rayfcp.plan import CostModel, hardware_profile, lower_bound, model_profile
from rayfcp.plan.strategies.registry import get
from rayfcp.values import ClusterSpec, SequenceSpec

FAMILIES = ("dist:wikipedia", "dist:commoncrawl", "dist:github", "dist:bimodal")
RANKS = (8, 10, 14, 16, 20, 32, 48, 64, 128, 256)
PAIRS = "pairs stay together"
CONSTRAINTS = {
    "powers of two": HostConstraints(degrees="powers_of_two"),
    "contiguous": HostConstraints(placement="contiguous"),
    "aligned powers of two": HostConstraints(degrees="powers_of_two", placement="aligned"),
    "all ranks": HostConstraints(all_ranks=True),
    "microbatches x 2": HostConstraints(microbatch_multiple=2),
    "microbatches x 4": HostConstraints(microbatch_multiple=4),
    PAIRS: UNCONSTRAINED,
    "megatron": PRESETS["megatron"],
}
FILL = 0.5
"""Of the memory of all ranks: longer sequences are cut, so that two fit."""

Sequences = Sequence[SequenceSpec]


def cases(
    family: str, *, ranks: int, batches: int, seed: int, args: argparse.Namespace
) -> Iterator[tuple[Sequences, ClusterSpec, CostModel]]:
    """Batches of so many sequences per rank on a cluster of that size."""
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


def main() -> None:
    """Print both tables as Markdown."""
    args = _parser().parse_args()
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    gaps: dict[tuple[str, str], list[float]] = defaultdict(list)
    for ranks in args.ranks:
        for family in args.lengths:
            for batch, cluster, cost in cases(family, ranks=ranks, batches=args.batches, seed=args.seed, args=args):
                _measure(batch, cluster, cost=cost, names=(f"{ranks} ranks", family), ratios=ratios, gaps=gaps)
        sys.stderr.write(f"{ranks} ranks done\n")
    for rows in ([f"{ranks} ranks" for ranks in args.ranks], args.lengths):
        _print(rows, ratios=ratios, gaps=gaps)


def _measure(
    batch: Sequences,
    cluster: ClusterSpec,
    *,
    cost: CostModel,
    names: Sequence[str],
    ratios: dict[tuple[str, str], list[float]],
    gaps: dict[tuple[str, str], list[float]],
) -> None:
    """Add the ratios of one batch to the rows of these names."""
    free_s, free_gap = planned(batch, cluster, cost=cost, constraints=UNCONSTRAINED)
    for name in names:
        gaps[name, "free"].append(free_gap)
    for label, constraints in CONSTRAINTS.items():
        kept = in_pairs(batch) if label == PAIRS else batch
        seconds, gap = planned(kept, cluster, cost=cost, constraints=constraints)
        for name in names:
            ratios[name, label].append(seconds / free_s)
            gaps[name, label].append(gap)


def planned(
    batch: Sequences, cluster: ClusterSpec, *, cost: CostModel, constraints: HostConstraints
) -> tuple[float, float]:
    """Predicted seconds of flex-ring's plan, and the same over the lower bound under the constraints."""
    options = PlanConfig(primitives=("ring",), constraints=constraints)
    seconds = get("flex-ring").plan(batch, cluster=cluster, cost=cost, options=options).predicted_s
    return seconds, seconds / lower_bound(batch, cluster=cluster, cost=cost, constraints=constraints)


def in_pairs(batch: Sequences) -> Sequences:
    """The same sequences, of which each two that follow one another in the draw stay together, as preferences do."""
    return [replace(sequence, unit=sequence.id // 2) for sequence in batch]


def _print(
    rows: Sequence[str], *, ratios: dict[tuple[str, str], list[float]], gaps: dict[tuple[str, str], list[float]]
) -> None:
    heads = ["", *CONSTRAINTS, "gap, free", "gap, megatron"]
    lines = [heads, ["---", *["--:"] * (len(heads) - 1)]]
    for name in rows:
        cells = [f"{np.mean(ratios[name, label]):.3f} ({max(ratios[name, label]):.3f})" for label in CONSTRAINTS]
        cells += [f"{statistics.fmean(gaps[name, label]):.3f}" for label in ("free", "megatron")]
        lines.append([name, *cells])
    sys.stdout.write("\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n\n")


def batch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `cases` reads, and those of the cost model."""
    parser.add_argument("--sequences-per-rank", type=int, default=8)
    parser.add_argument("--max-seqlen", type=int, default=131_072)
    parser.add_argument("--max-tokens-per-rank", type=int, default=16_384)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--seed", type=int, default=0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", default=FAMILIES, help="files with one length a line, or dist:NAME")
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument("--batches", type=int, default=4, help="of each family and number of ranks")
    batch_arguments(parser)
    return parser


if __name__ == "__main__":
    main()
