"""Figures 11 and 13 to 16 of FCP with blocks: attention MFU by ranks, tokens a rank, lengths and kind of device.

    python jobs/reproduce/block_scaling.py
    python jobs/reproduce/block_scaling.py --hardware gpu-y --forward
    python jobs/reproduce/block_scaling.py --ranks 128 --rank-tokens 16384 65536 --lengths my_lengths.txt

Simulated MFU of attention, forward and backward together (`--forward`: of forward alone), relative to one kernel's on
the same sequences, means over batches. `wlb` is the better of ring and bytescale by prediction. `over best`, `over
worst`: how many times higher flex-block's MFU is than that of the best and the worst of the four baselines, which are
named.
`priced`: baselines whose figure is the cost model's, since they are too large to simulate.
"""

import sys
from collections.abc import Sequence
from typing import Any

from attention import SHOWN, STRATEGIES, comparisons_of, lead, parser_of, priced
from tables import exit_code, lengths_name, show, table, write_json

COLUMNS = (
    ("lengths", "lengths", "s"),
    ("ranks", "ranks", "d"),
    ("tokens", "rank_tokens", "d"),
    *((name, name, ".3f") for name in SHOWN),
    ("best", "best", "s"),
    ("over best", "over_best", ".2f"),
    ("worst", "worst", "s"),
    ("over worst", "over_worst", ".2f"),
    ("priced", "priced", "s"),
)


def main(argv: Sequence[str] | None = None) -> None:
    """A row for each source of lengths and number of ranks."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 32, 64, 128, 256], help="default: 16 to 256")
    parser.add_argument("--rank-tokens", type=int, nargs="+", help="several in place of --tokens-per-rank")
    parser.add_argument("--forward", action="store_true", help="MFU of the forward pass")
    parser.add_argument(
        "--max-microbatches", type=int, default=0, help="microbatches that bytescale may use beyond one (default: 0)"
    )
    args = parser.parse_args(argv)
    rows = [
        _row(args, source, num_ranks, rank_tokens)
        for source in args.lengths
        for num_ranks in args.ranks
        for rank_tokens in args.rank_tokens or [args.tokens_per_rank]
    ]
    show(f"{args.hardware}, {'forward' if args.forward else 'forward and backward'}\n")
    show(table(rows, COLUMNS))
    show(_summary(rows))
    write_json(args.json, args=args, rows=rows)


def _row(args: Any, source: str, num_ranks: int, rank_tokens: int) -> dict[str, Any]:
    found = comparisons_of(args, STRATEGIES, source=source, num_ranks=num_ranks, tokens_per_rank=rank_tokens)
    mfu = {name: trial.forward_mfu if args.forward else trial.mfu for name, trial in found.items()}
    return {
        "lengths": lengths_name(source),
        "ranks": num_ranks,
        "rank_tokens": rank_tokens,
        **mfu,
        **lead(mfu),
        "priced": priced(found),
    }


def _summary(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["paper: 1.13 to 2.21 times the baselines' MFU"]
    for num_ranks in sorted({row["ranks"] for row in rows}):
        same = [row for row in rows if row["ranks"] == num_ranks]
        best, worst = (min(row[key] for row in same) for key in ("over_best", "over_worst"))
        lines.append(f"{num_ranks} ranks: at least {best:.2f} times the best baseline, {worst:.2f} times the worst")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(exit_code(main))
