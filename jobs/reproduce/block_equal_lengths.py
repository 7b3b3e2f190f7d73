"""Figure 10 of FCP with blocks: attention MFU where all sequences are equally long, so that loads are level.

    python jobs/reproduce/block_equal_lengths.py
    python jobs/reproduce/block_equal_lengths.py --ranks 64 --tokens 2048 32768 --json figure10.json

The paper takes the mean length of its data, which it does not state. Ours is the mean of each distribution, or what
`--tokens` says. Simulated MFU of attention, forward and backward, relative to one kernel's on the same sequences.
"""

import sys
from collections.abc import Sequence

from attention import LENGTHS, SHOWN, STRATEGIES, bench_of, compared, parser_of
from tables import exit_code, show, table, write_json

from rayfcp.compare.distributions import distribution
from rayfcp.compare.lengths import DISTRIBUTION, read_lengths

SAMPLE = 1 << 20
COLUMNS = (
    ("length", "length", "d"),
    ("ranks", "ranks", "d"),
    *((name, name, ".3f") for name in SHOWN),
)


def main(argv: Sequence[str] | None = None) -> None:
    """A row for each length and number of ranks."""
    parser = parser_of(__doc__, lengths=LENGTHS)
    parser.add_argument("--tokens", type=int, nargs="+", help="lengths (default: the means of --lengths)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 128], help="default: 16 64 128")
    args = parser.parse_args(argv)
    rows = []
    for length in args.tokens or [_mean(source, seed=args.seed) for source in args.lengths]:
        for num_ranks in args.ranks:
            count = max(round(num_ranks * args.tokens_per_rank / length), 1)
            found = compared(STRATEGIES, (length,) * count, bench=bench_of(args, num_ranks=num_ranks))
            rows.append({"length": length, "ranks": num_ranks, **{name: each.mfu for name, each in found.items()}})
    show(f"{args.hardware}, {args.tokens_per_rank} tokens a rank\n")
    show(table(rows, COLUMNS))
    show("paper: FCP above 0.9 at every number of ranks\n")
    write_json(args.json, args=args, rows=rows)


def _mean(source: str, *, seed: int) -> int:
    if source.startswith(DISTRIBUTION):
        lengths = distribution(source.removeprefix(DISTRIBUTION)).sample(SAMPLE, seed=seed)
    else:
        lengths = read_lengths(source)
    return round(float(lengths.mean()))


if __name__ == "__main__":
    sys.exit(exit_code(main))
