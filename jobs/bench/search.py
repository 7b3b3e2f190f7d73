"""What the joint search gains from more moves, wider spaces of plans and both primitives, and what that costs.

    python -m jobs.bench.search --lengths wikipedia.txt code.txt dist:github dist:commoncrawl

For every number of ranks and model, over batches of all lengths, in % of predicted step time (below 0: faster), the
mean and the worst batch: the moves of `--moves` against 300,000; any degree against powers of two; both primitives
against each alone. `gap`: above the lower bound. `CPU ms`: medians of planning with 300,000 moves and with `--moves`,
without the lower bound. A batch that one primitive cannot hold is left out of its column.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from unittest.mock import patch

import numpy as np

from rayfcp.compare.lengths import draw_batches
from rayfcp.config.models import AUTO_MOVES, PlanConfig
from rayfcp.plan import CostModel, hardware_profile, lower_bound, max_tokens_per_rank, model_profile
from rayfcp.plan.groups import planner
from rayfcp.plan.groups.joint import only
from rayfcp.plan.groups.kernels.price import Prices
from rayfcp.plan.moves import FIRST
from rayfcp.plan.strategies.registry import get
from rayfcp.values import ClusterSpec, InfeasiblePlanError, Primitive, SequenceSpec

BOTH = tuple(each.value for each in Primitive)
FILL = 0.5
"""Of the memory of all ranks: longer sequences are cut."""

Row = dict[str, float]


def main() -> None:
    """Print one line for every number of ranks and model."""
    args = _parser().parse_args()
    for ranks in args.ranks:
        for model in args.models:
            rows = []
            for sequences, cluster, cost in _cases(args, model=model, ranks=ranks):
                rows.append(_row(sequences, cluster, cost=cost, moves=args.moves))
            _print(f"{ranks} ranks, {model}, {len(rows)} batches", rows)


def _cases(
    args: argparse.Namespace, *, model: str, ranks: int
) -> Iterator[tuple[list[SequenceSpec], ClusterSpec, CostModel]]:
    profile, hardware = model_profile(model), hardware_profile(args.hardware)
    sizes = {"bytes_per_element": hardware.dtype_bytes, "reduce_every": "step"}
    cost = CostModel.from_profiles(profile, hardware, num_ranks=ranks, **sizes)
    room = max_tokens_per_rank(
        profile, num_devices=ranks, memory_bytes=hardware.memory_bytes, recomputed_layers=0, **sizes
    )
    longest = min(args.max_seqlen, int(FILL * ranks * room))
    for source in args.lengths:
        for batch in draw_batches(
            source, num_batches=args.batches, global_batch=args.sequences, max_seqlen=longest, seed=args.seed
        ):
            yield list(batch), ClusterSpec(num_ranks=ranks, max_tokens_per_rank=room), cost


def _row(sequences: list[SequenceSpec], cluster: ClusterSpec, *, cost: CostModel, moves: int | str) -> Row:
    """Seconds of plans, relative, and milliseconds of planning."""

    def planned(primitives: Sequence[str] = BOTH, *, moves: int | str = moves) -> tuple[float, float]:
        options = PlanConfig.model_validate({"primitives": primitives, "search_moves": moves})
        start_s = time.process_time()
        try:
            proposal = get("flex-ring").plan(sequences, cluster=cluster, cost=cost, options=options)
        except InfeasiblePlanError:
            return math.inf, 0.0
        return proposal.predicted_s, 1e3 * (time.process_time() - start_s)

    best_s, best_ms = planned()
    few_s, few_ms = planned(moves=FIRST)
    with patch.object(planner, "prices_of", _powers_of_two):
        powers_s, _ = planned()
    alone = {each: best_s / planned([each])[0] - 1 for each in BOTH}
    bound_s = lower_bound(sequences, cluster=cluster, cost=cost, primitives=tuple(Primitive))
    return {"moves": best_s / few_s - 1, "degrees": best_s / powers_s - 1, **alone} | {
        "gap": best_s / bound_s - 1,
        "few_ms": few_ms,
        "ms": best_ms,
    }


_prices_of = planner.prices_of


def _powers_of_two(cluster: ClusterSpec, cost: CostModel, **options: object) -> Prices:
    prices = _prices_of(cluster, cost, **options)
    degrees = np.arange(prices.num_degrees)
    return only(prices, np.broadcast_to(degrees & (degrees - 1) == 0, (prices.num_primitives, len(degrees))))


def _print(name: str, rows: list[Row]) -> None:
    parts = []
    for column in ("moves", "degrees", *BOTH, "gap"):
        values = [100 * row[column] for row in rows if row[column] > -1]
        parts.append(f"{column} {statistics.mean(values):+.2f} (worst {max(values):+.2f})")
    times = [f"{statistics.median(row[column] for row in rows):.0f}" for column in ("few_ms", "ms")]
    sys.stdout.write(f"{name}: {'; '.join(parts)}; CPU ms {' and '.join(times)}\n")
    sys.stdout.flush()


def _moves(text: str) -> int | str:
    return text if text == AUTO_MOVES else int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", required=True, help="files with one length a line, or dist:NAME")
    parser.add_argument("--models", nargs="+", default=("gpt-7b", "qwen3-8b"))
    parser.add_argument("--ranks", nargs="+", type=int, default=(8, 16, 32, 64))
    parser.add_argument("--moves", type=_moves, default=AUTO_MOVES, help="auto or a number")
    parser.add_argument("--batches", type=int, default=12, help="of each lengths")
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--max-seqlen", type=int, default=131_072)
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    main()
