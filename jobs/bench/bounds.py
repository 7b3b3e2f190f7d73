"""Plans of the batches of a file of lengths, beside a bound that is proven for each: what the scripts of such bounds
share."""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Protocol

from rayfcp.compare.lengths import draw_batches
from rayfcp.config.models import PlanConfig
from rayfcp.plan import CostModel, hardware_profile, lower_bound, max_tokens_per_rank, model_profile, plan_batch
from rayfcp.plan.moves import FIRST
from rayfcp.values import ClusterSpec, Primitive, SequenceSpec


class Bound(Protocol):
    """Seconds that no plan of groups of these primitives gets below, given that one takes `best_s`."""

    def __call__(
        self,
        sequences: list[SequenceSpec],
        *,
        cluster: ClusterSpec,
        cost: CostModel,
        primitives: tuple[Primitive, ...],
        best_s: float,
    ) -> float: ...


def print_ratios(args: argparse.Namespace, *, bound: Bound) -> None:
    """Print the figures of every batch as soon as they are known, and their means."""
    model, hardware = model_profile(args.model), hardware_profile(args.hardware)
    sizes = {"bytes_per_element": hardware.dtype_bytes, "reduce_every": args.reduce_every}
    cost = CostModel.from_profiles(model, hardware, num_ranks=args.ranks, **sizes)
    room = args.max_tokens_per_rank or max_tokens_per_rank(
        model, num_devices=args.ranks, memory_bytes=hardware.memory_bytes, recomputed_layers=0, **sizes
    )
    cluster = ClusterSpec(num_ranks=args.ranks, max_tokens_per_rank=room)
    options = PlanConfig(search_moves=args.search_moves, primitives=args.primitives)
    used = tuple(Primitive(each) for each in args.primitives)
    drawn = draw_batches(
        str(args.lengths),
        num_batches=args.batches,
        global_batch=args.sequences,
        max_seqlen=args.max_seqlen,
        seed=args.seed,
    )
    rows = []
    for number, sequences in enumerate(map(list, drawn)):
        plan_s = plan_batch(sequences, cluster=cluster, cost=cost, options=options).predicted_s
        bound_s = lower_bound(sequences, cluster=cluster, cost=cost, primitives=used)
        proven_s = max(bound(sequences, cluster=cluster, cost=cost, primitives=used, best_s=plan_s), bound_s)
        rows.append((plan_s / bound_s, proven_s / bound_s, plan_s / proven_s))
        _log(f"batch {number}", rows[-1])
    _log("mean", tuple(statistics.mean(column) for column in zip(*rows, strict=True)))


def _log(name: str, ratios: tuple[float, ...]) -> None:
    sys.stdout.write(
        "{}: plan / lower bound {:.4f}, proven / lower bound {:.4f}, plan / proven {:.4f}\n".format(name, *ratios)
    )
    sys.stdout.flush()


def parser(description: str | None, *, batches: int) -> argparse.ArgumentParser:
    """Parser of options of the batches, the machine and what plans may use; `batches` by default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, required=True, help="file with one length a line")
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--max-tokens-per-rank", type=int, help="replaces the memory model")
    parser.add_argument("--primitives", nargs="+", choices=("ring", "ulysses"), default=("ring", "ulysses"))
    parser.add_argument("--reduce-every", choices=("microbatch", "step"), default="microbatch")
    parser.add_argument("--batches", type=int, default=batches)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--search-moves", type=int, default=FIRST)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--hardware", default="ascend-910c")
    parser.add_argument("--max-seqlen", type=int, default=131_072)
    return parser
